"""How long answers are: what is gained until the end of an answer must cover what drafting costs at its beginning."""

from __future__ import annotations

from collections import deque

_MEMORY = 32  # answers that are remembered
_USUAL, _WEIGHT = 128.0, 2  # tokens of an answer before any was seen, and the number of answers that this counts for
_LEAST = 16.0  # tokens that are left of an answer that outgrows this


class AnswerLengths:
    """Expected tokens until the end of an answer, from the lengths of those that ended lately. Counts only, no clock."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=_MEMORY)

    def observe(self, length: int) -> None:
        """An answer has ended after so many tokens."""
        self._ended.append(length)

    def remaining(self, written: int) -> float:
        """The mean of what was left of earlier answers when they had this length. An answer that outgrows all of them is
        expected to grow by half.

        written: tokens of this answer so far.
        """
        usual = max(_USUAL - written, written / 2, _LEAST)
        left = [length - written for length in self._ended if length > written]
        return (sum(left) + _WEIGHT * usual) / (len(left) + _WEIGHT)
