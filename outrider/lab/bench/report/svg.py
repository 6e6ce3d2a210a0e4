"""The scales of charts, and where their marks lie. `template/charts.html` draws them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

MOST_DOTS = 300  # of one row; more would cover each other


@dataclass(frozen=True)
class Scale:
    """Maps numbers to percentages of the width. log: equal ratios have equal distances; needs low > 0."""

    low: float
    high: float
    log: bool = False

    def at(self, x: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, x = (math.log(max(v, 1e-12)) for v in (low, high, x))
        return min(max(100 * (x - low) / (high - low or 1.0), 0.0), 100.0)

    def stacked(self, values: Iterable[float]) -> list[tuple[float, float]]:
        """Where dots for some values lie: across in percent, and up or down in pixels where others are in the way."""
        stacks, places = Counter[int](), list[tuple[float, float]]()
        for x in map(self.at, _thin(sorted(values))):
            level = stacks[round(x / 0.9)]
            stacks[round(x / 0.9)] += 1
            offset = (level + 1) // 2 * (3.2 if level % 2 else -3.2)
            places.append((x, max(min(offset, 11), -9)))
        return places

    def histogram(self, values: Iterable[float], bins: int = 56) -> list[tuple[float, float, float]]:
        """The columns of a histogram: left edge and width in percent, and the height as a share of the highest one."""
        counts = Counter(min(int(self.at(x) / 100 * bins), bins - 1) for x in values)
        top = max(counts.values())
        return [(100 * i / bins, 100 / bins, n / top) for i, n in sorted(counts.items())]

    def ticks(self) -> list[float]:
        """About five round numbers within the scale."""
        if self.log:
            steps = (1, 2, 5) if self.high / self.low > 4 else (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7)
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [s * 10.0**d for d in decades for s in steps]
        else:
            rough = (self.high - self.low or 1.0) / 4
            size = 10.0 ** math.floor(math.log10(rough))
            step = size * next(s for s in (1, 2, 2.5, 5, 10) if s * size >= rough * 0.999)
            first = math.ceil(self.low / step - 1e-9)
            found = [i * step for i in range(first, first + 8)]
        within = [t for t in found if self.low * 0.999 <= t <= self.high * 1.001]
        return within[:: math.ceil(len(within) / 7)] if within else [self.low]


def around(values: Iterable[float], *, zero: bool = False, log: bool = False) -> Scale:
    """A scale for all these values, with a margin at the ends. zero: it begins at zero."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    if log:
        return Scale(low / 1.08, high * 1.08, True)
    low, high = (0.0, max(high, 0.0)) if zero else (low, high)
    air = (high - low or abs(high) or 1.0) * 0.05
    return Scale(low if zero else low - air, high + air)


def _thin(values: Sequence[float]) -> Sequence[float]:
    """At most MOST_DOTS values, evenly by rank."""
    if len(values) <= MOST_DOTS:
        return values
    return [values[round(i * (len(values) - 1) / (MOST_DOTS - 1))] for i in range(MOST_DOTS)]


def percent(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".") + "%"


def pixels(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


def environment() -> Environment:
    """The templates of the report. What is put into them is text, never markup."""
    folder = FileSystemLoader(Path(__file__).parent / "template")
    made = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"pct": percent, "px": pixels}
    return made


draw: Any = environment().get_template("charts.html").module
"""The macros of `charts.html`: axis, bar, dots, spread, columns, stack and key. Each returns markup."""
