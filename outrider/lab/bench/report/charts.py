"""The charts of a page: what they show, the same in words, and the meaning of each mark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from outrider.core.intervals import Interval
from outrider.lab.bench import stats
from outrider.lab.bench.report import svg
from outrider.lab.bench.report.analysis import PHASES, CategoryResult, SettingResult
from outrider.lab.bench.report.format import amount, bounds, duration, factor, interval
from outrider.lab.bench.report.svg import draw

MOST_ROWS, MOST_DEPTH = 24, 16
LATENCIES = {
    "e2el": ("The whole answer", "Seconds from the request to the last token."),
    "ttft": ("The first token", "Seconds from the request to the first token."),
    "itl": ("Between arrivals", "Seconds from one arrival, a step, to the next."),
    "tpot": ("Per token", "Seconds after the first token, divided by the number of later tokens."),
}
FLOORS = {
    "forwards": "the same forwards, measured alone",
    "memory": "reading the target's weights once a step",
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
    """note: how to read it. legend: symbols, see `svg.key`, and their meaning."""

    title: str
    rows: Sequence[ChartRow]
    axis: str = ""
    note: str = ""
    legend: Sequence[tuple[str, str]] = ()


def speeds(results: Sequence[SettingResult], predicted: Mapping[str, float]) -> Chart | None:
    """Tokens per second of each setting."""
    shown = [(r, r.rate) for r in results if r.rate is not None]
    if not shown:
        return None
    expected = {r.name: predicted[r.name] for r, _ in shown if predicted.get(r.name)}
    scale = svg.around([*(_ends(rate)[1] for _, rate in shown), *expected.values()], zero=True)
    rows = []
    for r, rate in shown:
        said = f"{r.name}: {amount(rate.value)} tokens per second, interval {bounds(rate)}"
        said += f", predicted {amount(expected[r.name])}" if r.name in expected else ""
        drawing = draw.bar(scale, rate.value, *_ends(rate), said, expected.get(r.name))
        rows.append(ChartRow(r.name, drawing, amount(rate.value)))
    legend = [(draw.key("bar"), "measured"), (draw.key("whisker"), "95 % interval")]
    legend += [(draw.key("expected"), "predicted by the cost model")] if expected else []
    return Chart(
        "Tokens per second", rows, _axis(scale), "All tokens divided by all seconds, prefill included.", legend
    )


def speedups(results: Sequence[SettingResult]) -> Chart | None:
    """The ratio to the baseline for each prompt."""
    shown = [(r, r.ratio) for r in results if r.ratio is not None and r.prompts]
    if not shown:
        return None
    ends = (v for r, ratio in shown for v in (*r.prompts.values(), *_ends(ratio)))
    scale = svg.around([1.0, *ends], log=True)
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
        scale, rows = svg.around((v for values in known.values() for v in values), log=True), []
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
    scale, rows, shown = svg.around([1.0, *(v for c, _ in drawn for v in c.ratios)], log=True), [], set[str]()
    for c, ratio in drawn:
        speed = factor(ratio.value)
        said = f"{c.category}, {c.setting}: {speed} times as fast, {interval(ratio)}, {len(c.ratios)} prompts"
        drawing = draw.dots(scale, c.ratios, ratio.value, *_ends(ratio), said)
        rows.append(ChartRow(c.setting, drawing, f"{speed} ×", "" if c.category in shown else c.category))
        shown.add(c.category)
    note = f"Speed over that of {baseline}. The dots are prompts, as above."
    return Chart("Speedup by category", rows, _axis(scale, "×"), note)


def time_by_phase(results: Sequence[SettingResult]) -> Chart | None:
    """Milliseconds per token by phase, with the lower bounds of the machine."""
    shown = [r for r in results if r.phases]
    if not shown:
        return None
    floors = [v for r in shown for v in (r.floor.forwards, r.floor.memory) if v]
    scale = svg.around([1000 * v for v in (*(r.per_token for r in shown), *floors)], zero=True)
    rows, drawn = [], set[str]()
    for r in shown:
        parts = {n: 1000 * t for n, t in r.phases.items()}
        marks = {"forwards": r.floor.forwards, "memory": r.floor.memory}
        known = {name: 1000 * v for name, v in marks.items() if v}
        said = f"{r.name}: {amount(1000 * r.per_token)} ms per token: "
        said += ", ".join(f"{n} {amount(1000 * t)}" for n, t in r.phases.items())
        said += "".join(f"; {n} alone {amount(v)}" for n, v in known.items())
        rows.append(ChartRow(r.name, draw.stack(scale, parts, known, said), f"{amount(1000 * r.per_token)} ms"))
        drawn |= known.keys()
    legend = [(draw.key(f"part-{n}"), n) for n in PHASES if any(n in r.phases for r in shown)]
    legend += [(draw.key(n), text) for n, text in FLOORS.items() if n in drawn]
    return Chart("Time per token", rows, _axis(scale, " ms"), "By phase of the step.", legend)


def _ends(found: Interval) -> tuple[float, float]:
    """Of the interval's line. One prompt has no interval, so its line has no length."""
    return (found.low, found.high) if isfinite(found.high) else (found.value, found.value)


def _axis(scale: svg.Scale, unit: str = "") -> str:
    return draw.axis(scale, {t: f"{t:g}{unit}" for t in _rounded(scale.ticks())})


def _rounded(ticks: Iterable[float]) -> list[float]:
    return [float(f"{t:.6g}") for t in ticks]
