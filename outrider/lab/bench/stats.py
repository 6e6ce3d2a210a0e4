"""Statistics of the samples of a measurement, with confidence intervals. Pure functions of a `Run`; numpy only.

The unit of statistics is the *group*: the prompts that were sent together, or one prompt if the concurrency is 1. Groups are
a sample of the user's texts. The intervals therefore resample groups, never single answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.core.intervals import Interval, Value, interval, interval_unpaired
from outrider.lab.bench.run import Run, Sample

# Ids of prompts.
Group = tuple[str, ...]
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class AcceptanceStats:
    """length: tokens per step, the target's own token included (1 + accepted / steps). rate: accepted / drafted tokens.
    by_depth: share of all steps that accepted at least 1, 2, ... draft tokens."""

    steps: int
    drafted: int
    accepted: int
    by_depth: list[float]

    @property
    def length(self) -> float:
        return 1 + self.accepted / self.steps

    @property
    def rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


def answered(run: Run, setting: str, category: str | None = None) -> list[Sample]:
    """The answers of a setting, without failed requests."""
    wanted = None if category is None else {p.id for p in run.prompts if p.category == category}
    samples = [s for s in run.samples if s.setting == setting and s.error is None]
    return samples if wanted is None else [s for s in samples if s.prompt in wanted]


def categories(run: Run) -> list[str]:
    """In the order of the prompts."""
    return list(dict.fromkeys(p.category for p in run.prompts))


def wall(samples: Iterable[Sample]) -> float:
    """Seconds for all samples. The samples of one turn ran at the same time, so the longest of them counts."""
    turns: dict[int, float] = {}
    for s in samples:
        turns[s.turn] = max(turns.get(s.turn, 0.0), s.seconds)
    return sum(turns.values())


def rate(samples: Sequence[Sample]) -> Interval | None:
    """Output tokens per second, prefill included. None if there are no tokens or no time passed."""
    groups = _grouped(_costs(samples, _speed)) if _timed(samples) else {}
    return interval(np.array([*groups.values()]), _first) if groups else None


def ratio(ours: Sequence[Sample], base: Sequence[Sample]) -> Interval | None:
    """Tokens per second of `ours` over those of `base`, for the prompts and repeats that both have.

    None without a common prompt, and where the ratio is not a positive number.
    """
    groups = _grouped(_costs(ours, _speed), _costs(base, _speed)) if _timed(ours) and _timed(base) else {}
    found = interval(np.array([*groups.values()]), _relative) if groups else None
    return found if found is not None and 0 < found.value < math.inf else None


def acceptance(samples: Iterable[Sample]) -> AcceptanceStats | None:
    """None if the steps are unknown, or if there were no draft tokens."""
    known = [(s.drafted, s.accepted) for s in samples if s.drafted and s.accepted]
    drafted = [n for d, _ in known for n in d]
    accepted = [n for _, a in known for n in a]
    if not sum(drafted):
        return None
    deepest = range(1, max(accepted) + 1)
    return AcceptanceStats(
        len(drafted), sum(drafted), sum(accepted), [sum(n >= j for n in accepted) / len(accepted) for j in deepest]
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation. Raises ValueError for no values."""
    if not values:
        raise ValueError("there is no percentile of no values")
    return float(np.percentile(values, percent))


