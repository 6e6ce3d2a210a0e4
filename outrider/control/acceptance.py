"""Running acceptance of draft tokens: by depth in a chain, by rank among siblings, by order in a tree.

All counts decay exponentially, so recent steps weigh most. Nothing here reads a clock.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import cast

from outrider.control.expectation import BY_RANK, Shape, optimal_shape
from outrider.core.tree import levels
from outrider.core.types import Budget, Draft, ints

FIRST = 0.6  # acceptance of a draft token before anything was observed
_FIRST_WEIGHT = 4.0  # pseudo-observations of FIRST, and of the depth above
_PRIOR_WEIGHT = 6.0  # pseudo-observations of a prior that the caller gives
_RANK_WEIGHT = 8  # pseudo-observations of BY_RANK


class Acceptance:
    """Acceptance by depth: how likely draft token j is accepted, given that those before it were.

    No curve over depth is assumed. Where little was observed, the estimate of the depth above stands in.
    """

    def __init__(self, depth: int, memory: int) -> None:
        """depth: the longest draft. memory: steps after which an observation counts 1/e."""
        self.hits, self.tries = [0.0] * depth, [0.0] * depth
        self.keep, self.first = 1 - 1 / memory, FIRST

    def observe(self, asked: int, accepted: int) -> None:
        """asked: draft tokens that the budget allowed. accepted: how many were proposed and accepted, from the first on."""
        self.hits = [self.keep * x for x in self.hits]
        self.tries = [self.keep * x for x in self.tries]
        for j in range(min(asked, accepted + 1, len(self.tries))):
            self.tries[j] += 1
            self.hits[j] += j < accepted

    def fade(self, factor: float) -> None:
        """Time has passed without drafts: old counts weigh less. The first estimate keeps its value and becomes the prior."""
        self.first = self.chances()[0]
        self.hits, self.tries = [factor * x for x in self.hits], [factor * x for x in self.tries]

    def chances(self, prior: Sequence[float] | None = None, hope: int = 0) -> list[float]:
        """The acceptance of each depth, given that the depth above was accepted.

        prior: the estimate where little was observed; None takes the depth above. hope: adds a standard error to the
        depths 2..hope, because short drafts say nothing of the tokens that would have followed.
        """
        chances: list[float] = []
        for j, (hits, tries) in enumerate(zip(self.hits, self.tries, strict=True)):
            belief = prior[j] if prior else chances[-1] if chances else self.first
            weight = _PRIOR_WEIGHT if prior else _FIRST_WEIGHT
            chances.append((hits + weight * belief) / (tries + weight))
        for j in range(1, min(hope, len(chances))):
            chances[j] += math.sqrt(chances[j] * (1 - chances[j]) / (self.tries[j] + _FIRST_WEIGHT))
        return chances


def survival(chances: Sequence[float]) -> list[float]:
    """The running product: the chance that the first j draft tokens are all accepted."""
    alive, result = 1.0, list[float]()
    for chance in chances:
        alive *= chance
        result.append(alive)
    return result


class Ranks:
    """Acceptance by rank: how often the child of rank 0, 1, 2... was the accepted one, where its parent was reached."""

    def __init__(self, width: int = len(BY_RANK), memory: int = 64) -> None:
        """width: ranks that are counted apart. memory: visits after which one counts 1/e."""
        self.keep = 1 - 1 / memory
        self.hits, self.visits = [0.0] * min(width, len(BY_RANK)), [0.0] * min(width, len(BY_RANK))

    def observe(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """parents: of a draft's nodes, siblings in the order of their rank. path: the accepted nodes, the root first."""
        for node, following in zip(path, [*path[1:], 0], strict=True):
            children = [n for n, parent in enumerate(parents) if parent == node]
            for rank, child in enumerate(children[: len(self.hits)]):
                self.visits[rank] = self.keep * self.visits[rank] + 1
                self.hits[rank] = self.keep * self.hits[rank] + (child == following)

    def fade(self, factor: float) -> None:
        """Old counts weigh less."""
        self.hits, self.visits = [factor * x for x in self.hits], [factor * x for x in self.visits]

    def chances(self, first: float | None = None) -> list[float]:
        """The acceptance of each rank, never increasing; BY_RANK where little was observed.

        first: the acceptance of rank 0, if the caller knows it better.
        """
        if first is None:
            first = (self.hits[0] + BY_RANK[0] * _RANK_WEIGHT) / (self.visits[0] + _RANK_WEIGHT)
        out, left = [first], (1 - first) / (1 - BY_RANK[0])
        for usual, hits, visits in zip(BY_RANK[1:], self.hits[1:], self.visits[1:], strict=False):
            out.append(min((hits + usual * left * _RANK_WEIGHT) / (visits + _RANK_WEIGHT), out[-1]))
        return out

    def shape(self, budget: Budget) -> Shape:
        """The best tree within the budget for these chances. They are rounded to hundredths, so that trees can be reused."""
        return _shape(budget, tuple(max(round(chance, 2), 0.001) for chance in self.chances()))


