"""Small charts as inline SVG.

Horizontal positions are percentages. A chart is therefore as wide as its page, its text keeps its size on a phone, and
nothing moves after loading. Colours are classes of the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

EMPTY = Markup("")
# Pixels.
ROW, AXIS, RADIUS = 34, 22, 3.5
# Of one row. More dots would cover each other.
MOST_DOTS = 300


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


def axis(scale: Scale, text: Mapping[float, str]) -> Markup:
    """The numbers below a chart. text: label by position."""
    marks = []
    for tick, shown in text.items():
        x = scale.at(tick)
        side = "start" if x < 3 else "end" if x > 97 else "middle"
        marks.append(_tag("text", shown, x=_percent(x), y=15, text_anchor=side))
    return _svg(marks, AXIS, "tick")


def bar(scale: Scale, value: float, low: float, high: float, what: str, expected: float | None = None) -> Markup:
    """A bar from zero to a value, the line of its interval, and a diamond at the expected value."""
    marks = [*_grid(scale), _span(scale, scale.low, value, "bar", 9, ROW - 18), *_whisker(scale, low, high, ROW / 2)]
    if expected is not None:
        marks.append(_diamond(scale.at(expected), ROW / 2))
    return _svg(marks, ROW, "", what)


def dots(
    scale: Scale,
    values: Sequence[float],
    value: float | None,
    low: float,
    high: float,
    what: str,
    line: float | None = None,
) -> Markup:
    """A dot for each value, a diamond and an interval for all together above them, and a reference line."""
    marks = _grid(scale)
    if line is not None:
        marks.append(_vertical(scale.at(line), "reference", 0, ROW + 14))
    stacked: dict[int, int] = {}
    for x in _thin(sorted(values)):
        place = round(scale.at(x) / 0.9)
        level = stacked[place] = stacked.get(place, -1) + 1
        offset = (level + 1) // 2 * (3.2 if level % 2 else -3.2)
        y = ROW - 1 + max(min(offset, 11), -9)
        marks.append(_tag("circle", cx=_percent(scale.at(x)), cy=_short(y), r=RADIUS, class_="dot"))
    if value is not None:
        marks += [*_whisker(scale, low, high, 10), _diamond(scale.at(value), 10, "whole")]
    return _svg(marks, ROW + 14, "", what)


def spread(scale: Scale, values: Sequence[float], marks: Mapping[str, float], what: str, bins: int = 56) -> Markup:
    """A histogram, with vertical lines at the marks; the first mark is a full line."""
    counts = [0] * bins
    for x in values:
        counts[min(int(scale.at(x) / 100 * bins), bins - 1)] += 1
    top = max(counts)
    parts = _grid(scale)
    for i, count in enumerate(counts):
        if count:
            height = max(round((ROW - 8) * count / top, 1), 1.5)
            x, width = _percent(100 * i / bins), _percent(100 / bins)
            parts.append(_tag("rect", x=x, y=_short(ROW - height), width=width, height=_short(height), class_="count"))
    for i, x in enumerate(marks.values()):
        parts.append(_vertical(scale.at(x), "middle" if i == 0 else "quantile", 2, ROW))
    return _svg(parts, ROW, "", what)


def columns(shares: Sequence[float], most: int, what: str, height: int = 72) -> Markup:
    """A column for each share of 1, numbered from 1, with space for `most` columns."""
    slot = 100 / max(most, 1)
    parts = [_tag("line", x1="0%", x2="100%", y1=height, y2=height, class_="grid")]
    for i, share in enumerate(shares):
        full = round(share * (height - 16), 1)
        middle = _percent((i + 0.5) * slot)
        x, width = _percent((i + 0.14) * slot), _percent(0.72 * slot)
        parts.append(_tag("rect", x=x, y=_short(height - full), width=width, height=_short(full), class_="bar"))
        parts.append(_tag("text", f"{share:.0%}", x=middle, y=_short(height - full - 4), text_anchor="middle"))
        parts.append(_tag("text", str(i + 1), x=middle, y=height + 15, text_anchor="middle", class_="tick"))
    return _svg(parts, height + 20, "dense" if most > 10 else "", what)


def stack(scale: Scale, parts: Mapping[str, float], marks: Mapping[str, float], what: str) -> Markup:
    """Parts of a sum side by side, each with the class `part-NAME`, and vertical lines at the marks."""
    drawn, start = _grid(scale), 0.0
    for name, size in parts.items():
        left, right = scale.at(start), scale.at(start + size)
        start += size
        if right - left > 0.05:
            drawn.append(_span(scale, start - size, start, f"part-{name}", 7, ROW - 14))
        if right - left > 16:
            drawn.append(_tag("text", name, x=_percent(left), dx=6, y=21, class_=f"in-{name}"))
    for kind, x in marks.items():
        drawn.append(_vertical(scale.at(x), kind, 1, ROW - 1))
    return _svg(drawn, ROW, "", what)


def key(kind: str) -> Markup:
    """A symbol for a legend, drawn as in the chart."""
    if kind in ("whole", "expected"):
        return _svg([_diamond(50, 8, kind)], 16, "key")
    if kind == "dot":
        return _svg([_tag("circle", cx="50%", cy=8, r=RADIUS, class_="dot")], 16, "key")
    if kind == "whisker":
        return _svg(_whisker(Scale(0, 1), 0.05, 0.95, 8), 16, "key")
    if kind in ("bar", "count") or kind.startswith("part-"):
        return _svg([_tag("rect", x="10%", y=2, width="80%", height=12, class_=kind)], 16, "key")
    return _svg([_vertical(50, kind, 0, 16)], 16, "key")


def _grid(scale: Scale) -> list[Markup]:
    return [_vertical(scale.at(t), "grid", 0, "100%") for t in scale.ticks()]


def _vertical(x: float, kind: str, top: float, bottom: float | str) -> Markup:
    return _tag("line", x1=_percent(x), x2=_percent(x), y1=top, y2=bottom, class_=kind)


def _span(scale: Scale, low: float, high: float, kind: str, y: float, height: float) -> Markup:
    left, right = scale.at(low), scale.at(high)
    return _tag("rect", x=_percent(left), width=_percent(max(right - left, 0.2)), y=y, height=height, class_=kind)


def _whisker(scale: Scale, low: float, high: float, y: float) -> list[Markup]:
    left, right = _percent(scale.at(low)), _percent(scale.at(high))
    inside = [x for x in (low, high) if scale.low <= x <= scale.high]  # an end outside of the scale has no tick
    ends = [_vertical(scale.at(x), "whisker", y - 4, y + 4) for x in inside]
    return [_tag("line", x1=left, x2=right, y1=y, y2=y, class_="whisker"), *ends]


def _diamond(x: float, y: float, kind: str = "expected") -> Markup:
    """A path has no percentages, so a nested SVG element places it."""
    return _tag("svg", _tag("path", d="M0-6 6 0 0 6-6 0Z", class_=kind), x=_percent(x), y=_short(y), overflow="visible")


def _thin(values: Sequence[float]) -> Sequence[float]:
    """At most MOST_DOTS values, evenly by rank."""
    if len(values) <= MOST_DOTS:
        return values
    return [values[round(i * (len(values) - 1) / (MOST_DOTS - 1))] for i in range(MOST_DOTS)]


def _svg(parts: Iterable[Markup], height: int, kind: str = "", what: str = "") -> Markup:
    """what: the chart in words, for screen readers. Without words it is decoration that they skip."""
    said = {"role": "img", "aria_label": what} if what else {"aria_hidden": "true"}
    return _tag("svg", Markup("").join(parts), height=height, **({"class_": kind} if kind else {}), **said)


def _tag(name: str, inner: str = "", **attributes: object) -> Markup:
    words = "".join(f' {k.rstrip("_").replace("_", "-")}="{escape(v)}"' for k, v in attributes.items())
    return Markup(f"<{name}{words}>{escape(inner)}</{name}>")


def _percent(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".") + "%"


def _short(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")
