"""What has been seen of guesses and of seconds, kept so that it can be asked cheaply. Recent steps weigh most."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

from outrider.control.cost_model import interpolate
from outrider.control.expectation import optimal_shape
from outrider.control.ranks import Ranks
from outrider.core.tree import levels
from outrider.core.types import Budget, Draft

FIRST, _WEIGHT = 0.6, 4.0  # the chance of a guess before anything was seen, and the observations that it counts for
_PRIOR = 6.0  # those that a prior does


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

    def chances(self, prior: Sequence[float] | None = None, hope: int = 0) -> list[float]:
        """By depth, each given the one before. prior: what to believe where little was seen, else the depth above. hope: to so
        many guesses, but the first, a standard error is added: what is drafted short says nothing of what would have followed."""
        chances: list[float] = []
        for j, (hits, tries) in enumerate(zip(self.hits, self.tries, strict=True)):
            belief = prior[j] if prior else chances[-1] if chances else self.first
            weight = _PRIOR if prior else _WEIGHT
            chances.append((hits + weight * belief) / (tries + weight))
        for j in range(1, min(hope, len(chances))):
            chances[j] += math.sqrt(chances[j] * (1 - chances[j]) / (self.tries[j] + _WEIGHT))
        return chances


def survival(chances: Sequence[float]) -> list[float]:
    """The running product: the chance that the first j stand."""
    kept, result = 1.0, list[float]()
    for chance in chances:
        kept *= chance
        result.append(kept)
    return result


class RankAcceptance:
    """Where in a tree the accepted guesses stood, by order: 0 is the guess that the drafter thought likeliest. A tree of the n
    likeliest guesses is part of the tree of the n + 1 likeliest, so that what was seen of a large tree tells what every
    smaller one would have kept; so does it of flatter ones, where the deeper guesses are not counted."""

    def __init__(self, limit: Budget, memory: int) -> None:
        self.limit, self.keep = limit, 1 - 1 / memory
        self.hits = [[0.0] * limit.max_nodes for _ in range(limit.depth)]  # by the depth of the tree, less one
        self.tries = [[0.0] * limit.max_nodes for _ in range(limit.depth)]
        self.ranks = Ranks(limit.width, memory)

    def observe(self, draft: Draft, b: int, nodes: Sequence[int], asked: Budget) -> int:
        """nodes: of entry b, the accepted ones, the root first. Returns how many of them a chain would have had."""
        parents = draft.parents[b].tolist()
        level, order = levels(parents), [n for n, parent in enumerate(parents) if parent >= 0]
        if draft.confidence is not None:
            order.sort(key=draft.confidence[b].neg().tolist().__getitem__)
        good, size = set(nodes[1:]), min(asked.max_nodes, self.limit.max_nodes)
        for depth in range(1, min(asked.depth, self.limit.depth) + 1):
            hits, tries = self.hits[depth - 1], self.tries[depth - 1]
            inside = [node in good for node in order if level[node] <= depth][:size]
            for n, hit in enumerate(inside + [False] * (size - len(inside))):
                hits[n], tries[n] = self.keep * hits[n] + hit, self.keep * tries[n] + 1
        self.ranks.observe(parents, nodes)
        straight = 0
        for node, following in itertools.pairwise(nodes):
            if parents.index(node) != following:  # not the first child
                break
            straight += 1
        return straight

    def fade(self, factor: float) -> None:
        """Time has passed without trees: what was seen counts less, so that bad luck with a few is not believed for ever."""
        self.ranks.fade(factor)
        for row in (*self.hits, *self.tries):
            row[:] = [factor * x for x in row]

    def expected(self, first: float) -> list[list[float]]:
        """[depth][nodes]: accepted guesses of a step by its budget, both from one on. first: the chance of a chain's guess,
        which with the chances by rank stands in where little was seen."""
        ranks, size = self.ranks.chances(first), self.limit.max_nodes
        whole = optimal_shape(Budget(self.limit.depth, len(ranks), 3 * size), ranks)
        value, level = [1.0], levels(whole.parents)
        for parent, rank in zip(whole.parents[1:], whole.ranks[1:], strict=True):
            value.append(value[parent] * ranks[rank])
        total = list[list[float]]()
        for depth, (hits, tries) in enumerate(zip(self.hits, self.tries, strict=True), 1):
            believed = [v for v, d in zip(value[1:], level[1:], strict=True) if d <= depth][:size]
            believed += [0.0] * (size - len(believed))
            row = ((h + 6 * v) / (t + 6) for h, t, v in zip(hits, tries, believed, strict=True))
            total.append(list(itertools.accumulate(row)))
        return total


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

    def forget(self, size: int) -> None:
        """What was measured so far; its last median stays until there is another."""
        self.samples.pop(size, None)
        self._waiting.pop(size, None)

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