def times(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Seconds. ttft: to the first token. tpot: per later token. itl: between two arrivals; an arrival is one step, or one
    event of a stream. e2el: to the last token."""
    samples = list(samples)
    return {
        "ttft": [s.ttft for s in samples if s.ttft is not None],
        "tpot": [(s.seconds - (s.ttft or 0.0)) / (s.output_tokens - 1) for s in samples if s.output_tokens > 1],
        "itl": [seconds for s in samples for seconds, _ in s.gaps],
        "e2el": [s.seconds for s in samples],
    }


def differing(ours: Iterable[Sample], base: Iterable[Sample]) -> tuple[list[tuple[str, int]], int]:
    """The texts that differ from those of `base`, as (prompt, repeat), and the number of texts compared.

    Compares token ids if both sides have them, otherwise texts.
    """
    theirs = {(s.prompt, s.repeat): s for s in base}
    both = [(s, theirs[s.prompt, s.repeat]) for s in ours if (s.prompt, s.repeat) in theirs]
    return [(a.prompt, a.repeat) for a, b in both if not _same(a, b)], len(both)


def identity_promised(run: Run, setting: str) -> bool:
    """True if the texts of a setting must equal those of the baseline: it guarantees exact tokens, of the same model."""
    first = run.settings[0]
    [own] = [s for s in run.settings if s.name == setting]
    return own is not first and own.guarantee == "exact-tokens" and own.base_url == first.base_url


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
    different texts, and of texts compared. only_before, only_after: settings of one run.
    differences: what else differs: model, machine, sampling, prompts.
    """

    changes: list[Change]
    paired: bool
    differing: dict[str, tuple[int, int]]
    only_before: list[str]
    only_after: list[str]
    differences: list[str]


def compare(before: Run, after: Run) -> Comparison:
    """What changed between two runs, and whether it is more than noise. Settings are matched by name."""
    names, bases = [s.name for s in before.settings], (before.settings[0].name, after.settings[0].name)
    both = [s.name for s in after.settings if s.name in names]
    paired = {p.id for p in before.prompts} == {p.id for p in after.prompts}
    changes, differ = list[Change](), dict[str, tuple[int, int]]()
    for name in both:
        answers = [answered(run, name) for run in (before, after)]
        for measure, (cost, value, more_is_better) in _MEASURES.items():
            costs = [_grouped(_costs(samples, cost)) for samples in answers]
            changes += _change(name, measure, costs, paired, value, more_is_better)
        if name not in bases:
            theirs = [answered(run, base) for run, base in zip((before, after), bases, strict=True)]
            costs = [_grouped(_costs(a, _speed), _costs(b, _speed)) for a, b in zip(answers, theirs, strict=True)]
            changes += _change(name, SPEEDUP, costs, paired, _relative, True)
        different, compared = differing(answers[1], answers[0])
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


Cost = Callable[[list[Sample]], Sequence[float] | None]
# By group and repeat.
Costs = dict[tuple[Group, int], tuple[float, ...]]


def _costs(samples: Iterable[Sample], cost: Cost) -> Costs:
    """The cost of every turn. Turns without one are left out."""
    turns: dict[int, list[Sample]] = {}
    for s in samples:
        turns.setdefault(s.turn, []).append(s)
    found = {(tuple(sorted(s.prompt for s in some)), some[0].repeat): cost(some) for some in turns.values()}
    return {key: tuple(map(float, value)) for key, value in found.items() if value is not None}


def _grouped(*sides: Costs) -> dict[Group, np.ndarray]:
    """Costs of several settings side by side, by group: sums over the repeats that all of them have."""
    groups: dict[Group, np.ndarray] = {}
    for key in sides[0]:
        if all(key in side for side in sides):
            row = np.array([x for side in sides for x in side[key]])
            groups[key[0]] = groups[key[0]] + row if key[0] in groups else row
    return groups


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


def _timed(samples: Iterable[Sample]) -> bool:
    return any(s.output_tokens and s.seconds > 0 for s in samples)


def _speed(samples: list[Sample]) -> tuple[float, float]:
    return sum(s.output_tokens for s in samples), wall(samples)


def _relative(t: np.ndarray) -> np.ndarray:
    """Ratio of two rates, from columns (tokens, seconds, tokens, seconds)."""
    return t[..., 0] / t[..., 1] * t[..., 3] / t[..., 2]


def _first(t: np.ndarray) -> np.ndarray:
    return t[..., 0] / t[..., 1]


SPEEDUP = "speedup"
_MEASURES: dict[str, tuple[Cost, Value, bool]] = {
    "tokens/s": (_speed, _first, True),
    "acceptance length": (lambda s: (a := acceptance(s)) and (a.steps + a.accepted, a.steps), _first, True),
    "acceptance rate": (lambda s: (a := acceptance(s)) and (a.accepted, a.drafted), _first, True),
    "seconds to the first token": (lambda s: _sum([x.ttft for x in s]), _first, False),
    "seconds per later token": (
        lambda s: (sum(x.seconds - (x.ttft or 0.0) for x in s), sum(x.output_tokens - 1 for x in s)),
        _first,
        False,
    ),
    "seconds per answer": (lambda s: (sum(x.seconds for x in s), len(s)), _first, False),
}


def _sum(values: Sequence[float | None]) -> tuple[float, int] | None:
    known = [v for v in values if v is not None]
    return (sum(known), len(known)) if known else None


def _same(a: Sample, b: Sample) -> bool:
    return a.token_ids == b.token_ids if a.token_ids and b.token_ids else a.text == b.text
