"""What changed between two runs, in words. The numbers come from `stats.compare`."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.lab.bench import stats
from outrider.lab.bench.report.format import amount, change, listing
from outrider.lab.bench.run import Run
from outrider.lab.bench.stats import Change, Comparison

EFFECTS = {"better": "better", "worse": "worse", "noise": "within noise"}


@dataclass(frozen=True)
class ComparisonSummary:
    """effect: better, worse or noise, of the headline. headline: one sentence. notes: what the reader should know first."""

    effect: str
    headline: str
    notes: list[str]
    comparison: Comparison

    def rows(self) -> list[tuple[Change, str, str, str, str]]:
        """Of a table: the change, before, after, the difference, its effect."""
        return [
            (c, amount(c.before), amount(c.after), change(c.ratio), EFFECTS[c.effect]) for c in self.comparison.changes
        ]


def compare_runs(before: Run, after: Run, about: str | None = None) -> ComparisonSummary:
    """about: the setting of the headline, if both runs have it.

    If exactly one setting in each run has no counterpart of the same name, the two are compared with each other.
    """
    before, notes = _rename_odd_setting(before, after)
    found = stats.compare(before, after)
    speed = {c.setting: c for c in found.changes if c.measure == "tokens/s"}
    speedup = {c.setting: c for c in found.changes if c.measure == stats.SPEEDUP}
    names = [n for n in (about, *speedup, *speed) if n in speed]
    if not names:
        said = "The two runs have no setting with answers in common. Give the settings to compare the same name."
        return ComparisonSummary("noise", said, notes, found)
    name, baseline = names[0], after.settings[0].name
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
    if found.differences:
        notes.append(f"The runs differ in {listing(found.differences)}. The change may come from that.")
    if not found.paired:
        notes.append("The prompts of the runs are not the same. Intervals are therefore wider.")
    notes += [
        f"{name}: {n} of {compared} texts are not the same in both runs."
        for name, (n, compared) in found.differing.items()
        if n
    ]
    notes += [f"Only before: {listing(found.only_before)}."] if found.only_before else []
    notes += [f"Only after: {listing(found.only_after)}."] if found.only_after else []
    if len(found.changes) > 8:
        notes.append(f"{len(found.changes)} numbers are compared. By chance alone, one in twenty looks different.")
    return ComparisonSummary(first.effect, headline, notes, found)


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
