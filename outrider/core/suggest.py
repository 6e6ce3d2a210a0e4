"""The end of an error message about an unknown name: the name that was probably meant. Imports nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return " (did you mean 'x'?)" for the closest known name, or "" if no name is close. The sentence goes on behind it.

    cutoff: the lowest similarity that counts, from 0 to 1 (`difflib.get_close_matches`).
    """
    close = difflib.get_close_matches(word, [*known], n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""
