"""What the samples of a measurement say, and how sure that is. Pure functions of a `Run`; numpy only.

Everything is counted in *groups*: the prompts that were asked for together, one prompt alone if the concurrency is 1. Groups
were drawn from the user's texts and are what varies, so intervals resample groups, never single answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from outrider.bench.run import Run, Sample

Group = tuple[str, ...]  # ids of prompts
DRAWS, CONFIDENCE = 4000, 0.95
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Interval:
    """A value and its interval of 95 %. groups: how many prompts (or groups of them) it rests on."""

    value: float
    low: float
    high: float
    groups: int

    @property
    def sure(self) -> bool:
        """Of a ratio: more than noise, 1 is not in the interval."""
        return self.low > 1 or self.high < 1

    @property
    def verdict(self) -> str:
        """faster, slower or unclear, if the ratio is one of speeds."""
        return ("faster" if self.value > 1 else "slower") if self.sure else "unclear"


@dataclass(frozen=True)
class Acceptance:
    """length: tokens a step commits, the model's own included (1 + accepted / steps). rate: accepted / drafted guesses.
    by_depth: of all steps, the part in which so many guesses or more were accepted, from one on."""

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


def good(run: Run, setting: str, category: str | None = None) -> list[Sample]:
    """The answers of a setting, without those that failed."""
    wanted = None if category is None else {p.id for p in run.prompts if p.category == category}
    samples = [s for s in run.samples if s.setting == setting and s.error is None]
    return samples if wanted is None else [s for s in samples if s.prompt in wanted]


def categories(run: Run) -> list[str]:
    """In the order of the prompts."""
    return list(dict.fromkeys(p.category for p in run.prompts))


def wall(samples: Iterable[Sample]) -> float:
    """Seconds in which the samples came about. Those of one turn ran side by side, the longest of them is the turn's time."""
    turns: dict[int, float] = {}
    for s in samples:
        turns[s.turn] = max(turns.get(s.turn, 0.0), s.seconds)
    return sum(turns.values())


def rate(samples: Sequence[Sample]) -> Interval | None:
    """Output tokens per second, the time in which prompts are read included. None without samples."""
    groups = _grouped(_costs(samples, _speed))
    return interval(np.array([*groups.values()]), _first) if groups else None


def ratio(ours: Sequence[Sample], base: Sequence[Sample]) -> Interval | None:
    """Tokens per second of some samples against those of others, over the pairs of same prompts and repeat. None without a
    pair."""
    groups = _grouped(_costs(ours, _speed), _costs(base, _speed))
    return interval(np.array([*groups.values()]), _relative) if groups else None