@functools.lru_cache(maxsize=1024)
def _shape(budget: Budget, chances: tuple[float, ...]) -> Shape:
    return optimal_shape(budget, chances)


class RankAcceptance:
    """Acceptance by order in a tree: order 0 is the node that the drafter found most likely.

    A tree of the n most likely nodes is part of the tree of the n + 1 most likely ones. So one large tree also tells what
    every smaller tree would have accepted. The same holds for flatter trees, whose deeper nodes are not counted.
    """

    def __init__(self, limit: Budget, memory: int) -> None:
        """limit: the largest tree. memory: steps after which an observation counts 1/e."""
        self.limit, self.keep = limit, 1 - 1 / memory
        # [depth of the tree - 1][order]
        self.hits = [[0.0] * limit.max_nodes for _ in range(limit.depth)]
        self.tries = [[0.0] * limit.max_nodes for _ in range(limit.depth)]
        self.ranks = Ranks(limit.width, memory)

    def observe(self, draft: Draft, b: int, nodes: Sequence[int], asked: Budget) -> int:
        """Count one tree: entry b of the draft. nodes: its accepted nodes, the root first. asked: its budget.

        Returns how many of the accepted nodes a chain of first children would have had.
        """
        parents = ints(draft.parents[b])
        level, order = levels(parents), [n for n, parent in enumerate(parents) if parent >= 0]
        if draft.confidence is not None:
            falling = cast("list[float]", draft.confidence[b].neg().tolist())  # pyright: ignore[reportUnknownMemberType]
            order.sort(key=falling.__getitem__)
        good, size = set(nodes[1:]), min(asked.max_nodes, self.limit.max_nodes)
        for depth in range(1, min(asked.depth, self.limit.depth) + 1):
            hits, tries = self.hits[depth - 1], self.tries[depth - 1]
            inside = [node in good for node in order if level[node] <= depth][:size]
            for n, hit in enumerate(inside + [False] * (size - len(inside))):
                hits[n], tries[n] = self.keep * hits[n] + hit, self.keep * tries[n] + 1
        self.ranks.observe(parents, nodes)
        straight = 0
        for node, following in itertools.pairwise(nodes):
            first_child = parents.index(node)
            if first_child != following:
                break
            straight += 1
        return straight

    def fade(self, factor: float) -> None:
        """Time has passed without trees: old counts weigh less, so that bad luck with a few trees is not believed for ever."""
        self.ranks.fade(factor)
        for counts in (*self.hits, *self.tries):
            counts[:] = [factor * x for x in counts]

    def expected(self, first: float) -> list[list[float]]:
        """Expected accepted nodes of a step: result[depth - 1][nodes - 1] for a budget of that depth and size.

        first: the acceptance of a chain's first token. With the chances by rank it is the prior where little was observed.
        """
        ranks, size = self.ranks.chances(first), self.limit.max_nodes
        whole = optimal_shape(Budget(self.limit.depth, len(ranks), 3 * size), ranks)
        value, level = [1.0], levels(whole.parents)
        for parent, rank in zip(whole.parents[1:], whole.ranks[1:], strict=True):
            value.append(value[parent] * ranks[rank])
        total = list[list[float]]()
        for depth, (hits, tries) in enumerate(zip(self.hits, self.tries, strict=True), 1):
            prior = [v for v, d in zip(value[1:], level[1:], strict=True) if d <= depth][:size]
            prior += [0.0] * (size - len(prior))
            chances = (
                (h + _PRIOR_WEIGHT * v) / (t + _PRIOR_WEIGHT) for h, t, v in zip(hits, tries, prior, strict=True)
            )
            total.append(list(itertools.accumulate(chances)))
        return total
