"""The chat template of a served model."""

from __future__ import annotations

from pathlib import Path

from outrider.engine.llm import LLM

PLAIN = Path(__file__).with_name("assets") / "plain.jinja"


def set_chat_template(llm: LLM, template: str | None) -> str | None:
    """Give the model this template, if there is one. Returns a note for the user, or None.

    A built-in model that has none gets a plain one, so that every chat client works: messages are comments, and answers
    are code. Raises ValueError for a model without a tokenizer.
    """
    tokenizer = llm.tokenizer
    if template is not None:
        if tokenizer is None:
            raise ValueError(
                f"{llm.loaded.name} has no tokenizer, so it cannot use a chat template; leave out --chat-template"
            )
        tokenizer.chat_template = template
    elif tokenizer is not None and not tokenizer.chat_template and llm.loaded.name.startswith("builtin:"):
        tokenizer.chat_template = PLAIN.read_text(encoding="utf-8")
        return "it has no chat template, so chat messages reach it as comments before code"
    return None