def acceptance(samples: Iterable[Sample]) -> Acceptance | None:
    """None where nothing is known of steps, or nothing was ever guessed."""
    known = [(s.drafted, s.accepted) for s in samples if s.drafted and s.accepted]
    drafted = [n for d, _ in known for n in d]
    accepted = [n for _, a in known for n in a]
    if not sum(drafted):
        return None
    deepest = range(1, max(accepted) + 1)
    return Acceptance(
        len(drafted), sum(drafted), sum(accepted), [sum(n >= j for n in accepted) / len(accepted) for j in deepest]
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Straight lines between the values. Raises ValueError without any."""
    if not values:
        raise ValueError("there is no percentile of nothing")
    return float(np.percentile(values, percent))


def times(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Seconds. ttft: to the first token. tpot: per token after it. itl: between what came at once, one step or one event
    of a stream, and the next. e2el: to the last token."""
    samples = list(samples)
    return {
        "ttft": [s.ttft for s in samples if s.ttft is not None],
        "tpot": [(s.seconds - (s.ttft or 0.0)) / (s.output_tokens - 1) for s in samples if s.output_tokens > 1],
        "itl": [seconds for s in samples for seconds, _ in s.gaps],
        "e2el": [s.seconds for s in samples],
    }


def differing(ours: Iterable[Sample], base: Iterable[Sample]) -> tuple[list[tuple[str, int]], int]:
    """The texts that are not what `base` wrote with the same seed, as (prompt, repeat), and how many were compared. Token
    by token where the tokens are known."""
    theirs = {(s.prompt, s.repeat): s for s in base}
    both = [(s, theirs[s.prompt, s.repeat]) for s in ours if (s.prompt, s.repeat) in theirs]
    return [(a.prompt, a.repeat) for a, b in both if not _same(a, b)], len(both)


def promised(run: Run, setting: str) -> bool:
    """Whether a setting's texts must be those of the first: it says so, and the two are the same model's."""
    first = run.settings[0]
    [own] = [s for s in run.settings if s.name == setting]
    return own is not first and own.guarantee == "exact-tokens" and own.base_url == first.base_url


@dataclass(frozen=True)
class Change:
    """What moved between two runs. before, after: the measure in either. ratio: after against before. better: whether more
    of it is better; what is better and sure is an improvement."""

    setting: str
    measure: str
    before: float
    after: float
    ratio: Interval
    better: bool

    @property
    def verdict(self) -> str:
        """better, worse, or noise."""
        return ("better" if (self.ratio.value > 1) == self.better else "worse") if self.ratio.sure else "noise"


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other. changes: of settings that are in both, each also against its own run's first setting:
    that does not move when the machine does. paired: the prompts of both are the same. differing: by setting, how many of
    the texts that both wrote with one seed are not the same, and how many there are. only_before, only_after: settings of
    one run. differences: what was not alike about the two, in words."""

    changes: list[Change]
    paired: bool
    differing: dict[str, tuple[int, int]]
    only_before: list[str]
    only_after: list[str]
    differences: list[str]


def compare(before: Run, after: Run) -> Comparison:
    """What moved from one run to the other, and whether it is more than noise. Settings are matched by name."""
    names, bases = [s.name for s in before.settings], (before.settings[0].name, after.settings[0].name)
    both = [s.name for s in after.settings if s.name in names]
    paired = {p.id for p in before.prompts} == {p.id for p in after.prompts}
    changes, differ = list[Change](), dict[str, tuple[int, int]]()
    for name in both:
        answers = [good(run, name) for run in (before, after)]
        for measure, (cost, value, better) in _MEASURES.items():
            sides = [_grouped(_costs(samples, cost)) for samples in answers]
            changes += _change(name, measure, sides, paired, value, better)
        if name not in bases:
            theirs = [good(run, base) for run, base in zip((before, after), bases, strict=True)]
            sides = [_grouped(_costs(a, _speed), _costs(b, _speed)) for a, b in zip(answers, theirs, strict=True)]
            changes += _change(name, SPEEDUP, sides, paired, _relative, True)
        parted, compared = differing(answers[1], answers[0])
        differ[name] = len(parted), compared
    what = {
        "model": (before.model, after.model),
        "machine": (before.machine, after.machine),
        "sampling": (before.sampling, after.sampling),
        "prompts": ([(p.id, p.text) for p in before.prompts], [(p.id, p.text) for p in after.prompts]),
    }
    gone = [n for n in names if n not in both]
    new = [s.name for s in after.settings if s.name not in both]
    return Comparison(changes, paired, differ, gone, new, [name for name, (a, b) in what.items() if a != b])


def interval(table: np.ndarray, ratio: Value, *, seed: int = 0) -> Interval:
    """A ratio of sums over groups, with a bootstrap interval.

    table: float [group, column], what is summed. ratio: sums [..., column] -> [...]. The standard error of the logarithm is
    that of `DRAWS` resamples of the groups; it is widened for their small number as Student's law and the divisor n - 1 ask,
    because the plain percentiles of a bootstrap cover the truth too seldom with a dozen groups (tests/unit/bench/test_stats.py).
    """
    n = len(table)
    value = float(ratio(table.sum(0)))
    if n < 2 or not 0 < value < math.inf:
        return Interval(value, 0.0, math.inf, n)
    picks = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), DRAWS)
    return _spread(value, _logs(ratio(picks @ table)) * math.sqrt(n / (n - 1)), n)


def interval_apart(a: np.ndarray, b: np.ndarray, ratio: Value, *, seed: int = 0) -> Interval:
    """`interval` for ratio(b) / ratio(a) where the groups of the two are not the same ones."""
    n = min(len(a), len(b))
    value = float(ratio(b.sum(0)) / ratio(a.sum(0)))
    if n < 2 or not 0 < value < math.inf:
        return Interval(value, 0.0, math.inf, n)
    draw = np.random.default_rng(seed)
    logs = [
        _logs(ratio(draw.multinomial(len(t), np.full(len(t), 1 / len(t)), DRAWS) @ t))
        * math.sqrt(len(t) / (len(t) - 1))
        for t in (a, b)
    ]
    return _spread(value, logs[1] - logs[0], n)


def student(df: int) -> float:
    """The quantile of Student's law that leaves half of what `CONFIDENCE` does above it (to 3 digits: Fisher and Cornish)."""
    p = (1 + CONFIDENCE) / 2
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df**power for power, term in enumerate(terms, 1))


