"""The end of an error message about an unknown name: the name that was probably meant. Imports nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest known name, or "" if no name is close. The sentence goes on behind it."""
    close = difflib.get_close_matches(word, [*known], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
