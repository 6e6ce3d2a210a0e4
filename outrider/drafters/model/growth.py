"""Trees as they grow. Plain Python on the host; no model, no noise.

Two ways to spend a node budget. *Best first* (EAGLE-2, arXiv 2406.16858; DDTree, 2604.12989): keep the nodes that are
likeliest to be visited, by the draft's own estimate of this step. *By shape* (Sequoia, 2402.12374): a tree fixed before
anything is drawn, optimal for measured chances that the child of rank 0, 1, 2... is the one accepted. Verifiers that read
the draft's law need the second: a drawn token must not be dropped for what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from outrider.control.expectation import Shape
from outrider.core.types import Budget


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