def _spread(value: float, logs: np.ndarray, n: int) -> Interval:
    """Open to the side where a number ends: clocks may say anything."""
    known = logs[np.isfinite(logs)]
    half = student(n - 1) * float(np.std(known)) if len(known) else math.inf
    with np.errstate(over="ignore"):
        return Interval(value, float(value * np.exp(-half)), float(value * np.exp(half)), n)


def _logs(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


Value = Callable[[np.ndarray], np.ndarray]  # sums [..., column] -> [...]
Cost = Callable[[list[Sample]], Sequence[float] | None]
Costs = dict[tuple[Group, int], tuple[float, ...]]  # by group and repeat


def _costs(samples: Iterable[Sample], cost: Cost) -> Costs:
    """What every turn comes to. Those without a cost are left out."""
    turns: dict[int, list[Sample]] = {}
    for s in samples:
        turns.setdefault(s.turn, []).append(s)
    found = {(tuple(sorted(s.prompt for s in some)), some[0].repeat): cost(some) for some in turns.values()}
    return {key: tuple(map(float, value)) for key, value in found.items() if value is not None}


def _grouped(*sides: Costs) -> dict[Group, np.ndarray]:
    """The costs of several sides beside each other, by group: sums over the repeats that all of them have."""
    groups: dict[Group, np.ndarray] = {}
    for key in sides[0]:
        if all(key in side for side in sides):
            row = np.array([x for side in sides for x in side[key]])
            groups[key[0]] = groups[key[0]] + row if key[0] in groups else row
    return groups


def _change(
    setting: str, measure: str, sides: Sequence[dict[Group, np.ndarray]], paired: bool, value: Value, better: bool
) -> list[Change]:
    """One change, none where a run does not tell."""
    a, b = sides
    common = [g for g in a if g in b]
    if paired and common:
        table = np.array([np.concatenate([a[g], b[g]]) for g in common])
        half = table.shape[1] // 2
        ratio = interval(table, lambda t: value(t[..., half:]) / value(t[..., :half]))
        one, two = value(table[:, :half].sum(0)), value(table[:, half:].sum(0))
    elif a and b:
        tables = np.array([*a.values()]), np.array([*b.values()])
        ratio = interval_apart(*tables, value)
        one, two = (value(t.sum(0)) for t in tables)
    else:
        return []
    return [Change(setting, measure, float(one), float(two), ratio, better)]


def _speed(samples: list[Sample]) -> tuple[float, float]:
    return sum(s.output_tokens for s in samples), wall(samples)


def _relative(t: np.ndarray) -> np.ndarray:
    """Tokens per second of one side against another's, of their (tokens, seconds)."""
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
