"""Fill-in-the-middle: the prompt of a model that writes what stands between two texts, as its training showed them.

Fried et al., arXiv 2204.05999 and Bavarian et al., arXiv 2207.14255: first the text before the gap, then the one after
it, then the middle. The text after the gap is in the prompt, so drafters that look there find it when the answer meets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

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


Marks = tuple[int, int, int]


def gap_marks(tokenizer: Any) -> Marks | None:
    """The token ids of a tokenizer's marks of a gap, as in `MARKS`; None if it has none."""
    found = (_known(tokenizer, names) for names in MARKS if tokenizer is not None)
    return next((cast("Marks", tuple(ids)) for ids in found if len(ids) == 3), None)


def _known(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """The ids of those names that are tokens. A name that is none has no id, or that of the unknown token."""
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    return [i for name, i in ids if i is not None and tokenizer.convert_ids_to_tokens(i) == name]


def in_order(tokens: Sequence[int], marks: Marks | None) -> list[int]:
    """The same tokens with the text after the gap first, then the one before it and what goes on it. Unchanged without a gap."""
    text = list(tokens)
    places, end = list[int](), len(text)
    for mark in reversed(marks or ()):
        if mark not in text[:end]:
            return text
        end -= 1 + text[:end][::-1].index(mark)
        places.insert(0, end)
    if not places:
        return text
    first, second, third = places
    return text[:first] + text[second : third + 1] + text[first:second] + text[third + 1 :]


@dataclass(frozen=True)
class Infilling:
    """How a tokenizer marks a gap. begin: tokens before all. marks: token ids. ends: the middle ends before one of these."""

    tokenizer: Any
    begin: tuple[int, ...]
    marks: Marks
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> Infilling | None:
        """None for a tokenizer without such tokens."""
        marks = gap_marks(tokenizer)
        if marks is None:
            return None
        opening = tokenizer.bos_token_id
        begin = (opening,) if opening is not None and opening in tokenizer("")["input_ids"] else ()
        return cls(tokenizer, begin, marks, (*_known(tokenizer, ENDS), *marks))

    def prompt(self, before: str, after: str) -> list[int]:
        """The token ids for a gap between two texts. Raises ValueError."""
        first, second, third = self.marks
        return [*self.begin, first, *self._ids(before), second, *self._ids(after), third]

    def _ids(self, text: str) -> list[int]:
        marks = set(self.ends)
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if marks & set(ids):
            raise ValueError(
                "the text around the gap has a mark of the gap itself, such as <|fim_middle|>; leave it out"
            )
        return ids
