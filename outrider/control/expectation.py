"""What guesses are worth before they are made: pure expectations, and the shapes that have the largest. No clock, no state.

Acceptance is given as *survival*: survival[j - 1] is the chance that the first j guesses of a chain are all kept (for a
tree: that something is kept at depth j). Equal chances alpha for every guess are the case survival[j - 1] = alpha ** j.

A tree fixed before anything is drawn (Sequoia, arXiv 2402.12374) is a `Shape`, optimal for measured chances that the child of
rank 0, 1, 2... is the one accepted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from outrider.core.types import Budget

BY_RANK = (0.7, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008)  # chances of a middling draft, until measured


def geometric(alpha: float, depth: int) -> list[float]:
    """Survival where every guess is kept with probability alpha, whatever came before. Raises ValueError outside 0..1."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is a probability, got {alpha}")
    return [alpha**j for j in range(1, depth + 1)]


def expected_tokens(survival: Sequence[float]) -> float:
    """Tokens a step commits on average, the target's own included. With `geometric` it is (1 - alpha**(gamma + 1)) /
    (1 - alpha), Leviathan et al. 2211.17192, equation 1."""
    return 1 + sum(survival)


def speedup(survival: Sequence[float], draft: float, verify: float = 1.0) -> float:
    """Against plain decoding. draft: seconds of the whole draft, verify: of the target over all its nodes, both in plain
    steps. With `geometric`, verify=1 and draft=gamma * c it is (1 - alpha**(gamma + 1)) / ((1 - alpha) * (gamma * c + 1)),
    Leviathan et al., theorem 3.8."""
    return expected_tokens(survival) / (draft + verify)


def best_depth(survival: Sequence[float], seconds: Sequence[float]) -> int:
    """The depth with the most tokens per second; 0 is plain decoding, and wins a draw. seconds[k]: of a step k deep."""
    rate, tokens, best = 1 / seconds[0], 1.0, 0
    for depth, (kept, time) in enumerate(zip(survival, seconds[1:], strict=False), 1):
        tokens += kept
        if tokens / time > rate:
            rate, best = tokens / time, depth
    return best


def worth_deeper(tokens: float, seconds: float, kept: float, more: float) -> bool:
    """The marginal rule: one guess more, kept with probability `kept` for `more` seconds, pays if its rate beats the
    rate so far. Following it is `best_depth` where survival falls and each level costs no less than the one before."""
    return kept * seconds > more * tokens


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
