"""Whether a grammar takes a text."""

from __future__ import annotations

from outrider import LLM
from outrider.engine.prompts import PromptEncoder
from outrider.serve.grammar import Grammar, Grammars


def accepts(llm: LLM | PromptEncoder, grammars: Grammars, grammar: Grammar, text: str) -> bool:
    """Whether the text is complete. Its letters are tokens of their own: a grammar is of text, not of its tokens."""
    assert llm.tokenizer is not None
    tokens = [t for letter in text for t in llm.tokenizer(letter, add_special_tokens=False)["input_ids"]]
    mask = grammars.mask(grammars.compiled(grammar))
    return bool(mask.allowed(tokens, 0, ())[list(llm.loaded.end_ids)].any())
