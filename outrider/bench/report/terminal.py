"""A run on the terminal: a table of speeds, one of times, and what they mean in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.bench import stats
from outrider.bench.run import Run, Sample

TIMES = {
    "ttft": "to the first token",
    "tpot": "per later token",
    "itl": "from step to step",
    "e2el": "for the whole answer",
}


def show(run: Run, console: Console) -> None:
    """Print all there is to say about a run that holds answers."""
    console.print(speeds(run))
    if len(stats.categories(run)) > 1 and len(run.settings) > 1:
        console.print(by_category(run))
    console.print(latencies(run))
    for line in sentences(run):
        console.print(line, highlight=False)
    where = f"{run.machine['cores']} cores of {run.machine['cpu']}"
    said = f"{run.model} on {where}" if run.settings[0].base_url is None else f"{run.model}, asked from {where}"
    console.print(said, highlight=False, style="dim")


def speeds(run: Run) -> Table:
    """A row per setting."""
    table = _table(f"{len(run.prompts)} prompts, {run.repeats} x each", "setting")
    for head in (
        "tokens/s",
        "times as\nfast",
        "95 %\ninterval",
        "tokens\na step",
        "guesses\nkept",
        "same\ntexts",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    base = stats.good(run, run.settings[0].name)
    for setting in run.settings:
        samples = stats.good(run, setting.name)
        rate, found = stats.rate(samples), stats.acceptance(samples)
        cells = [_number(rate.value) if rate else "-", "", "", "", "", ""]
        if found:
            cells[3:5] = f"{found.length:.2f}", f"{found.rate or 0:.0%}"
        if setting is not run.settings[0]:
            ratio, (parted, compared) = stats.ratio(samples, base), stats.differing(samples, base)
            cells[1:3] = _ratio(ratio), _range(ratio)
            colour = "bold red" if parted and stats.promised(run, setting.name) else "yellow" if parted else "green"
            cells[5] = f"[{colour}]{compared - len(parted)} of {compared}[/]"
        table.add_row(escape(setting.name), *cells)
    return table


def by_category(run: Run) -> Table:
    """A row per category and setting: the speed-up."""
    table = _table("By category", "category")
    table.add_column("prompts", justify="right")
    table.add_column("setting", overflow="fold")
    for head in ("times as\nfast", "95 %\ninterval"):
        table.add_column(head, justify="right", no_wrap=True)
    others = run.settings[1:]
    for name in stats.categories(run):
        base = stats.good(run, run.settings[0].name, name)
        count = sum(p.category == name for p in run.prompts)
        for setting in others:
            ratio = stats.ratio(stats.good(run, setting.name, name), base)
            start = (escape(name), str(count)) if setting is others[0] else ("", "")
            table.add_row(*start, escape(setting.name), _ratio(ratio), _range(ratio))
        if len(others) > 1:
            table.add_section()
    return table


def latencies(run: Run) -> Table:
    """A row per measure and setting, times in milliseconds."""
    table = _table("Milliseconds", "")
    table.add_column("setting", overflow="fold")
    for percent in stats.PERCENTILES:
        table.add_column(f"p{percent}", justify="right", no_wrap=True)
    taken = [stats.times(stats.good(run, setting.name)) for setting in run.settings]
    for measure, what in TIMES.items():
        for setting, times in zip(run.settings, taken, strict=True):
            if values := times[measure]:
                cells = [_number(1000 * stats.percentile(values, p)) for p in stats.PERCENTILES]
                table.add_row(what if setting is run.settings[0] else "", escape(setting.name), *cells)
        table.add_section()
    return table


def sentences(run: Run) -> Iterator[str]:
    """What the tables mean."""
    first, *others = run.settings
    base = stats.good(run, first.name)
    for setting in others:
        samples = stats.good(run, setting.name)
        yield f"[bold]{escape(setting.name)}[/]: {verdict(stats.ratio(samples, base), first.name, run.concurrency)}"
        parted, compared = stats.differing(samples, base)
        if parted:
            yield _parted(run, setting.name, parted, compared)
    if others and (same := [s.name for s in others if not stats.differing(stats.good(run, s.name), base)[0]]):
        texts = "Every text was" if len(same) == len(others) else f"The texts of {', '.join(map(escape, same))} were"
        yield f"{texts} compared with {escape(first.name)}'s: identical."
    for setting in run.settings:
        if failed := [s for s in run.samples if s.setting == setting.name and s.error]:
            asked = sum(s.setting == setting.name for s in run.samples)
            yield f"[red]{escape(setting.name)}: {len(failed)} of {asked} requests failed: {_errors(failed)}[/]"
    if any(stats.acceptance(stats.good(run, s.name)) for s in run.settings):
        yield (
            "[dim]tokens a step: the acceptance length, the model's own token included; guesses kept: the acceptance rate, "
            "of all guesses made[/]"
        )


def verdict(found: stats.Interval | None, base: str, concurrency: int = 1) -> str:
    """A speed in words. concurrency: prompts that were asked together."""
    base = escape(base)
    if found is None:
        return f"nothing to compare: no prompt was answered by both this and {base}."
    times = f"{found.value:.2f} times the tokens per second of {base}"
    one, several = "prompt", "prompts"
    if concurrency > 1:
        one, several = (f"{what} of up to {concurrency} prompts" for what in ("group", "groups"))
    if not math.isfinite(found.high):
        return f"{times}, from one {one} alone, which shows nothing of others."
    span = f"95 % interval {_range(found)}"
    if found.verdict == "faster":
        return f"[green]faster by {found.value:.2f}x[/] than {base} ({span})."
    if found.verdict == "slower":
        return f"[yellow]slower: {times}[/] ({span})."
    return f"no difference that {found.groups} {several} could show: {times} ({span})."


def _parted(run: Run, setting: str, parted: list[tuple[str, int]], compared: int) -> str:
    ids = ", ".join(escape(p) for p in dict.fromkeys(p for p, _ in parted[:3])) + (", ..." if len(parted) > 3 else "")
    said = f"{len(parted)} of {compared} texts differ from {escape(run.settings[0].name)}'s ({ids})"
    if stats.promised(run, setting):
        return (
            f"[bold red]{said}, which breaks the promise of exact-tokens.[/] Without the native kernels rounding can turn a "
            "near-tie between two tokens; with them it is a bug: please report it with the file of --json."
        )
    [own] = [s for s in run.settings if s.name == setting]
    if own.guarantee == "exact-distribution":
        return f"{said}: {own.guarantee} promises the same law, not the same draws."
    return f"[yellow]{said}; nothing was promised here. Compare them before you trust the speed.[/]"


def _errors(failed: list[Sample]) -> str:
    """The commonest errors."""
    kinds: dict[str, int] = {}
    for s in failed:
        kinds[s.error or ""] = kinds.get(s.error or "", 0) + 1
    most = sorted(kinds.items(), key=lambda item: -item[1])[:2]
    return "; ".join(f"{escape(error)} ({n} x)" if n > 1 else escape(error) for error, n in most)


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    return table


def _ratio(found: stats.Interval | None) -> str:
    if found is None:
        return "-"
    colour = {"faster": "green", "slower": "yellow", "unclear": "default"}[found.verdict]
    return f"[{colour}]{found.value:.2f}[/]"


def _range(found: stats.Interval | None) -> str:
    return "-" if found is None or not math.isfinite(found.high) else f"{found.low:.2f} to {found.high:.2f}"


def _number(value: float) -> str:
    """Three digits, as many as a reader uses."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
