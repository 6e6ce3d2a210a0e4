"""The charts of a page: how prompts and times are spread, which no table shows. `template/charts.html` draws them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outrider.core.intervals import Interval
from outrider_lab.bench import stats
from outrider_lab.bench.report.analysis import SettingResult
from outrider_lab.bench.report.format import duration, factor, interval

MOST_DOTS = 300  # of one row; more would cover each other


@dataclass(frozen=True)
class Scale:
    """Maps positive numbers to percentages of the width. Equal ratios have equal distances."""

    low: float
    high: float

    @staticmethod
    def around(values: Iterable[float]) -> Scale:
        """A scale for all these values, with a margin at the ends. Those that are not positive and finite do not count."""
        known = [v for v in values if math.isfinite(v) and v > 0] or [1.0]
        return Scale(min(known) / 1.08, max(known) * 1.08)

    def at(self, x: float) -> float:
        low, high, x = (math.log(max(v, 1e-12)) for v in (self.low, self.high, x))
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
        steps = (1, 2, 5) if self.high / self.low > 4 else (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [float(f"{s * 10.0**d:.6g}") for d in decades for s in steps]
        within = [t for t in found if self.low * 0.999 <= t <= self.high * 1.001]
        return within[:: math.ceil(len(within) / 7)] if within else [self.low]


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
"""The macros of `charts.html`: axis, dots, spread and key. Each returns markup."""

LATENCIES = {
    "e2el": ("The whole answer", "Seconds from the request to the last token."),
    "ttft": ("The first token", "Seconds from the request to the first token."),
    "itl": ("Between arrivals", "Seconds from one arrival, a step, to the next."),
    "tpot": ("Per token", "Seconds after the first token, divided by the number of later tokens."),
}


@dataclass(frozen=True)
class Chart:
    """rows: the name of a setting, its drawing, the number as text. axis: a drawing. note: how to read it. legend: symbols, see
    `key` of `draw`, and their meaning."""

    title: str
    rows: Sequence[tuple[str, str, str]]
    axis: str
    note: str
    legend: Sequence[tuple[str, str]] = ()


def speedups(results: Sequence[SettingResult]) -> Chart | None:
    """The ratio to the baseline for each prompt."""
    shown = [(r, r.ratio) for r in results if r.ratio is not None and r.prompts]
    if not shown:
        return None
    scale = Scale.around([1.0, *(v for r, ratio in shown for v in (*r.prompts.values(), *_ends(ratio)))])
    rows = list[tuple[str, str, str]]()
    for r, ratio in shown:
        values = list(r.prompts.values())
        said = f"{r.name}: {factor(ratio.value)} times as fast, {interval(ratio)}; {len(values)} prompts from "
        said += f"{factor(min(values))} to {factor(max(values))}, {sum(v < 1 for v in values)} of them slower"
        rows.append((r.name, draw.dots(scale, values, ratio.value, *_ends(ratio), said), f"{factor(ratio.value)} ×"))
    symbols = {"dot": "a prompt", "whole": "all together", "whisker": "95 % interval"}
    symbols["reference"] = f"as fast as {results[0].name}"
    axis = draw.axis(scale, {t: f"{t:g}×" for t in scale.ticks()})
    note = f"Speed of each prompt over that of {results[0].name}. Equal ratios have equal distances."
    return Chart("Speedup of each prompt", rows, axis, note, [(draw.key(k), text) for k, text in symbols.items()])


def latencies(results: Sequence[SettingResult]) -> list[Chart]:
    """Distributions of the times that a user waits."""
    times = {r.name: stats.times(r.answers) for r in results}
    drawn = list[Chart]()
    for what, (title, note) in LATENCIES.items():
        known = {name: values for name, t in times.items() if (values := [v for v in t[what] if v > 0])}
        if not known:
            continue
        scale, rows = Scale.around(v for values in known.values() for v in values), list[tuple[str, str, str]]()
        for name, values in known.items():
            marks = {f"p{p}": stats.percentile(values, p) for p in stats.PERCENTILES}
            said = ", ".join(f"{p} {duration(v)}" for p, v in marks.items())
            p50, p90, p99 = (duration(v) for v in marks.values())
            drawing = draw.spread(scale, values, marks, f"{name}: {said}")
            rows.append((name, drawing, f"{p50}\np90 {p90}, p99 {p99}"))
        ticks = {t: f"{t:g} s" if t >= 1 else f"{1000 * t:g} ms" for t in scale.ticks()}
        drawn.append(Chart(title, rows, draw.axis(scale, ticks), note))
    return drawn


def _ends(found: Interval) -> tuple[float, float]:
    """Of the interval's line. One prompt has no interval, so its line has no length."""
    return (found.low, found.high) if math.isfinite(found.high) else (found.value, found.value)
