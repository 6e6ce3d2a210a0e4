"""A run as one HTML page, with what changed since another. It needs no network and no scripts. Texts of prompts and models are
always shown as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.files import write_whole
from outrider.core.intervals import Interval, Value, interval, interval_unpaired
from outrider.core.origins import ACCEPTED, BONUS, CORRECTED, PLAIN
from outrider.lab.bench import stats
from outrider.lab.bench.report import charts
from outrider.lab.bench.report.analysis import PHASES, SettingResult, analyse, by_category, drift
from outrider.lab.bench.report.charts import environment
from outrider.lab.bench.report.format import amount, bounds, change, count, duration, factor, listing, percent, size
from outrider.lab.bench.report.recommend import Recommendation, no_answers, recommend
from outrider.lab.bench.run import PromptRecord, Run, Sample
from outrider.lab.bench.stats import Cost, Group

# Characters of a prompt, tokens of an answer, prompts at either end, columns of a table.
LONGEST, MOST_TOKENS, EXTREMES, DEEPEST = 1200, 400, 2, 10
ORIGINS = {PLAIN: "plain", ACCEPTED: "accepted", CORRECTED: "corrected", BONUS: "bonus"}
MEANINGS = {
    "accepted": "drafted and accepted",
    "corrected": "by the target, in place of a rejected draft token",
    "bonus": "by the target, after all draft tokens were accepted",
    "plain": "by the target, in a step without draft tokens",
}
# Characters that a browser interprets or drops: control characters, and those that change the direction of a text.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class Answer:
    """An answer to show. tokens: [origin, text] of consecutive tokens with one origin; "" if unknown. counts: tokens by
    origin. cut: number of tokens left out."""

    prompt: PromptRecord
    prompt_text: str
    speed: str
    sample: Sample
    tokens: list[tuple[str, str]]
    counts: dict[str, int]
    cut: int


def write(run: Run, path: Path, *, other: Run | None = None) -> Recommendation:
    """Write the page of a run, compared with an earlier run `other`. Returns the recommendation at its top.

    Raises ValueError for a run without an answer.
    """
    html, found = render(run, other=other)
    write_whole(path, html, errors="replace")
    return found


def render(run: Run, *, other: Run | None = None) -> tuple[str, Recommendation]:
    """The page, and the recommendation at its top."""
    if other is not None and not any(s.error is None for s in other.samples):
        raise ValueError(f"the earlier run is empty: {no_answers(other)}")
    results = analyse(run)
    recommendation = recommend(run, results)
    categories = by_category(run, results)
    best = next((r for r in results if r.name == recommendation.setting), results[0])
    values: dict[str, Any] = {
        "run": run,
        "results": results,
        "base": results[0],
        "recommendation": recommendation,
        "best": best,
        "comparison": compare_runs(other, run, recommendation.setting) if other is not None else None,
        "other": other,
        "speeds": charts.speeds(results),
        "speedups": charts.speedups(results),
        "latencies": charts.latencies(results),
        "acceptance": charts.acceptance(results),
        "deepest": min(max(len(r.by_depth) for r in results), DEEPEST),
        "by_category": charts.by_category(categories, results[0].name),
        "categories": categories,
        "phases": PHASES,
        "time_by_phase": charts.time_by_phase(results),
        "extremes": extremes(run, best),
        "origins": MEANINGS,
        "drift": drift(run),
        "percentile": stats.percentile,
        "times_of": stats.times,
    }
    env = environment()
    env.filters |= {"amount": amount, "factor": factor, "percent": percent, "of": count}
    env.filters |= {"duration": duration, "bytes": size, "json": json.dumps, "bounds": bounds}
    env.filters |= {"factors": lambda found: bounds(found, factor)}
    html = env.get_template("report.html").render(values)
    return visible(html), recommendation


def visible(text: str) -> str:
    """Replaces characters that are interpreted instead of shown by visible symbols. Keeps line ends and tabs."""
    return _HIDDEN.sub(lambda m: chr(0x2400 + ord(m[0])) if ord(m[0]) < 32 else f"⟨{ord(m[0]):04X}⟩", text)


def extremes(run: Run, best: SettingResult) -> dict[str, list[Answer]]:
    """The fastest and the slowest prompts of a setting, by speedup or else by tokens per second."""
    if best.prompts:
        speeds = {p: f"{factor(x)} times as fast" for p, x in best.prompts.items()}
        order = sorted(best.prompts, key=best.prompts.__getitem__)
    else:
        known = {s.prompt: s.output_tokens / s.seconds for s in best.answers if s.output_tokens and s.seconds > 0}
        speeds = {p: f"{amount(x)} tokens per second" for p, x in known.items()}
        order = sorted(known, key=known.__getitem__)
    few = min(EXTREMES, (len(order) + 1) // 2)
    ends = {"The fastest": order[::-1][:few], "The slowest": order[:few][: len(order) - few]}
    prompts, first = {p.id: p for p in run.prompts}, dict[str, Sample]()
    for sample in best.answers:
        first.setdefault(sample.prompt, sample)
    return {
        title: [_answer(prompts[p], speeds[p], first[p]) for p in ids if p in prompts]
        for title, ids in ends.items()
        if ids
    }


def _answer(prompt: PromptRecord, speed: str, sample: Sample) -> Answer:
    text = prompt.text if len(prompt.text) <= LONGEST else "… " + prompt.text[-LONGEST:]
    pieces, origins = sample.pieces, sample.origins
    if not pieces or not origins or len(pieces) != len(origins):
        limit = MOST_TOKENS * 5
        return Answer(prompt, text, speed, sample, [("", sample.text[:limit])], {}, max(len(sample.text) - limit, 0))
    tokens = zip((ORIGINS.get(o, "") for o in origins[:MOST_TOKENS]), pieces, strict=False)
    runs = [(origin, "".join(p for _, p in some)) for origin, some in groupby(tokens, key=lambda t: t[0])]
    counts = {name: n for letter, name in ORIGINS.items() if (n := origins.count(letter))}
    return Answer(prompt, text, speed, sample, runs, counts, max(len(pieces) - MOST_TOKENS, 0))


# -- what changed between two runs ----------------------------------------------------------------------------------------


EFFECTS = {"better": "better", "worse": "worse", "noise": "within noise"}


@dataclass(frozen=True)
class Change:
    """One measure of one setting in two runs. ratio: after / before. more_is_better: of the measure."""

    setting: str
    measure: str
    before: float
    after: float
    ratio: Interval
    more_is_better: bool

    @property
    def effect(self) -> str:
        """better, worse, or noise."""
        if not self.ratio.significant:
            return "noise"
        return "better" if (self.ratio.value > 1) == self.more_is_better else "worse"


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    changes: of the settings that both runs have. The speedup over the run's own baseline is one of the measures; it does not
    change with the speed of the machine. paired: both runs have the same prompts. differing: by setting, the number of
    different texts, and of texts compared. only_before, only_after: settings of one run. differences: what else differs: model,
    machine, sampling, prompts.
    effect: better, worse or noise, of the headline. headline: one sentence. notes: what the reader should know first.
    """

    changes: list[Change]
    paired: bool
    differing: dict[str, tuple[int, int]]
    only_before: list[str]
    only_after: list[str]
    differences: list[str]
    effect: str = "noise"
    headline: str = ""
    notes: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[Change, str, str, str, str]]:
        """Of a table: the change, before, after, the difference, its effect."""
        return [(c, amount(c.before), amount(c.after), change(c.ratio), EFFECTS[c.effect]) for c in self.changes]


