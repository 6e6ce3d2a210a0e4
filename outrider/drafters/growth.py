"""Trees as they grow, and the shapes worth growing. Plain Python on the host; no model, no noise.

Two ways to spend a node budget. *Best first* (EAGLE-2, arXiv 2406.16858; DDTree, 2604.12989): keep the nodes that are
likeliest to be visited, by the draft's own estimate of this step. *By shape* (Sequoia, 2402.12374): a tree fixed before
anything is drawn, optimal for measured chances that the child of rank 0, 1, 2... is the one accepted. Verifiers that read
the draft's law need the second: a drawn token must not be dropped for what it is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from outrider.types import Budget

BY_RANK = (0.7, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008)  # chances of a middling draft, until measured


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
        out = [0] * len(self.parents)
        for parent in self.parents[1:]:
            out[parent] += 1
        return out


def optimal_shape(budget: Budget, by_rank: Sequence[float] = BY_RANK) -> Shape:
    """The tree within the budget that has the largest expected number of accepted nodes.

    by_rank[r]: the chance that the child of rank r is accepted at a node that is reached, not increasing. A node is worth
    the product along its path, so the best tree is the set of the most valuable nodes, which is closed under parents:
    Sequoia's dynamic program (its section 4.1) gives the same value and needs more work for it.
    """
    chances = [*by_rank[: budget.width]]
    if any(b > a for a, b in itertools.pairwise(chances)):
        raise ValueError(f"by_rank must not increase: a later child cannot be the better one, got {chances}")
    parents, ranks, levels = [-1], [0], [0]
    heap: list[tuple[float, int, int, int]] = []  # (-value, level, parent, rank)

    def offer(value: float, level: int, parent: int, rank: int) -> None:
        if rank < len(chances) and level <= budget.depth and chances[rank] > 0:
            heappush(heap, (-value * chances[rank], level, parent, rank))

    offer(1.0, 1, 0, 0)
    while heap and len(parents) <= budget.max_nodes:
        value, level, parent, rank = heappop(heap)
        parents.append(parent)
        ranks.append(rank)
        levels.append(level)
        offer(-value / chances[rank], level, parent, rank + 1)  # the next sibling
        offer(-value, level + 1, len(parents) - 1, 0)  # the first child
    return Shape(tuple(parents), tuple(ranks))


def expected_accepted(shape: Shape, by_rank: Sequence[float] = BY_RANK) -> float:
    """Accepted nodes per step, by the same estimate: the sum over nodes of the chance to be reached."""
    value = [1.0]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        value.append(value[parent] * by_rank[rank])
    return sum(value[1:])


def sized_shape(
    limit: Budget, by_rank: Sequence[float], target_ms: Callable[[int], float], draft_ms: Callable[[int], float]
) -> Shape:
    """The shape with the most committed tokens per second, from no node at all up to the limit.

    target_ms(n): a target's forward over n nodes, the root counted. draft_ms(d): drafting d levels. Where nodes are dear
    the answer is a chain, or the root alone: "do not speculate". Nothing is gained by skipping node counts, so all are
    tried, for every depth.
    """
    best, rate = Shape((-1,), (0,)), 1.0 / target_ms(1)
    for depth in range(1, limit.depth + 1):
        whole = optimal_shape(Budget(depth, limit.width, limit.max_nodes), by_rank)
        value, total = [1.0], 1.0
        for n, (parent, rank) in enumerate(zip(whole.parents[1:], whole.ranks[1:], strict=True), start=1):
            value.append(value[parent] * by_rank[rank])
            total += value[n]  # nodes come in the order of their value: a prefix is the best tree of its size
            per_ms = total / (target_ms(n + 1) + draft_ms(depth))
            if per_ms > rate:
                best, rate = Shape(whole.parents[: n + 1], whole.ranks[: n + 1]), per_ms
    return best


@dataclass(eq=False)
class Growth:
    """One row's tree while it is drafted. Node 0 is the root; parents precede children.

    weights: logarithm of the chance that the verifier comes by, as far as the draft can tell. places: a node's index in
    the drafter's own scratch, -1 if it was not forwarded.
    """

    root: int
    budget: Budget
    shape: Shape | None = None
    tokens: list[int] = field(init=False)
    parents: list[int] = field(default_factory=lambda: [-1], init=False)
    levels: list[int] = field(default_factory=lambda: [0], init=False)
    weights: list[float] = field(default_factory=lambda: [0.0], init=False)
    places: list[int] = field(default_factory=lambda: [0], init=False)
    roles: list[int] = field(default_factory=lambda: [0], init=False)  # the node of the shape that a node plays

    def __post_init__(self) -> None:
        self.tokens = [self.root]

    def path(self, node: int) -> list[int]:
        """Tokens below the root, down to a node."""
        out: list[int] = []
        while node > 0:
            out.append(self.tokens[node])
            node = self.parents[node]
        return out[::-1]

    def width(self, node: int) -> int:
        """Children that may be asked for at a node."""
        return self.budget.width if self.shape is None else self.shape.widths[self.roles[node]]

    def add(self, node: int, tokens: Sequence[int], weights: Sequence[float]) -> None:
        """Children of a node, the best first; -1 ends them. weights: log chance of each, given that the node is visited."""
        role = self.roles[node]
        for rank, (token, weight) in enumerate(zip(tokens, weights, strict=False)):
            if rank >= self.width(node) or token < 0:
                break
            self.tokens.append(token)
            self.parents.append(node)
            self.levels.append(self.levels[node] + 1)
            self.weights.append(self.weights[node] + min(weight, 0.0))
            self.places.append(-1)
            self.roles.append(0 if self.shape is None else self.shape.children[role, rank])

    def kept(self) -> list[int]:
        """The nodes within the budget, parents first: by shape all, else the likeliest (a parent is never less likely)."""
        if self.shape is not None:
            return list(range(len(self.tokens)))
        order = sorted(range(len(self.tokens)), key=lambda n: (-self.weights[n], n))
        return sorted(order[: self.budget.max_nodes + 1])

    def open(self, level: int, least: float = -inf) -> list[int]:
        """Nodes of a level that deserve children: by shape, or because they stand within the budget so far and are visited
        with at least the (log) chance `least`."""
        if level >= self.budget.depth:
            return []
        if self.shape is not None:
            return [n for n, d in enumerate(self.levels) if d == level and self.width(n)]
        return [n for n in self.kept() if self.levels[n] == level and self.weights[n] >= least]
