"""Trees from places where the end of the text has occurred before. Plain Python; no model, no noise.

A *context* is an end of the text that was found somewhere, with its length. A *source* says what followed there, with counts.
The contexts are the experts of a Bayesian mixture. The weight of a node is the sum over its contexts:

    mass(node + token) = sum over contexts c of mass(c, node) n_c(token) / (n_c + doubt / length_c)

A context that predicts a token wrongly has no weight below it, and one that is right gains on the others. `doubt / length` is
the probability of a token that never followed (the escape of PPM). A two-token match seen once is weak evidence; a thirty-token
match is strong. Matches get longer deeper in the tree.

The mass of a node estimates the probability that it is accepted. So the tree grows best first; with width 1 it is a chain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush, nlargest
from typing import Any, NamedTuple, Protocol

from outrider.control.plan import Offer
from outrider.core.types import Budget, Draft
from outrider.drafters.base import draft_of

WIDEST = 8  # continuations of one context that are looked at


class ContextSource(Protocol):
    """Where contexts are found. A state is the source's own name for a context."""

    def following(self, state: Any) -> tuple[float, Sequence[tuple[int, float, Hashable]]]:
        """(total count, [(token, count, state after the token), ...]): what followed, the most frequent first."""
        ...


class Context(NamedTuple):
    """An end of the text, found in a source. weight: trust relative to the other contexts. length: matching tokens."""

    source: ContextSource
    state: Hashable
    weight: float
    length: int


def drafted(offers: Sequence[Offer]) -> Draft:
    """One draft for a batch. Its confidences are the masses, its notes the offers."""
    return draft_of([offer.nodes for offer in offers], {b: offer.masses for b, offer in enumerate(offers)}, offers)


def grow(root: int, contexts: Iterable[Context], budget: Budget, *, least: float = 0.0, doubt: float = 0.0) -> Offer:
    """A tree within the budget. Nodes with a mass below `least` are left out."""
    nodes, weights = [(root, -1)], [1.0]
    members = list(contexts)
    total, match = sum(c.weight for c in members), max((c.length for c in members), default=0)
    if not total or not budget.depth or not budget.width or not budget.max_nodes:
        return Offer(nodes, weights, match)
    heap: list[tuple[float, int, int, int, int, list[Context]]] = []  # (-mass, order, token, parent, level, members)
    order = 0

    def expand(node: int, level: int, members: Iterable[Context], scale: float) -> None:
        nonlocal order
        following: dict[int, dict[tuple[int, Hashable], Context]] = {}
        masses: dict[int, float] = {}
        for source, state, weight, length in members:
            n, options = source.following(state)
            share = scale * weight / (n + doubt / length) if options else 0.0
            for token, count, child in options:
                mass = share * count
                masses[token] = masses.get(token, 0.0) + mass
                into = following.setdefault(token, {})
                # contexts that lead to one state are one context from there on
                same = into.get((id(source), child))
                longer = max(length + 1, same.length if same else 0)
                into[id(source), child] = Context(source, child, mass + (same.weight if same else 0.0), longer)
        for token, mass in nlargest(budget.width, masses.items(), key=lambda item: item[1]):
            if mass >= least:
                order += 1
                heappush(heap, (-mass, order, token, node, level + 1, list(following[token].values())))

    expand(0, 0, members, 1 / total)
    while heap:
        mass, _, token, parent, level, members = heappop(heap)
        nodes.append((token, parent))
        weights.append(-mass)
        if len(nodes) > budget.max_nodes:
            break
        if level < budget.depth:
            expand(len(nodes) - 1, level, members, 1.0)
    return Offer(nodes, weights, match)


class TextSource:
    """A text as a source. A state is a tuple of places; the tokens at these places followed. Ties go to the first place."""

    def __init__(self, tokens: Sequence[int], end: int = -1) -> None:
        """end: a token after which nothing follows, such as the border between two documents."""
        self.tokens, self.end = tokens, end

    def following(self, state: tuple[int, ...]) -> tuple[float, list[tuple[int, float, Hashable]]]:
        tokens, n = self.tokens, len(self.tokens)
        if len(state) == 1:  # the usual case, and the tree's hot path
            place = state[0]
            if place >= n or tokens[place] == self.end:
                return 0, []
            return 1, [(tokens[place], 1, (place + 1,))]
        groups: dict[int, list[int]] = {}
        for place in state:
            if place < n:
                groups.setdefault(tokens[place], []).append(place + 1)
        groups.pop(self.end, None)
        best = nlargest(WIDEST, groups.items(), key=lambda item: len(item[1]))
        return sum(map(len, groups.values())), [(t, len(p), tuple(p)) for t, p in best]
