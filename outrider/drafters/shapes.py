"""Tree shapes that gain most. Pure functions: no clock, no state.

A `Shape` is a tree that is fixed before anything is drawn (Sequoia, arXiv 2402.12374). It is optimal for measured acceptance by
rank: the probability that the child of rank 0, 1, 2... is the one accepted.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from outrider.core.types import Budget

# Acceptance by rank of an average draft, until it is measured.
BY_RANK = (0.7, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008)


@dataclass(frozen=True)
class Shape:
    """A tree of ranks: node n is child number `ranks[n]` of `parents[n]`. Node 0 is the root."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @functools.cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(parent, rank) -> node."""
        return {key: n for n, key in enumerate(zip(self.parents, self.ranks, strict=True)) if n}

    @functools.cached_property
    def widths(self) -> list[int]:
        """Children of each node."""
        counts = Counter(self.parents)
        return [counts[n] for n in range(len(self.parents))]


def optimal_shape(budget: Budget, by_rank: Sequence[float] = BY_RANK) -> Shape:
    """The tree within the budget with the largest expected number of accepted nodes. Raises ValueError if by_rank increases.

    by_rank[r]: the probability that the child of rank r is accepted, given that its parent is; not increasing. The value of a
    node is the product along its path. A parent is worth more than its child, so the most valuable nodes form a tree, and it
    is the best one. The dynamic program of Sequoia (section 4.1) gives the same value with more work.
    """
    accepted = [*by_rank[: budget.width]]
    if any(b > a for a, b in itertools.pairwise(accepted)):
        raise ValueError(f"by_rank must not increase: a later child cannot be the better one, got {accepted}")
    parents, ranks, levels = [-1], [0], [0]
    heap: list[tuple[float, int, int, int]] = []  # (-value, level, parent, rank)

    def offer(value: float, level: int, parent: int, rank: int) -> None:
        if rank < len(accepted) and level <= budget.depth and accepted[rank] > 0:
            heappush(heap, (-value * accepted[rank], level, parent, rank))

    offer(1.0, 1, 0, 0)
    while heap and len(parents) <= budget.max_nodes:
        value, level, parent, rank = heappop(heap)
        parents.append(parent)
        ranks.append(rank)
        levels.append(level)
        offer(-value / accepted[rank], level, parent, rank + 1)  # the next sibling
        offer(-value, level + 1, len(parents) - 1, 0)  # the first child
    return Shape(tuple(parents), tuple(ranks))
