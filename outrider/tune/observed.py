"""What has been seen of guesses and of seconds, kept so that it can be asked cheaply. Recent steps weigh most."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

from outrider.tune.cost import interpolate

FIRST = 0.6  # the chance of a guess before anything was seen: as much as `_WEIGHT` observations
_WEIGHT = 2.0


class Acceptance:
    """How likely guess j is kept, given that those before it were. Nothing is assumed of how the chance falls with depth:
    where little was seen, the depth before stands in."""

    def __init__(self, depth: int, memory: int) -> None:
        """memory: steps after which an observation counts 1/e."""
        self.hits, self.tries = [0.0] * depth, [0.0] * depth
        self.keep, self.first = 1 - 1 / memory, FIRST

    def observe(self, asked: int, kept: int) -> None:
        """asked: guesses that were wanted. kept: how many came and stood, from the first on."""
        self.hits = [self.keep * x for x in self.hits]
        self.tries = [self.keep * x for x in self.tries]
        for j in range(min(asked, kept + 1, len(self.tries))):
            self.tries[j] += 1
            self.hits[j] += j < kept

    def fade(self, factor: float) -> None:
        """Time has passed without guesses: what was seen counts less, and stays as what is expected at first."""
        self.first = self.chances()[0]
        self.hits, self.tries = [factor * x for x in self.hits], [factor * x for x in self.tries]

    def chances(self, prior: Sequence[float] | None = None) -> list[float]:
        """By depth, each given the one before. prior: what to believe where little was seen, else the depth above."""
        chances: list[float] = []
        for j, (hits, tries) in enumerate(zip(self.hits, self.tries, strict=True)):
            belief = prior[j] if prior else chances[-1] if chances else self.first
            weight = 3 * _WEIGHT if prior else _WEIGHT
            chances.append((hits + weight * belief) / (tries + weight))
        return chances


def survival(chances: Sequence[float]) -> list[float]:
    """The running product: the chance that the first j stand."""
    kept, result = 1.0, list[float]()
    for chance in chances:
        kept *= chance
        result.append(kept)
    return result


class Curve:
    """Seconds by size, each the median of its last few measurements (of two the lower: a machine pauses, it never hurries);
    straight lines between. Medians are taken anew every few measurements: asking must cost nothing beside a step."""

    def __init__(self, start: float | None = None, slope: float = 0.0) -> None:
        """start: the value at size 0, if it is known by itself. slope: assumed, in parts of the value at 0, until two sizes
        were measured."""
        self.samples: dict[int, deque[float]] = {}
        self.medians: dict[int, float] = {} if start is None else {0: start}
        self.slope = slope
        self._waiting: dict[int, int] = {}
        self._known: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        samples = self.samples.setdefault(size, deque(maxlen=9))
        samples.append(seconds)
        self._waiting[size] = self._waiting.get(size, 0) + 1
        if len(samples) < 4 or self._waiting[size] >= 4:
            self._waiting[size] = 0
            self.medians[size] = median_low(samples)
            self._known.clear()

    def count(self, size: int) -> int:
        return len(self.samples.get(size, ()))

    def at(self, size: int) -> float | None:
        """None where nothing is known."""
        value = self._known.get(size)
        if value is None and self.medians:
            if len(self.medians) == 1 and 0 in self.medians:
                value = self.medians[0] * (1 + self.slope * size)
            else:
                value = interpolate(self.medians, size)
            self._known[size] = value
        return value
