"""Statistics of the samples of a measurement, with confidence intervals. Pure functions of a `Run`; numpy only.

The unit of statistics is the *group*: the prompts that were sent together, or one prompt if the concurrency is 1. Groups are
a sample of the user's texts. The intervals therefore resample groups, never single answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.core.intervals import Interval, interval
from outrider_lab.bench.run import Run, Sample

Group = tuple[str, ...]
"""Ids of prompts."""
PERCENTILES = (50, 90, 99)
TIMES = {
    "ttft": "to the first token",
    "tpot": "per later token",
    "itl": "from step to step",
    "e2el": "for the whole answer",
}
"""What `times` measures. A step is one arrival: of a server, one event of a stream."""


@dataclass(frozen=True)
class AcceptanceStats:
    """Counts of draft tokens, of some answers."""

    steps: int
    drafted: int
    accepted: int
    by_depth: list[float]  # share of all steps that accepted at least 1, 2, ... draft tokens

    @property
    def length(self) -> float:
        """Tokens per step, the target's own token included."""
        return 1 + self.accepted / self.steps

    @property
    def rate(self) -> float | None:
        """Accepted of the drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None


def answered(run: Run, setting: str) -> list[Sample]:
    """The answers of a setting, without failed requests."""
    return [s for s in run.samples if s.setting == setting and s.error is None]


def wall(samples: Iterable[Sample]) -> float:
    """Seconds for all samples. The samples of one turn ran at the same time, so the longest of them counts."""
    turns: dict[int, float] = {}
    for s in samples:
        turns[s.turn] = max(turns.get(s.turn, 0.0), s.seconds)
    return sum(turns.values())


def rate(samples: Sequence[Sample]) -> Interval | None:
    """Output tokens per second, prefill included. None if there are no tokens or no time passed."""
    groups = grouped(costs(samples, speed)) if _timed(samples) else {}
    return interval(np.array([*groups.values()])) if groups else None


def ratio(ours: Sequence[Sample], base: Sequence[Sample]) -> Interval | None:
    """Tokens per second of `ours` over those of `base`, for the prompts and repeats that both have.

    None without a common prompt, and where the ratio is not a positive number.
    """
    groups = grouped(costs(ours, speed), costs(base, speed)) if _timed(ours) and _timed(base) else {}
    speedup = interval(np.array([*groups.values()]), relative) if groups else None
    return speedup if speedup is not None and 0 < speedup.value < math.inf else None


def acceptance(samples: Iterable[Sample]) -> AcceptanceStats | None:
    """None if the steps are unknown, or if there were no draft tokens."""
    pairs = steps(samples)
    drafted, accepted = sum(n for n, _ in pairs), sum(n for _, n in pairs)
    if not drafted:
        return None
    return AcceptanceStats(len(pairs), drafted, accepted, [n / len(pairs) for _, n in by_depth(pairs) if n])


def steps(samples: Iterable[Sample]) -> list[tuple[int, int]]:
    """Draft tokens of each step, and how many were accepted; none where they are unknown."""
    return [pair for s in samples for pair in zip(s.drafted or (), s.accepted or (), strict=False)]


def by_depth(steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each depth of a chain, (verified, accepted) draft tokens. A token counts as verified if all before it were accepted.

    steps: draft tokens of a step, and how many were accepted.
    """
    verified, passed = Counter[int](), Counter[int]()
    for drafted, accepted in steps:
        verified.update(range(min(drafted, accepted + 1)))
        passed.update(range(min(drafted, accepted)))
    return [(verified[j], passed[j]) for j in range(len(verified))]


def times(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Seconds, by the names of `TIMES`."""
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
    [other] = [s for s in run.settings if s.name == setting]
    return other is not first and other.guarantee == "exact-tokens" and other.base_url == first.base_url


Cost = Callable[[list[Sample]], Sequence[float] | None]
# By group and repeat.
Costs = dict[tuple[Group, int], tuple[float, ...]]


def costs(samples: Iterable[Sample], cost: Cost) -> Costs:
    """The cost of every turn. Turns without one are left out."""
    turns: dict[int, list[Sample]] = {}
    for s in samples:
        turns.setdefault(s.turn, []).append(s)
    by_group = {(tuple(sorted(s.prompt for s in some)), some[0].repeat): cost(some) for some in turns.values()}
    return {key: tuple(map(float, value)) for key, value in by_group.items() if value is not None}


def grouped(*sides: Costs) -> dict[Group, np.ndarray]:
    """Costs of several settings side by side, by group: sums over the repeats that all of them have."""
    groups: dict[Group, np.ndarray] = {}
    for key in sides[0]:
        if all(key in side for side in sides):
            row = np.array([x for side in sides for x in side[key]])
            groups[key[0]] = groups[key[0]] + row if key[0] in groups else row
    return groups


def _timed(samples: Iterable[Sample]) -> bool:
    return any(s.output_tokens and s.seconds > 0 for s in samples)


def speed(samples: list[Sample]) -> tuple[float, float]:
    """Tokens, and the seconds that they took."""
    return sum(s.output_tokens for s in samples), wall(samples)


def relative(t: np.ndarray) -> np.ndarray:
    """Ratio of two rates, from columns (tokens, seconds, tokens, seconds)."""
    return t[..., 0] / t[..., 1] * t[..., 3] / t[..., 2]


def _same(a: Sample, b: Sample) -> bool:
    return a.token_ids == b.token_ids if a.token_ids and b.token_ids else a.text == b.text
