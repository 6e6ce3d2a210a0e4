"""What moved from one run to another, in words. The numbers are those of `stats.compare`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.bench import stats
from outrider.bench.run import Run
from outrider.bench.stats import Change, Comparison, Interval

WORDS = {"better": "better", "worse": "worse", "noise": "within noise"}


@dataclass(frozen=True)
class Moved:
    """headline: one sentence. notes: what to know before believing it. kind: better, worse or noise, of the headline."""

    kind: str
    headline: str
    notes: list[str]
    comparison: Comparison


def moved(before: Run, after: Run, about: str | None = None) -> Moved:
    """about: the setting the headline is of, where both runs have it. A setting that is alone without a namesake on either
    side is compared with the other such."""
    before, notes = _aligned(before, after)
    found = stats.compare(before, after)
    speed = {c.setting: c for c in found.changes if c.measure == "tokens/s"}
    against = {c.setting: c for c in found.changes if c.measure == stats.SPEEDUP}
    names = [n for n in (about, *against, *speed) if n in speed]
    if not names:
        said = "The two runs have no setting with answers in common: give the settings to compare the same name."
        return Moved("noise", said, notes, found)
    name = names[0]
    first = against.get(name, speed[name])
    what = f"speed against {after.settings[0].name}" if name in against else "tokens per second"
    said = f"{name}, {what}: {amount(first.before)} before, {amount(first.after)} after, {change(first.ratio)}"
    headline = f"{said}: " + ("more than noise." if first.ratio.sure else "no more than noise.")
    plain = speed.get(after.settings[0].name)
    if plain is not None and plain.setting != name and plain.ratio.sure:
        notes.append(
            f"{plain.setting} itself moved by {change(plain.ratio)}: the machine, the model or the prompts did, so compare "
            "speeds against it rather than tokens per second."
        )
    if found.differences:
        notes.append(f"The runs differ in {_and(found.differences)}, so what moved may be due to that.")
    if not found.paired:
        notes.append("Their prompts are not the same, so intervals are wider than they would be pair by pair.")
    notes += [
        f"{name}: {n} of {compared} texts are not the same in both runs."
        for name, (n, compared) in found.differing.items()
        if n
    ]
    notes += [f"Only before: {_and(found.only_before)}."] if found.only_before else []
    notes += [f"Only after: {_and(found.only_after)}."] if found.only_after else []
    if len(found.changes) > 8:
        notes.append(
            f"{len(found.changes)} numbers are compared; one in twenty would be called different by chance alone."
        )
    return Moved(first.verdict, headline, notes, found)


def change(ratio: Interval) -> str:
    """As a percentage with its interval."""
    if not math.isfinite(ratio.value):
        return "not comparable"
    if not math.isfinite(ratio.high):
        return f"{_signed(ratio.value)} (no interval from one prompt)"
    return f"{_signed(ratio.value)} ({_signed(ratio.low)} to {_signed(ratio.high)})"


def amount(x: float) -> str:
    """Three digits that count."""
    if not math.isfinite(x):
        return "?"
    return f"{x:.{max(0, min(2 - math.floor(math.log10(abs(x))), 4))}f}" if x else "0"


def rows(found: Comparison) -> list[tuple[Change, str, str, str, str]]:
    """Of a table: the change, before, after, by how much, and what to call it."""
    return [(c, amount(c.before), amount(c.after), change(c.ratio), WORDS[c.verdict]) for c in found.changes]


def _aligned(before: Run, after: Run) -> tuple[Run, list[str]]:
    """The earlier run with its one odd setting named like the later one's, and a line that says so."""
    old, new = ([s.name for s in run.settings] for run in (before, after))
    gone, come = [n for n in old if n not in new], [n for n in new if n not in old]
    if len(gone) != 1 or len(come) != 1:
        return before, []
    names = {gone[0]: come[0]}
    settings = [s.model_copy(update={"name": names.get(s.name, s.name)}) for s in before.settings]
    samples = [s.model_copy(update={"setting": names.get(s.setting, s.setting)}) for s in before.samples]
    note = f"{come[0]} is compared with {gone[0]}, the setting that the earlier run had in its place."
    return before.model_copy(update={"settings": settings, "samples": samples}), [note]


def _signed(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")


def _and(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
