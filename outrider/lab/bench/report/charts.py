"""The charts of a page: what they show, the same in words, the meaning of each mark, and where it lies.

`template/charts.html` draws them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outrider.core.intervals import Interval
from outrider.lab.bench import stats
from outrider.lab.bench.report.analysis import PHASES, CategoryResult, SettingResult
from outrider.lab.bench.report.format import amount, bounds, duration, factor, interval

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


MOST_ROWS, MOST_DEPTH = 24, 16
LATENCIES = {
    "e2el": ("The whole answer", "Seconds from the request to the last token."),
    "ttft": ("The first token", "Seconds from the request to the first token."),
    "itl": ("Between arrivals", "Seconds from one arrival, a step, to the next."),
    "tpot": ("Per token", "Seconds after the first token, divided by the number of later tokens."),
}


@dataclass(frozen=True)
class ChartRow:
    """A line of a chart: its name, the drawing, the number as text. group: a heading above the line."""

    label: str
    drawing: str
    value: str = ""
    group: str = ""


@dataclass(frozen=True)
class Chart:
    """note: how to read it. legend: symbols, see `key` of `draw`, and their meaning."""

    title: str
    rows: Sequence[ChartRow]
    axis: str = ""
    note: str = ""
    legend: Sequence[tuple[str, str]] = ()


def speeds(results: Sequence[SettingResult]) -> Chart | None:
    """Tokens per second of each setting."""
    shown = [(r, r.rate) for r in results if r.rate is not None]
    if not shown:
        return None
    scale = around([_ends(rate)[1] for _, rate in shown], zero=True)
    rows = []
    for r, rate in shown:
        said = f"{r.name}: {amount(rate.value)} tokens per second, interval {bounds(rate)}"
        drawing = draw.bar(scale, rate.value, *_ends(rate), said)
        rows.append(ChartRow(r.name, drawing, amount(rate.value)))
    legend = [(draw.key("bar"), "measured"), (draw.key("whisker"), "95 % interval")]
    return Chart(
        "Tokens per second", rows, _axis(scale), "All tokens divided by all seconds, prefill included.", legend
    )


def speedups(results: Sequence[SettingResult]) -> Chart | None:
    """The ratio to the baseline for each prompt."""
    shown = [(r, r.ratio) for r in results if r.ratio is not None and r.prompts]
    if not shown:
        return None
    ends = (v for r, ratio in shown for v in (*r.prompts.values(), *_ends(ratio)))
    scale = around([1.0, *ends], log=True)
    rows = []
    for r, ratio in shown:
        values = list(r.prompts.values())
        said = f"{r.name}: {factor(ratio.value)} times as fast, {interval(ratio)}; {len(values)} prompts from "
        said += f"{factor(min(values))} to {factor(max(values))}, {sum(v < 1 for v in values)} of them slower"
        drawing = draw.dots(scale, values, ratio.value, *_ends(ratio), said)
        rows.append(ChartRow(r.name, drawing, f"{factor(ratio.value)} ×"))
    legend = [
        (draw.key("dot"), "a prompt"),
        (draw.key("whole"), "all together"),
        (draw.key("whisker"), "95 % interval"),
    ]
    legend += [(draw.key("reference"), f"as fast as {results[0].name}")]
    note = f"Speed of each prompt over that of {results[0].name}. Equal ratios have equal distances."
    return Chart("Speedup of each prompt", rows, _axis(scale, "×"), note, legend)


def latencies(results: Sequence[SettingResult]) -> list[Chart]:
    """Distributions of the times that a user waits."""
    times = {r.name: stats.times(r.answers) for r in results}
    drawn = []
    for what, (title, note) in LATENCIES.items():
        known = {name: [v for v in t[what] if v > 0] for name, t in times.items()}
        known = {name: values for name, values in known.items() if values}
        if not known:
            continue
        scale, rows = around((v for values in known.values() for v in values), log=True), []
        for name, values in known.items():
            marks = {f"p{p}": stats.percentile(values, p) for p in stats.PERCENTILES}
            said = ", ".join(f"{p} {duration(v)}" for p, v in marks.items())
            p50, p90, p99 = (duration(v) for v in marks.values())
            value = f"{p50}\np90 {p90}, p99 {p99}"
            rows.append(ChartRow(name, draw.spread(scale, values, marks, f"{name}: {said}"), value))
        ticks = {t: f"{t:g} s" if t >= 1 else f"{1000 * t:g} ms" for t in _rounded(scale.ticks())}
        drawn.append(Chart(title, rows, draw.axis(scale, ticks), note))
    return drawn


def acceptance(results: Sequence[SettingResult]) -> Chart | None:
    """Share of all steps that accepted a draft token at each depth."""
    shown = [(r, r.acceptance) for r in results if r.acceptance and r.acceptance.by_depth]
    if not shown:
        return None
    most = min(max(len(a.by_depth) for _, a in shown), MOST_DEPTH)
    rows = []
    for r, a in shown:
        said = f"{r.name}: " + ", ".join(f"{share:.0%} at depth {j}" for j, share in enumerate(a.by_depth, 1))
        rows.append(ChartRow(r.name, draw.columns(a.by_depth[:most], most, said), f"{a.length:.2f} a step"))
    note = "Share of all steps that accepted at least so many draft tokens."
    return Chart("Acceptance by depth", rows, note=note)


def by_category(categories: Sequence[CategoryResult], baseline: str) -> Chart | None:
    """Speedup within each category of prompts."""
    drawn = [(c, c.ratio) for c in categories if c.ratio is not None][:MOST_ROWS]
    if not drawn:
        return None
    scale, rows, shown = around([1.0, *(v for c, _ in drawn for v in c.ratios)], log=True), [], set[str]()
    for c, ratio in drawn:
        speed = factor(ratio.value)
        said = f"{c.category}, {c.setting}: {speed} times as fast, {interval(ratio)}, {len(c.ratios)} prompts"
        drawing = draw.dots(scale, c.ratios, ratio.value, *_ends(ratio), said)
        rows.append(ChartRow(c.setting, drawing, f"{speed} ×", "" if c.category in shown else c.category))
        shown.add(c.category)
    note = f"Speed over that of {baseline}. The dots are prompts, as above."
    return Chart("Speedup by category", rows, _axis(scale, "×"), note)


def time_by_phase(results: Sequence[SettingResult]) -> Chart | None:
    """Milliseconds per token by phase."""
    shown = [r for r in results if r.phases]
    if not shown:
        return None
    scale, rows = around([1000 * r.per_token for r in shown], zero=True), []
    for r in shown:
        parts = {n: 1000 * t for n, t in r.phases.items()}
        said = f"{r.name}: {amount(1000 * r.per_token)} ms per token: "
        said += ", ".join(f"{n} {amount(1000 * t)}" for n, t in r.phases.items())
        rows.append(ChartRow(r.name, draw.stack(scale, parts, said), f"{amount(1000 * r.per_token)} ms"))
    legend = [(draw.key(f"part-{n}"), n) for n in PHASES if any(n in r.phases for r in shown)]
    return Chart("Time per token", rows, _axis(scale, " ms"), "By phase of the step.", legend)


def _ends(found: Interval) -> tuple[float, float]:
    """Of the interval's line. One prompt has no interval, so its line has no length."""
    return (found.low, found.high) if isfinite(found.high) else (found.value, found.value)


def _axis(scale: Scale, unit: str = "") -> str:
    return draw.axis(scale, {t: f"{t:g}{unit}" for t in _rounded(scale.ticks())})


def _rounded(ticks: Iterable[float]) -> list[float]:
    return [float(f"{t:.6g}") for t in ticks]
