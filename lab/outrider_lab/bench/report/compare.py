"""What changed between two runs: in numbers, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.core.intervals import Interval, Value, interval, per
from outrider_lab.bench import stats
from outrider_lab.bench.report.format import amount, change, listing
from outrider_lab.bench.run import Run, Setting
from outrider_lab.bench.stats import Cost, Group

EFFECTS = {"better": "better", "worse": "worse", "noise": "within noise"}


@dataclass(frozen=True)
class Change:
    """One measure of one setting in two runs."""

    setting: str
    measure: str
    before: float
    after: float
    ratio: Interval  # after / before
    more_is_better: bool  # of the measure

    @property
    def effect(self) -> str:
        """better, worse, or noise."""
        if not self.ratio.significant:
            return "noise"
        return "better" if (self.ratio.value > 1) == self.more_is_better else "worse"


@dataclass(frozen=True)
class Comparison:
    """Two runs. The speedup over the run's own baseline is one of the measures; it does not change with the machine's speed."""

    changes: list[Change]  # of the settings that both runs have
    differing: dict[str, tuple[int, int]]  # by setting: different texts, and texts compared
    effect: str  # better, worse or noise, of the headline
    headline: str  # one sentence
    notes: list[str]  # what the reader should know first

    def rows(self) -> list[tuple[Change, str, str, str, str]]:
        """Of a table: the change, before, after, the difference, its effect."""
        return [(c, amount(c.before), amount(c.after), change(c.ratio), EFFECTS[c.effect]) for c in self.changes]


def compare_runs(before: Run, after: Run, about: str | None = None) -> Comparison:
    """What changed between two runs, and whether it is more than noise, by the prompts that both have.

    Settings are matched by name. If exactly one setting in each run has no counterpart of the same name, the two are compared
    with each other.

    Args:
        about: The setting of the headline, if both runs have it.
    """
    before, notes = _rename_odd_setting(before, after)
    old, new = ([s.name for s in run.settings] for run in (before, after))
    changes, differing = list[Change](), dict[str, tuple[int, int]]()
    for name in new:
        if name in old:
            answers = [stats.answered(run, name) for run in (before, after)]
            different, compared = stats.differing(answers[1], answers[0])
            differing[name] = len(different), compared
            for measure, (cost, more_is_better) in _MEASURES.items():
                costs = [stats.grouped(stats.costs(samples, cost)) for samples in answers]
                changes += _change(name, measure, costs, per, more_is_better)
            if name not in (old[0], new[0]):
                bases = stats.answered(before, old[0]), stats.answered(after, new[0])
                costs = [
                    stats.grouped(stats.costs(a, stats.speed), stats.costs(b, stats.speed))
                    for a, b in zip(answers, bases, strict=True)
                ]
                changes += _change(name, SPEEDUP, costs, stats.relative, True)
    speed = {c.setting: c for c in changes if c.measure == "tokens/s"}
    speedup = {c.setting: c for c in changes if c.measure == SPEEDUP}
    names = [n for n in (about, *speedup, *speed) if n in speed]
    if not names:
        said = (
            "The two runs have no setting with answers to the same prompts. Give the settings to compare the same name."
        )
        return Comparison(changes, differing, "noise", said, notes)
    name, baseline = names[0], new[0]
    first = speedup.get(name, speed[name])
    what = f"speedup over {baseline}" if name in speedup else "tokens per second"
    headline = f"{name}, {what}: {amount(first.before)} before, {amount(first.after)} after, {change(first.ratio)}. "
    headline += "This is more than noise." if first.ratio.significant else "This is not more than noise."
    plain = speed.get(baseline)
    if plain is not None and plain.setting != name and plain.ratio.significant:
        notes.append(
            f"{baseline} itself changed by {change(plain.ratio)}, so the machine, the model or the prompts changed. "
            "Compare speedups instead of tokens per second."
        )
    what_else = {
        "model": (before.model, after.model),
        "machine": (before.machine, after.machine),
        "sampling": (before.sampling, after.sampling),
        "prompts": ([(p.id, p.text) for p in before.prompts], [(p.id, p.text) for p in after.prompts]),
    }
    if differences := [name for name, (a, b) in what_else.items() if a != b]:
        notes.append(f"The runs differ in {listing(differences)}. The change may come from that.")
    if {p.id for p in before.prompts} != {p.id for p in after.prompts}:
        notes.append("Only the prompts that both runs have are compared.")
    notes += [
        f"{name}: {n} of {compared} texts are not the same in both runs."
        for name, (n, compared) in differing.items()
        if n
    ]
    for when, only in (("before", [n for n in old if n not in new]), ("after", [n for n in new if n not in old])):
        notes += [f"Only {when}: {listing(only)}."] if only else []
    if len(changes) > 8:
        notes.append(f"{len(changes)} numbers are compared. By chance alone, one in twenty looks different.")
    return Comparison(changes, differing, first.effect, headline, notes)


def versions(run: Run) -> Comparison | None:
    """What changed from the setting `before` of a run to its setting `after`; None without answers of both."""
    answers = [stats.answered(run, name) for name in ("before", "after")]
    if not all(answers):
        return None
    old, new = (
        run.model_copy(
            update={
                "settings": [Setting(name="after")],
                "samples": [s.model_copy(update={"setting": "after"}) for s in some],
            }
        )
        for some in answers
    )
    comparison = compare_runs(old, new)
    steps = [
        f"Tokens a step: {before} before, {after} after, {difference}."
        for c, before, after, difference, _ in comparison.rows()
        if c.measure == "acceptance length"
    ]
    different, compared = comparison.differing["after"]
    return replace(
        comparison, notes=[*steps, f"{compared - different} of {compared} texts are equal before and after."]
    )


def _rename_odd_setting(before: Run, after: Run) -> tuple[Run, list[str]]:
    """The earlier run with its one unmatched setting named as that of the later run, and a note about it."""
    old, new = ([s.name for s in run.settings] for run in (before, after))
    gone, added = [n for n in old if n not in new], [n for n in new if n not in old]
    if len(gone) != 1 or len(added) != 1:
        return before, []
    names = {gone[0]: added[0]}
    settings = [s.model_copy(update={"name": names.get(s.name, s.name)}) for s in before.settings]
    samples = [s.model_copy(update={"setting": names.get(s.setting, s.setting)}) for s in before.samples]
    note = f"{added[0]} is compared with {gone[0]}: each is the only setting of its run without a counterpart."
    return before.model_copy(update={"settings": settings, "samples": samples}), [note]


def _change(
    setting: str, measure: str, costs: Sequence[dict[Group, np.ndarray]], value: Value, more_is_better: bool
) -> list[Change]:
    """One change; none if the runs do not have this measure of one group."""
    a, b = costs
    common = [g for g in a if g in b]
    if not common:
        return []
    table = np.array([np.concatenate([a[g], b[g]]) for g in common])
    half = table.shape[1] // 2
    ratio = interval(table, lambda t: value(t[..., half:]) / value(t[..., :half]))
    one, two = value(table[:, :half].sum(0)), value(table[:, half:].sum(0))
    return [Change(setting, measure, float(one), float(two), ratio, more_is_better)]


SPEEDUP = "speedup"
_MEASURES: dict[str, tuple[Cost, bool]] = {
    "tokens/s": (stats.speed, True),
    "acceptance length": (lambda s: (a := stats.acceptance(s)) and (a.steps + a.accepted, a.steps), True),
    "acceptance rate": (lambda s: (a := stats.acceptance(s)) and (a.accepted, a.drafted), True),
    "seconds to the first token": (lambda s: _sum([x.ttft for x in s]), False),
    "seconds per later token": (
        lambda s: (sum(x.seconds - (x.ttft or 0.0) for x in s), sum(x.output_tokens - 1 for x in s)),
        False,
    ),
    "seconds per answer": (lambda s: (sum(x.seconds for x in s), len(s)), False),
}
"""Two sums whose ratio is the measure, and whether more of it is better."""


def _sum(values: Sequence[float | None]) -> tuple[float, int] | None:
    numbers = [v for v in values if v is not None]
    return (sum(numbers), len(numbers)) if numbers else None
