"""The charts of a page, from `figures`: what is drawn, how it reads in words, and what each mark means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.bench import stats
from outrider.bench.report import charts
from outrider.bench.report.analysis import PHASES, Figures, ratio
from outrider.bench.report.charts import Chart, Row, key
from outrider.bench.report.compare import amount
from outrider.bench.report.recommend import between, times
from outrider.bench.run import Run
from outrider.bench.stats import Interval

MOST_ROWS, MOST_DEPTH = 24, 16
WAITS = {
    "e2el": ("The whole answer", "seconds from asking to the last token"),
    "ttft": ("The first token", "seconds from asking to it"),
    "itl": ("Between arrivals", "seconds from what came at once, one step, to the next"),
    "tpot": ("Per token", "seconds of each answer after its first token, by the number of tokens"),
}


def speeds(found: Sequence[Figures], predicted: Mapping[str, float]) -> Chart | None:
    """Tokens per second of each setting."""
    shown = [(f, f.rate) for f in found if f.rate is not None]
    if not shown:
        return None
    expected = {f.name: predicted[f.name] for f, _ in shown if predicted.get(f.name)}
    scale = charts.around([*(_ends(r)[1] for _, r in shown), *expected.values()], zero=True)
    rows = []
    for f, rate in shown:
        said = f"{f.name}: {amount(rate.value)} tokens per second, interval {span(rate)}"
        said += f", expected {amount(expected[f.name])}" if f.name in expected else ""
        picture = charts.bar(scale, rate.value, *_ends(rate), said, expected.get(f.name))
        rows.append(Row(f.name, picture, amount(rate.value)))
    legend = [(key("bar"), "measured"), (key("whisker"), "95 % interval")]
    legend += [(key("expected"), "expected by the cost model")] if expected else []
    return Chart(
        "Tokens per second", rows, _axis(scale), "All tokens over all seconds, reading the prompts included.", legend
    )


def speedups(found: Sequence[Figures]) -> Chart | None:
    """How many times as fast, prompt by prompt."""
    shown = [(f, f.ratio) for f in found if f.ratio is not None and f.prompts]
    if not shown:
        return None
    ends = (v for f, r in shown for v in (*f.prompts.values(), *_ends(r)))
    scale = charts.around([1.0, *ends], log=True)
    rows = []
    for f, whole in shown:
        values = list(f.prompts.values())
        said = f"{f.name}: {times(whole.value)} times as fast, {between(whole)}; {len(values)} prompts from "
        said += f"{times(min(values))} to {times(max(values))}, {sum(v < 1 for v in values)} of them slower"
        picture = charts.dots(scale, values, whole.value, *_ends(whole), said, line=1)
        rows.append(Row(f.name, picture, f"{times(whole.value)} ×"))
    legend = [(key("dot"), "a prompt"), (key("whole"), "all together"), (key("whisker"), "95 % interval")]
    legend += [(key("reference"), f"as fast as {found[0].name}")]
    note = f"Times as fast as {found[0].name}, prompt by prompt. Equal ratios are equally far apart."
    return Chart("Speedup of each prompt", rows, _axis(scale, "×"), note, legend)


def waits(found: Sequence[Figures]) -> list[Chart]:
    """Distributions of what a reader waits for."""
    times = {f.name: stats.times(f.answers) for f in found}
    drawn = []
    for what, (title, note) in WAITS.items():
        known = {name: [v for v in t[what] if v > 0] for name, t in times.items()}
        known = {name: values for name, values in known.items() if values}
        if not known:
            continue
        scale, rows = charts.around((v for values in known.values() for v in values), log=True), []
        for name, values in known.items():
            marks = {f"p{p}": stats.percentile(values, p) for p in stats.PERCENTILES}
            read = ", ".join(f"{p} {seconds(v)}" for p, v in marks.items())
            p50, p90, p99 = (seconds(v) for v in marks.values())
            value = f"{p50}\np90 {p90}, p99 {p99}"
            rows.append(Row(name, charts.spread(scale, values, marks, f"{name}: {read}"), value))
        ticks = {t: f"{t:g} s" if t >= 1 else f"{1000 * t:g} ms" for t in _plain(scale.ticks())}
        drawn.append(Chart(title, rows, charts.axis(scale, ticks), f"{note[0].upper()}{note[1:]}."))
    return drawn


def acceptance(found: Sequence[Figures]) -> Chart | None:
    """Of all steps, how many kept a guess at each depth."""
    shown = [(f, f.acceptance) for f in found if f.acceptance and f.acceptance.by_depth]
    if not shown:
        return None
    most = min(max(len(a.by_depth) for _, a in shown), MOST_DEPTH)
    rows = []
    for f, a in shown:
        said = f"{f.name}: " + ", ".join(f"{share:.0%} at depth {j}" for j, share in enumerate(a.by_depth, 1))
        rows.append(Row(f.name, charts.columns(a.by_depth[:most], most, said), f"{a.length:.2f} a step"))
    return Chart("Acceptance by depth", rows, note="Of all steps, the share that kept so many guesses or more.")


def by_category(run: Run, found: Sequence[Figures]) -> Chart | None:
    """Speedup within each category of prompts."""
    names, rows = stats.categories(run), []
    drawn = list[tuple[str, str, Interval, list[float]]]()
    for name in names if len(names) > 1 else []:
        wanted = {p.id for p in run.prompts if p.category == name}
        base = [s for s in found[0].answers if s.prompt in wanted]
        for f in found[1:]:
            part = ratio([s for s in f.answers if s.prompt in wanted], base)
            if part is not None:
                drawn.append((name, f.name, part, [v for p, v in f.prompts.items() if p in wanted]))
    drawn = drawn[:MOST_ROWS]
    if not drawn:
        return None
    scale = charts.around([1.0, *(v for *_, values in drawn for v in values)], log=True)
    for i, (name, who, part, values) in enumerate(drawn):
        said = f"{name}, {who}: {times(part.value)} times as fast, {between(part)}, {len(values)} prompts"
        head = name if i == 0 or drawn[i - 1][0] != name else ""
        picture = charts.dots(scale, values, part.value, *_ends(part), said, line=1)
        rows.append(Row(who, picture, f"{times(part.value)} ×", head))
    return Chart("Speedup by category", rows, _axis(scale, "×"), f"Times as fast as {found[0].name}, dots as above.")


def time_spent(found: Sequence[Figures]) -> Chart | None:
    """Milliseconds per token by phase, against what the machine allows."""
    shown = [f for f in found if f.phases]
    if not shown:
        return None
    floors = [v for f in shown for v in (f.floor.forwards, f.floor.memory) if v]
    scale = charts.around([1000 * v for v in (*(f.per_token for f in shown), *floors)], zero=True)
    rows, limits = [], set[str]()
    for f in shown:
        parts = {n: 1000 * t for n, t in f.phases.items()}
        marks = {"forwards": f.floor.forwards, "memory": f.floor.memory}
        known = {name: 1000 * v for name, v in marks.items() if v}
        said = f"{f.name}: {amount(1000 * f.per_token)} ms per token: "
        said += ", ".join(f"{n} {amount(1000 * t)}" for n, t in f.phases.items())
        said += "".join(f"; {n} alone {amount(v)}" for n, v in known.items())
        rows.append(Row(f.name, charts.stack(scale, parts, known, said), f"{amount(1000 * f.per_token)} ms"))
        limits |= known.keys()
    note = "By what was done in it."
    legend = [(key(f"part-{n}"), n) for n in PHASES if any(n in f.phases for f in shown)]
    legend += [(key(n), text) for n, text in LIMITS.items() if n in limits]
    return Chart("Time per token", rows, _axis(scale, " ms"), note, legend)


LIMITS = {
    "forwards": "the same forwards, measured by themselves",
    "memory": "reading the target's weights once a step",
}


def seconds(t: float) -> str:
    """With the unit that keeps it short."""
    if t >= 1:
        return f"{amount(t)} s"
    return f"{amount(1000 * t)} ms" if t >= 0.001 else f"{amount(1e6 * t)} µs"


def span(found: Interval, shown: Callable[[float], str] = amount) -> str:
    return f"{shown(found.low)} to {shown(found.high)}" if math.isfinite(found.high) else "one prompt"


def _ends(found: Interval) -> tuple[float, float]:
    """Of the line that is drawn; none from one prompt."""
    return (found.low, found.high) if math.isfinite(found.high) else (found.value, found.value)


def _axis(scale: charts.Scale, unit: str = "") -> charts.Markup:
    return charts.axis(scale, {t: f"{t:g}{unit}" for t in _plain(scale.ticks())})


def _plain(ticks: Iterable[float]) -> list[float]:
    return [float(f"{t:.6g}") for t in ticks]
