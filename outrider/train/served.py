"""Texts that a server kept, as answers that a head learns from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.serve.learn.reservoir import kept_texts
from outrider.train.answers import TrainingText


def served_texts(path: Path, length: int) -> Iterator[TrainingText]:
    """The texts of a file, the newest first, so that the latest held-out ones measure the head.

    length: tokens of prompt and answer. Of a longer prompt the end is kept, at most half of the length. Raises FileNotFoundError,
    and ValueError for a file of something else.
    """
    for number, text in enumerate(reversed(list(kept_texts(path)))):
        prompt = text.prompt[-(length // 2) :]
        tokens = (prompt + text.answer)[:length]
        yield TrainingText(number, text.workload, tokens, len(prompt), text.temperature, text.held_out)