def compare(before: Run, after: Run) -> Comparison:
    """What changed between two runs, and whether it is more than noise. Settings are matched by name."""
    names, bases = [s.name for s in before.settings], (before.settings[0].name, after.settings[0].name)
    both = [s.name for s in after.settings if s.name in names]
    paired = {p.id for p in before.prompts} == {p.id for p in after.prompts}
    changes, differ = list[Change](), dict[str, tuple[int, int]]()
    for name in both:
        answers = [stats.answered(run, name) for run in (before, after)]
        for measure, (cost, more_is_better) in _MEASURES.items():
            costs = [stats.grouped(stats.costs(samples, cost)) for samples in answers]
            changes += _change(name, measure, costs, paired, stats.per, more_is_better)
        if name not in bases:
            theirs = [stats.answered(run, base) for run, base in zip((before, after), bases, strict=True)]
            costs = [
                stats.grouped(stats.costs(a, stats.speed), stats.costs(b, stats.speed))
                for a, b in zip(answers, theirs, strict=True)
            ]
            changes += _change(name, SPEEDUP, costs, paired, stats.relative, True)
        different, compared = stats.differing(answers[1], answers[0])
        differ[name] = len(different), compared
    what = {
        "model": (before.model, after.model),
        "machine": (before.machine, after.machine),
        "sampling": (before.sampling, after.sampling),
        "prompts": ([(p.id, p.text) for p in before.prompts], [(p.id, p.text) for p in after.prompts]),
    }
    gone = [n for n in names if n not in both]
    new = [s.name for s in after.settings if s.name not in both]
    return Comparison(changes, paired, differ, gone, new, [name for name, (a, b) in what.items() if a != b])


def compare_runs(before: Run, after: Run, about: str | None = None) -> Comparison:
    """about: the setting of the headline, if both runs have it.

    If exactly one setting in each run has no counterpart of the same name, the two are compared with each other.
    """
    before, notes = _rename_odd_setting(before, after)
    found = compare(before, after)
    speed = {c.setting: c for c in found.changes if c.measure == "tokens/s"}
    speedup = {c.setting: c for c in found.changes if c.measure == SPEEDUP}
    names = [n for n in (about, *speedup, *speed) if n in speed]
    if not names:
        said = "The two runs have no setting with answers in common. Give the settings to compare the same name."
        return replace(found, headline=said, notes=notes)
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
    return replace(found, effect=first.effect, headline=headline, notes=notes)


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
    setting: str,
    measure: str,
    costs: Sequence[dict[Group, np.ndarray]],
    paired: bool,
    value: Value,
    more_is_better: bool,
) -> list[Change]:
    """One change; none if a run does not have this measure."""
    a, b = costs
    common = [g for g in a if g in b]
    if paired and common:
        table = np.array([np.concatenate([a[g], b[g]]) for g in common])
        half = table.shape[1] // 2
        ratio = interval(table, lambda t: value(t[..., half:]) / value(t[..., :half]))
        one, two = value(table[:, :half].sum(0)), value(table[:, half:].sum(0))
    elif a and b:
        tables = np.array([*a.values()]), np.array([*b.values()])
        ratio = interval_unpaired(*tables, value)
        one, two = (value(t.sum(0)) for t in tables)
    else:
        return []
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
    known = [v for v in values if v is not None]
    return (sum(known), len(known)) if known else None
