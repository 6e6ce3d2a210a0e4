"""The definitions: each verifier on one sequence, in plain Python.

    tokens, parents   the draft, a tree with its root: parents[0] == -1, parents[n] < n
    target(n)         p, the target's law of the token after node n
    drafter(n)        q, the law the children of node n were drawn from; all mass on the guess if it was chosen
    choose            makes every random choice, and is given the probabilities

They return (path, token): the accepted nodes from the root down, and the token drawn at the last of them. Numbers may
be floats or fractions: with noise behind `choose` these are the twins of the batched forms, and with fractions and
a `choose` that takes every branch they are proved to keep the target's law (tests/oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

Number = float | Fraction
Law = Sequence[Number]
Outcome = tuple[list[int], int]


class Choices(Protocol):
    """Where randomness comes from. `depth` counts levels below the root: 1 is the first token after it."""

    def coin(self, part: Number, whole: Number, *, depth: int, node: int) -> bool:
        """True with probability min(part / whole, 1), one coin for each judged node: u * whole < part, never divide."""
        ...

    def token(self, law: Law, *, depth: int) -> int:
        """A draw from a law that need not be normalised: the token that is to stand `depth` levels below the root."""
        ...


def reference_match(
    tokens: Sequence[int], parents: Sequence[int], target: Callable[[int], Law], choose: Choices
) -> Outcome:
    """The target draws its own token at each node; the walk goes on while a child carries it. Any tree, no q.

    What comes out is the target's sample at every level, whatever the guesses were: exact by inspection.
    """
    path = [0]
    while True:
        token = choose.token(target(path[-1]), depth=len(path))
        child = next((n for n, up in enumerate(parents) if up == path[-1] and tokens[n] == token), None)
        if child is None:
            return path, token
        path.append(child)


def reference_rejection(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Callable[[int], Law],
    drafter: Callable[[int], Law],
    choose: Choices,
) -> Outcome:
    """Keep guess x with probability min(1, p(x)/q(x)); the first refused is redrawn from the residual. Chains.

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
    """
    last = len(tokens) - 1
    for node in range(last):
        p, q, x = target(node), drafter(node), tokens[node + 1]
        if not choose.coin(p[x], q[x], depth=node + 1, node=node + 1):
            return list(range(node + 1)), choose.token(residual(1, p, q), depth=node + 1)
    return list(range(last + 1)), choose.token(target(last), depth=last + 1)  # the bonus


def reference_block(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Callable[[int], Law],
    drafter: Callable[[int], Law],
    choose: Choices,
) -> Outcome:
    """Keep the longest prefix whose own coin says so, judged by the ratio of the whole prefix. Chains.

    Sun et al. 2403.10444, algorithm 2. `weight` is their p~_i, `mass` the residual's at the next node, and h_i the
    probability of the coin. Every coin is looked at: stopping at the first refusal is wrong, and so is drawing from the
    residual of `reference_rejection`, which has no weight in it.
    """
    last = len(tokens) - 1
    kept, kept_weight, weight = 0, 1, 1
    for n in range(1, last + 1):
        x = tokens[n]
        weight = clipped_ratio(weight * target(n - 1)[x], drafter(n - 1)[x])
        if n == last:
            part, whole = weight, 1  # h_gamma = p~_gamma
        else:
            mass = sum(leftover(weight, target(n), drafter(n)))
            part, whole = mass, mass + 1 - weight  # h_n = mass / (mass + 1 - p~_n)
        accepted = choose.coin(part, whole, depth=n, node=n)
        if accepted or weight == 1:  # h_n = 1, also where mass = 0 makes it 0/0
            kept, kept_weight = n, weight
    law = target(last) if kept == last else residual(kept_weight, target(kept), drafter(kept))
    return list(range(kept + 1)), choose.token(law, depth=kept + 1)


def clipped_ratio(part: Number, whole: Number) -> Number:
    """min(part / whole, 1). A guess without mass in q breaks the contract: 1 if p gives it some, else 0."""
    return part / whole if part < whole else int(part > 0)


def leftover(weight: Number, p: Law, q: Law) -> list[Number]:
    """max(weight * p - q, 0), not normalised: what the target still owes after what the drafter has offered."""
    return [max(weight * a - b, 0) for a, b in zip(p, q, strict=True)]


def residual(weight: Number, p: Law, q: Law) -> Law:
    """`leftover`, or p itself where it is empty: exact arithmetic never draws from an empty one, rounding can."""
    rest = leftover(weight, p, q)
    return rest if sum(rest) > 0 else p
