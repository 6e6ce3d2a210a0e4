"""Numbers and lists as text, for tables, charts and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outrider.core.intervals import Interval

_PERCENT_SIGN = "\N{NO-BREAK SPACE}%"


def amount(x: float) -> str:
    """Three significant digits; a question mark for a value that is not finite."""
    if not math.isfinite(x):
        return "?"
    return f"{x:.{max(0, min(2 - math.floor(math.log10(abs(x))), 4))}f}" if x else "0"


def factor(ratio: float) -> str:
    """A ratio of speeds."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}{_PERCENT_SIGN}"


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def duration(seconds: float) -> str:
    """With the unit that gives the shortest text."""
    if seconds >= 1:
        return f"{amount(seconds)} s"
    return f"{amount(1000 * seconds)} ms" if seconds >= 0.001 else f"{amount(1e6 * seconds)} µs"


def bounds(interval: Interval, shown: Callable[[float], str] = amount) -> str:
    """The two ends of an interval."""
    return f"{shown(interval.low)} to {shown(interval.high)}" if math.isfinite(interval.high) else "one prompt"


def interval(ratio: Interval) -> str:
    """The interval of a ratio, for use in a sentence."""
    if not math.isfinite(ratio.high):
        return "one prompt is too few for an interval"
    return f"95{_PERCENT_SIGN} interval {bounds(ratio, factor)}"


def change(ratio: Interval) -> str:
    """A ratio as a percentage, with its interval."""
    if not math.isfinite(ratio.value):
        return "not comparable"
    if not math.isfinite(ratio.high):
        return f"{_signed(ratio.value)} (no interval from one prompt)"
    return f"{_signed(ratio.value)} ({_signed(ratio.low)} to {_signed(ratio.high)})"


def listing(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


def _signed(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")
