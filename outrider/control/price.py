"""What a step's draft is worth: one price of a second, and the drafts that pay at it. Pure functions: no clock, no state.

The price of a second is the number of tokens that the present way of decoding writes in it (Dinkelbach 1967: the policy with the
largest ratio of tokens to seconds also has the largest difference tokens - price * seconds, at the price that is this ratio). So
every decision of a step is one comparison:

    value = expected accepted tokens - price * (draft + reading + forward over the nodes - plain forward)

Survival of a node: the probability that it is accepted, the product of the chances along its path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

MARGIN = 1.2
"""A chain goes on while its next token is worth so many times its seconds: chances are uncertain, and plain steps are not."""
_ROUNDS = 8
_ALONE = 4.0  # plain steps that a piece of reading may take where one sequence decodes
_SHORT = 16  # its least tokens


def best_prefix(survival: Sequence[float], price: float, more: Sequence[float]) -> tuple[int, float]:
    """How many nodes to verify, and what they are worth. survival: falling. more: seconds that the first 1, 2, ... of them add
    to the step; at least as many as there are nodes."""
    values = [total - price * seconds for total, seconds in zip(accumulate(survival), more, strict=False)]
    best = max(values, default=0.0)
    return (values.index(best) + 1, best) if best > 0 else (0, 0.0)


def worth_verifying(
    rows: Sequence[Sequence[float]], price: float, more: Callable[[int], Sequence[float]]
) -> list[list[int]]:
    """Of each sequence's drafted nodes, those that are worth their time in one forward of all, by index.

    rows: survival of the nodes, a parent before its children and never less likely. more: seconds that 1, 2, ... so many nodes
    add to the step. Of any number of nodes the likeliest are the best, whatever a forward costs. So the best number is found by
    trying all. This is what vLLM calls adaptive verification.
    """
    order = sorted([(-alive, n, b) for b, row in enumerate(rows) for n, alive in enumerate(row)])
    count, _ = best_prefix([-alive for alive, _, _ in order], price, more(len(order)))
    kept: list[list[int]] = [[] for _ in rows]
    for _, n, b in order[:count]:
        kept[b].append(n)
    return [sorted(nodes) for nodes in kept]


def piece_of_reading(rows: int, plain: float, each: float) -> int:
    """Tokens that a drafter reads between two steps, without a draft.

    rows: sequences that decode. plain: seconds of a plain step. each: seconds of a token that is read.
    """
    return max(int((_ALONE if rows == 1 else 1.0) * plain / max(each, 1e-9)), _SHORT)


def least_survival(price: float, seconds: float, chance: float) -> float:
    """The survival below which a chain ends. seconds: of one more token, drafted and verified. chance: of that token, as it is
    usual. A bound of 0.98 lets every drafter that is asked draft one token."""
    return min(max(price * MARGIN * seconds / chance, 0.01), 0.98)


@dataclass(frozen=True)
class DraftForecast:
    """What a drafter does in a step, on average. tokens: accepted. levels: drafted. nodes: verified. speed: over plain decoding
    if every step has such a draft; 1 or more, because plain decoding can be had."""

    tokens: float
    levels: float
    nodes: float
    speed: float


def forecast(
    chains: Sequence[Sequence[float]],
    forward: Callable[[int], float],
    draft: Callable[[int], float],
    chance: float,
) -> DraftForecast:
    """What the rules above make of these chains at these costs, found by iteration of the price.

    chains: chances of the tokens of typical drafts, each given those before it. forward: seconds of a step over so many nodes,
    the root counted. draft: seconds of so many levels. chance: as for `least_survival`.
    """
    plain = forward(1)
    price, deepest = 1 / plain, max(map(len, chains), default=0)
    target = [forward(n) for n in range(1, deepest + 2)]
    drafts = [draft(n) for n in range(deepest + 1)]
    each = (drafts[-1] - drafts[1]) / (deepest - 1) + (target[3] - target[2]) if deepest > 2 else plain
    more = [seconds - plain for seconds in target[1:]]
    survivals: list[list[float]] = [list(accumulate(chain, mul)) for chain in chains]
    out, many = DraftForecast(0.0, 1.0, 0.0, 1.0), len(chains)
    for _ in range(_ROUNDS):
        least = least_survival(price, each, chance)
        tokens = seconds = levels = nodes = 0.0
        for survival in survivals:
            drafted = next((n for n, alive in enumerate(survival, 1) if alive < least), len(survival))
            count, _ = best_prefix(survival[:drafted], price, more)
            tokens, levels, nodes = tokens + sum(survival[:count]), levels + drafted, nodes + count
            seconds += drafts[drafted] + target[count]
        rate = (tokens + many) / seconds
        # The rules are not the best at each price, so a round may be worse.
        if rate * plain > out.speed or not out.tokens:
            out = DraftForecast(tokens / many, levels / many, nodes / many, max(rate * plain, 1.0))
        new = max(rate, 1 / plain)
        if abs(new - price) < 1e-4 * price:
            break
        price = new
    return out
