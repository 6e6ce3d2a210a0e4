"""A run on the terminal: a table of speeds, one of latencies, and their meaning in sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.core.intervals import Interval
from outrider.lab.bench import stats
from outrider.lab.bench.report.recommend import BROKEN, CHANGE, DROP, KEEP, OPEN, assess
from outrider.lab.bench.run import Run, Sample

LATENCIES = {
    "ttft": "to the first token",
    "tpot": "per later token",
    "itl": "from step to step",
    "e2el": "for the whole answer",
}
COLOURS = {KEEP: "green", DROP: "yellow", CHANGE: "yellow", OPEN: "default", BROKEN: "bold red"}


def show(run: Run, console: Console) -> None:
    """Print the tables and sentences of a run that holds answers."""
    console.print(speeds(run))
    if len(stats.categories(run)) > 1 and len(run.settings) > 1:
        console.print(by_category(run))
    console.print(latencies(run))
    for line in sentences(run):
        console.print(line, highlight=False)
    where = f"{run.machine['cores']} cores of {run.machine['cpu']}"
    said = f"{run.model} on {where}" if run.settings[0].base_url is None else f"{run.model}, measured from {where}"
    console.print(said, highlight=False, style="dim")


def speeds(run: Run) -> Table:
    """A row for each setting."""
    table = _table(f"{len(run.prompts)} prompts, {run.repeats} x each", "setting")
    for head in ("tokens/s", "times as\nfast", "95 %\ninterval", "tokens\na step", "accepted", "same\ntexts"):
        table.add_column(head, justify="right", no_wrap=True)
    base = stats.answered(run, run.settings[0].name)
    for setting in run.settings:
        samples = stats.answered(run, setting.name)
        rate, found = stats.rate(samples), stats.acceptance(samples)
        cells = [_number(rate.value) if rate else "-", "", "", "", "", ""]
        if found:
            cells[3:5] = f"{found.length:.2f}", f"{found.rate or 0:.0%}"
        if setting is not run.settings[0]:
            ratio, (different, compared) = stats.ratio(samples, base), stats.differing(samples, base)
            cells[1:3] = _ratio(ratio), _bounds(ratio)
            promised = stats.identity_promised(run, setting.name)
            colour = "bold red" if different and promised else "yellow" if different else "green"
            cells[5] = f"[{colour}]{compared - len(different)} of {compared}[/]"
        table.add_row(escape(setting.name), *cells)
    return table


def by_category(run: Run) -> Table:
    """A row for each category and setting: the speedup."""
    table = _table("By category", "category")
    table.add_column("prompts", justify="right")
    table.add_column("setting", overflow="fold")
    for head in ("times as\nfast", "95 %\ninterval"):
        table.add_column(head, justify="right", no_wrap=True)
    others = run.settings[1:]
    for name in stats.categories(run):
        base = stats.answered(run, run.settings[0].name, name)
        count = sum(p.category == name for p in run.prompts)
        for setting in others:
            ratio = stats.ratio(stats.answered(run, setting.name, name), base)
            start = (escape(name), str(count)) if setting is others[0] else ("", "")
            table.add_row(*start, escape(setting.name), _ratio(ratio), _bounds(ratio))
        if len(others) > 1:
            table.add_section()
    return table


def latencies(run: Run) -> Table:
    """A row for each measure and setting, in milliseconds."""
    table = _table("Milliseconds", "")
    table.add_column("setting", overflow="fold")
    for percent in stats.PERCENTILES:
        table.add_column(f"p{percent}", justify="right", no_wrap=True)
    times = [stats.times(stats.answered(run, setting.name)) for setting in run.settings]
    for measure, what in LATENCIES.items():
        for setting, measured in zip(run.settings, times, strict=True):
            if values := measured[measure]:
                cells = [_number(1000 * stats.percentile(values, p)) for p in stats.PERCENTILES]
                table.add_row(what if setting is run.settings[0] else "", escape(setting.name), *cells)
        table.add_section()
    return table


def sentences(run: Run) -> Iterator[str]:
    """The meaning of the tables."""
    first, *others = run.settings
    base, identical = stats.answered(run, first.name), list[str]()
    for setting in others:
        samples = stats.answered(run, setting.name)
        ratio = stats.ratio(samples, base)
        if ratio is None:
            yield f"{escape(setting.name)}: no prompt was answered by both this setting and {escape(first.name)}."
        else:
            kind, said = assess(setting.name, ratio, first.name, run.concurrency)
            yield f"[{COLOURS[kind]}]{escape(said)}[/]"
        different, compared = stats.differing(samples, base)
        if different:
            yield _different_texts(run, setting.name, different, compared)
        else:
            identical.append(setting.name)
    if identical:
        texts = "All texts are" if len(identical) == len(others) else f"Texts of {', '.join(identical)} are"
        yield f"{escape(texts)} identical to those of {escape(first.name)}."
    for setting in run.settings:
        if failed := [s for s in run.samples if s.setting == setting.name and s.error]:
            requests = sum(s.setting == setting.name for s in run.samples)
            yield f"[red]{escape(setting.name)}: {len(failed)} of {requests} requests failed: {_errors(failed)}[/]"
    if any(stats.acceptance(stats.answered(run, s.name)) for s in run.settings):
        yield (
            "[dim]tokens a step: the acceptance length, the target's own token included; accepted: the acceptance rate, of "
            "all draft tokens[/]"
        )


def _different_texts(run: Run, setting: str, different: list[tuple[str, int]], compared: int) -> str:
    ids = ", ".join(escape(p) for p in dict.fromkeys(p for p, _ in different[:3]))
    ids += ", ..." if len(different) > 3 else ""
    said = f"{len(different)} of {compared} texts of {escape(setting)} differ from those of "
    said += f"{escape(run.settings[0].name)} ({ids})"
    if stats.identity_promised(run, setting):
        return (
            f"[bold red]{said}, although the guarantee is exact-tokens.[/] Without the native kernels, rounding can decide a "
            "near-tie of two tokens. With them it is a bug: report it with the file of --json."
        )
    [own] = [s for s in run.settings if s.name == setting]
    if own.guarantee == "exact-distribution":
        return f"{said}. This is correct: {own.guarantee} promises the same distribution, not the same draws."
    return f"[yellow]{said}. There is no guarantee: compare the texts before you trust the speed.[/]"


def _errors(failed: list[Sample]) -> str:
    """The two most frequent errors."""
    most = Counter(s.error or "" for s in failed).most_common(2)
    return "; ".join(f"{escape(error)} ({n} x)" if n > 1 else escape(error) for error, n in most)


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    return table


def _ratio(found: Interval | None) -> str:
    if found is None:
        return "-"
    colour = {"faster": "green", "slower": "yellow", "unclear": "default"}[found.direction]
    return f"[{colour}]{found.value:.2f}[/]"


def _bounds(found: Interval | None) -> str:
    return "-" if found is None or not math.isfinite(found.high) else f"{found.low:.2f} to {found.high:.2f}"


def _number(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
