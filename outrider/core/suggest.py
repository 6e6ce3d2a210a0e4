"""Words of error messages: the name that was probably meant, and what pydantic found wrong. Imports nothing large."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest known name, or "" if no name is close. The sentence goes on behind it."""
    close = difflib.get_close_matches(word, [*known], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def faults(error: Any) -> list[str]:
    """What pydantic's ValidationError found, each with the place of it."""
    places = [(".".join(map(str, one["loc"])), said(one)) for one in error.errors()]
    return [f"{place}: {why}" if place else why for place, why in places]


def said(one: Any) -> str:
    """The words of one of `ValidationError.errors()`. To pydantic's own it adds the number or text that was given."""
    pydantics, value = one["type"] != "value_error", one.get("input")
    got = f", got {value!r:.60}" if pydantics and isinstance(value, (bool, int, float, str)) else ""
    return one["msg"].removeprefix("Value error, ") + got
