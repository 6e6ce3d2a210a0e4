"""A run on the terminal: a table of speeds, one of latencies, and their meaning in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.core.intervals import Interval
from outrider_lab.bench import stats
from outrider_lab.bench.report.analysis import SettingResult, analyse, by_category
from outrider_lab.bench.report.compare import versions
from outrider_lab.bench.report.format import amount
from outrider_lab.bench.report.recommend import BROKEN, CHANGE, DROP, KEEP, OPEN, recommend
from outrider_lab.bench.run import Run

COLOURS = {KEEP: "green", DROP: "yellow", CHANGE: "yellow", OPEN: "default", BROKEN: "bold red"}


def show(run: Run, console: Console, tables: bool = True) -> None:
    """Print the sentences of a run that holds answers, below its tables.

    Args:
        tables: Whether to print the tables, too.
    """
    results = analyse(run)
    if tables:
        console.print(speeds(run, results))
        if (categories := by_category(run)) and len(results) > 1:
            console.print(category_table(categories))
        console.print(latencies(results))
    for line in sentences(run, results):
        console.print(line, highlight=False)
    if tables and any(r.acceptance for r in results):
        words = "tokens a step: the acceptance length, the target's own token included; accepted: the acceptance rate, of all "
        console.print(f"{words}draft tokens", highlight=False, style="dim")
    where = f"{run.machine['cores']} cores of {run.machine['cpu']}"
    said = f"{run.model} on {where}" if run.settings[0].base_url is None else f"{run.model}, measured from {where}"
    console.print(said, highlight=False, style="dim")


def speeds(run: Run, results: list[SettingResult]) -> Table:
    """A row for each setting."""
    heads = "tokens/s", "times as\nfast", "95 %\ninterval", "tokens\na step", "accepted", "same\ntexts"
    table = _table(f"{len(run.prompts)} prompts, {run.repeats} x each", ["setting"], heads)
    for r in results:
        cells = [amount(r.rate.value) if r.rate else "-", "", "", "", "", ""]
        if r.acceptance:
            cells[3:5] = f"{r.acceptance.length:.2f}", f"{r.acceptance.rate or 0:.0%}"
        if r.texts:
            cells[1:3] = _ratio(r.ratio), _bounds(r.ratio)
            colour = "bold red" if r.texts.promised else "yellow"
            colour = colour if r.texts.differing else "green"
            cells[5] = f"[{colour}]{r.texts.compared - r.texts.differing} of {r.texts.compared}[/]"
        table.add_row(escape(r.name), *cells)
    return table


def category_table(categories: dict[str, tuple[int, list[SettingResult]]]) -> Table:
    """A row for each category and setting: the speedup over the first setting."""
    table = _table("By category", ["category", "prompts", "setting"], ("times as\nfast", "95 %\ninterval"))
    for name, (prompts, [_, *others]) in categories.items():
        for r in others:
            start = (escape(name), str(prompts)) if r is others[0] else ("", "")
            table.add_row(*start, escape(r.name), _ratio(r.ratio), _bounds(r.ratio))
        if len(others) > 1:
            table.add_section()
    return table


def latencies(results: list[SettingResult]) -> Table:
    """A row for each measure and setting, in milliseconds."""
    table = _table("Milliseconds", ["", "setting"], [f"p{percent}" for percent in stats.PERCENTILES])
    times = [stats.times(r.answers) for r in results]
    for measure, what in stats.TIMES.items():
        for r, measured in zip(results, times, strict=True):
            if values := measured[measure]:
                cells = [amount(1000 * x) for x in np.percentile(values, stats.PERCENTILES)]
                table.add_row(what if r is results[0] else "", escape(r.name), *cells)
        table.add_section()
    return table


def sentences(run: Run, results: list[SettingResult]) -> Iterator[str]:
    """The meaning of the tables, in the words of the page."""
    recommendation = recommend(run, results)
    yield f"[{COLOURS[recommendation.kind]}]{escape(recommendation.headline)}[/]"
    yield from map(escape, (*recommendation.reasons, *recommendation.advice))
    if (changed := versions(run)) is not None:
        yield from map(escape, (changed.headline, *changed.notes))


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table.

    Args:
        words: Heads of its first columns.
        numbers: Heads of the others.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in words:
        table.add_column(head, overflow="fold", justify="right" if head == "prompts" else "left")
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _ratio(ratio: Interval | None) -> str:
    if ratio is None:
        return "-"
    colour = ("green" if ratio.value > 1 else "yellow") if ratio.significant else "default"
    return f"[{colour}]{ratio.value:.2f}[/]"


def _bounds(ratio: Interval | None) -> str:
    return "-" if ratio is None or not math.isfinite(ratio.high) else f"{ratio.low:.2f} to {ratio.high:.2f}"
