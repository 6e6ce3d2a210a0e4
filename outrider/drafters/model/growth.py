"""A draft tree while it grows. Plain Python on the host; no model, no noise.

There are two ways to spend a node budget. *Best first* (EAGLE-2, arXiv 2406.16858; DDTree, 2604.12989) keeps the nodes that are
likeliest to be accepted, by the draft's estimate in this step. *By shape* (Sequoia, 2402.12374) uses a tree that is fixed before
anything is drawn. It is optimal for measured acceptance by rank: how often the child of rank 0, 1, 2... is the one accepted.
Verifiers that read the draft's distribution need a shape: a drawn token must not be dropped because of its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

from outrider.control.shapes import Shape
from outrider.core.types import Budget


@dataclass(eq=False)
class Growth:
    """One sequence's tree while it is drafted. Node 0 is the root; parents precede children.

    weights: the log probability that a node is accepted, by the draft's estimate. places: a node's index in the drafter's
    scratch, -1 if it was not forwarded.
    """

    root: int
    budget: Budget
    shape: Shape | None = None
    tokens: list[int] = field(init=False)
    parents: list[int] = field(default_factory=lambda: [-1], init=False)
    levels: list[int] = field(default_factory=lambda: [0], init=False)
    weights: list[float] = field(default_factory=lambda: [0.0], init=False)
    places: list[int] = field(default_factory=lambda: [0], init=False)
    roles: list[int] = field(default_factory=lambda: [0], init=False)  # the node of the shape that each node fills

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
        """The most children that a node may have."""
        return self.budget.width if self.shape is None else self.shape.widths[self.roles[node]]

    def add(self, node: int, tokens: Sequence[int], weights: Sequence[float]) -> None:
        """Add children to a node, the best first; -1 ends the list. weights: log acceptance of each, given the node's own."""
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
        """The nodes within the budget, parents first: all nodes of a shape, else the likeliest.

        A parent is never less likely than its child.
        """
        if self.shape is not None:
            return list(range(len(self.tokens)))
        order = sorted(range(len(self.tokens)), key=lambda n: (-self.weights[n], n))
        return sorted(order[: self.budget.max_nodes + 1])

    def open(self, level: int) -> list[int]:
        """Nodes of a level that get children: by shape, or because they are within the budget so far and likely enough."""
        if level >= self.budget.depth:
            return []
        if self.shape is not None:
            return [n for n, d in enumerate(self.levels) if d == level and self.width(n)]
        least = self.budget.min_probability
        return [n for n in self.kept() if self.levels[n] == level and exp(self.weights[n]) >= least]
