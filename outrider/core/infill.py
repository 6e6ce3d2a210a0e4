"""Fill-in-the-middle: the prompt of a model that writes what stands between two texts, as its training showed them.

Fried et al., arXiv 2204.05999 and Bavarian et al., arXiv 2207.14255: first the text before the gap, then the one after
it, then the middle. The text after the gap is in the prompt, so drafters that look there find it when the answer meets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARKS = (  # before the prefix, before the suffix, before the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
ENDS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<|file_sep|>",
    "<file_sep>",
    "<|repo_name|>",
    "<|file_separator|>",
    "<|endoftext|>",
    "▁<EOT>",
)


@dataclass(frozen=True)
class Infilling:
    """How a tokenizer marks a gap. begin: tokens before all. marks: token ids. ends: the middle ends before one of these."""

    tokenizer: Any
    begin: tuple[int, ...]
    marks: tuple[int, int, int]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> Infilling | None:
        """None for a tokenizer without such tokens."""
        if tokenizer is None:
            return None
        vocab: dict[str, int] = tokenizer.get_vocab()
        found = next((names for names in MARKS if all(name in vocab for name in names)), None)
        if found is None:
            return None
        first, second, third = (vocab[name] for name in found)
        opening = tokenizer.bos_token_id
        begin = (opening,) if opening is not None and opening in tokenizer("")["input_ids"] else ()
        ends = tuple(vocab[name] for name in ENDS if name in vocab)
        return cls(tokenizer, begin, (first, second, third), (*ends, first, second, third))

    def prompt(self, before: str, after: str) -> list[int]:
        """The token ids for a gap between two texts. Raises ValueError."""
        first, second, third = self.marks
        return [*self.begin, first, *self._ids(before), second, *self._ids(after), third]

    def _ids(self, text: str) -> list[int]:
        marks = set(self.ends)
        found = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if marks & set(found):
            raise ValueError(
                "the text around the gap has a mark of the gap itself, such as <|fim_middle|>; leave it out"
            )
        return found
