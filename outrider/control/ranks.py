"""Which of a node's children was the right one, counted; and the tree that is the best for what was counted."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from outrider.control.expectation import BY_RANK, Shape, optimal_shape
from outrider.core.types import Budget

_PRIOR = 8  # visits that BY_RANK counts for


class Ranks:
    """How often the child of rank 0, 1, 2... was the accepted one where its parent was reached. Recent visits weigh most."""

    def __init__(self, width: int = len(BY_RANK), memory: int = 64) -> None:
        """width: ranks that are told apart. memory: visits after which one counts 1/e."""
        self.keep = 1 - 1 / memory
        self.hits, self.visits = [0.0] * min(width, len(BY_RANK)), [0.0] * min(width, len(BY_RANK))

    def observe(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """parents: of a draft's nodes, siblings by rank. path: the nodes that were accepted, the root first."""
        for node, following in zip(path, [*path[1:], 0], strict=True):
            children = [n for n, parent in enumerate(parents) if parent == node]
            for rank, child in enumerate(children[: len(self.hits)]):
                self.visits[rank] = self.keep * self.visits[rank] + 1
                self.hits[rank] = self.keep * self.hits[rank] + (child == following)

    def fade(self, factor: float) -> None:
        """What was seen counts less."""
        self.hits, self.visits = [factor * x for x in self.hits], [factor * x for x in self.visits]

    def chances(self, first: float | None = None) -> list[float]:
        """By rank, not increasing; usual ones where little was seen. first: that of rank 0, if it is known better."""
        if first is None:
            first = (self.hits[0] + BY_RANK[0] * _PRIOR) / (self.visits[0] + _PRIOR)
        out, left = [first], (1 - first) / (1 - BY_RANK[0])
        for usual, hits, visits in zip(BY_RANK[1:], self.hits[1:], self.visits[1:], strict=False):
            out.append(min((hits + usual * left * _PRIOR) / (visits + _PRIOR), out[-1]))
        return out

    def shape(self, budget: Budget) -> Shape:
        """The best tree within the budget for these chances, in hundredths, so that trees can be kept."""
        return _shape(budget, tuple(max(round(chance, 2), 0.001) for chance in self.chances()))


@functools.lru_cache(maxsize=1024)
def _shape(budget: Budget, chances: tuple[float, ...]) -> Shape:
    return optimal_shape(budget, chances)
