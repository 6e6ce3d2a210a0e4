"""The definitions: each verifier on one sequence, in plain Python.

    tokens, parents   the draft, a tree with its root: parents[0] == -1, parents[n] < n
    target(n)         p, the target's distribution of the token after node n
    drafter(n)        q, the distribution that the children of node n were drawn from; 1 on a chosen token
    choose            makes each random choice from given probabilities
    siblings          how the children of a node were made; a chain of drawn tokens is IID

All have the same parameters; `match` does not read q, and `match` and `block` do not read `siblings`. They return
(path, token): the accepted nodes from the root down, and the token drawn at the last of them.

Numbers are floats or fractions. With noise behind `choose`, these are the twins of the batched forms. With fractions
and a `choose` that takes every branch, a test proves that they keep the target's distribution
(outrider/testing/oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Protocol

from outrider.core.types import Siblings

Number = float | Fraction
Probs = Sequence[Number]
Outcome = tuple[list[int], int]


class Choices(Protocol):
    """The source of randomness. `depth` counts levels below the root: 1 is the first token after it."""

    def coin(self, part: Number, whole: Number, *, depth: int, node: int) -> bool:
        """True with probability min(part / whole, 1). One coin per judged node. Compute u * whole < part: no division."""
        ...

    def token(self, probs: Probs, *, depth: int) -> int:
        """The token `depth` levels below the root, drawn from probs of any total."""
        ...


def reference_match(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Callable[[int], Probs],
    drafter: Callable[[int], Probs],
    choose: Choices,
    siblings: Siblings = Siblings.IID,
) -> Outcome:
    """The target draws its own token at each node; the walk continues while a child has that token. Any tree.

    Each token is the target's own sample, whatever the draft is. This is exact by inspection.
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
    target: Callable[[int], Probs],
    drafter: Callable[[int], Probs],
    choose: Choices,
    siblings: Siblings = Siblings.IID,
) -> Outcome:
    """Accept draft token x with probability min(1, p(x)/q(x)); after a rejection the residual replaces p. Any tree.

    Chains: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2. Several children, each judged by
    the residual of the ones before it: SpecInfer (2305.09781) with replacement, Sequoia (2402.12374) without, Hu et al.
    (2502.18779) where only the last was drawn.
    """
    path = [0]
    while True:
        node, p = path[-1], target(path[-1])
        for child, q in offers(node, tokens, parents, drafter, siblings, len(p)):
            x = tokens[child]
            if choose.coin(p[x], q[x], depth=len(path), node=child):
                path.append(child)
                break
            p = normalized(residual(1, p, q))
        else:
            return path, choose.token(p, depth=len(path))  # the bonus token, if nothing was rejected


def reference_block(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Callable[[int], Probs],
    drafter: Callable[[int], Probs],
    choose: Choices,
    siblings: Siblings = Siblings.IID,
) -> Outcome:
    """Accept the longest prefix whose own coin accepts, judged by the ratio of the whole prefix. Chains only.

    Sun et al. 2403.10444, algorithm 2. `weight` is their p~_i, `mass` the residual's at the next node, and h_i the
    probability of the coin. Two mistakes are easy: to stop at the first rejection, and to draw from the residual of
    `reference_rejection`, which has no weight.
    """
    last = len(tokens) - 1
    last_kept, kept_weight, weight = 0, 1, 1
    for n in range(1, last + 1):
        x = tokens[n]
        weight = clipped_ratio(weight * target(n - 1)[x], drafter(n - 1)[x])
        if n == last:
            part, whole = weight, 1  # h_gamma = p~_gamma
        else:
            mass = sum(leftover(weight, target(n), drafter(n)))
            part, whole = mass, mass + 1 - weight  # h_n = mass / (mass + 1 - p~_n)
        accepted = choose.coin(part, whole, depth=n, node=n)
        if accepted or weight == 1:  # h_n = 1, also for 0/0
            last_kept, kept_weight = n, weight
    probs = target(last) if last_kept == last else residual(kept_weight, target(last_kept), drafter(last_kept))
    return list(range(last_kept + 1)), choose.token(probs, depth=last_kept + 1)


def reference_traversal(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Callable[[int], Probs],
    drafter: Callable[[int], Probs],
    choose: Choices,
    siblings: Siblings = Siblings.IID,
) -> Outcome:
    """Judge a tree from its leaves up, each node by the ratio of its whole path. Any tree.

    Weng et al. 2505.12398, algorithm 2. A node is judged after all nodes below it were rejected. On a chain each decision
    is that of `reference_block`. A node or one below it is accepted with probability `weight`, whatever the subtree is.
    This needs tokens below one node that are independent of tokens below another.
    """

    def visit(node: int, depth: int, weight: Number) -> Outcome | None:
        p = target(node)
        for child, q in offers(node, tokens, parents, drafter, siblings, len(p)):
            x = tokens[child]
            outcome = visit(child, depth + 1, clipped_ratio(weight * p[x], q[x]))
            if outcome:
                return [node, *outcome[0]], outcome[1]
            rest = leftover(weight, p, q)
            mass = sum(rest)
            p = normalized(rest) if mass else p
            weight = 1 if weight == 1 else mass / (mass + 1 - weight)
        if node == 0 or choose.coin(weight, 1, depth=depth, node=node):
            return [node], choose.token(p, depth=depth + 1)
        return None

    outcome = visit(0, 0, 1)
    assert outcome is not None  # the root is committed
    return outcome


def offers(
    node: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    drafter: Callable[[int], Probs],
    siblings: Siblings,
    vocab: int,
) -> Iterator[tuple[int, Probs]]:
    """The children of a node in judging order, each with its distribution given the siblings before it.

    TOP_THEN_SAMPLED: the drawn child comes first and is judged by all of p.
    """
    children = [n for n, up in enumerate(parents) if up == node]
    if siblings is Siblings.TOP_THEN_SAMPLED:
        children = children[-1:] + children[:-1]
    for at, child in enumerate(children):
        if siblings is Siblings.POINT or (siblings is Siblings.TOP_THEN_SAMPLED and at > 0):
            yield child, [int(x == tokens[child]) for x in range(vocab)]
        elif siblings is Siblings.IID:
            yield child, drafter(node)
        else:
            gone = {tokens[c] for c in (children[:at] if siblings is Siblings.WITHOUT_REPLACEMENT else children[1:])}
            q = drafter(node)
            yield child, normalized([0 if x in gone else mass for x, mass in enumerate(q)]) if gone else q


def clipped_ratio(part: Number, whole: Number) -> Number:
    """min(part / whole, 1). A draft token without mass in q breaks the contract: 1 if p gives it some, else 0."""
    return part / whole if part < whole else int(part > 0)


def leftover(weight: Number, p: Probs, q: Probs) -> list[Number]:
    """max(weight * p - q, 0), not normalized: what remains of the target after the drafter's offer."""
    return [max(weight * a - b, 0) for a, b in zip(p, q, strict=True)]


def residual(weight: Number, p: Probs, q: Probs) -> Probs:
    """`leftover`, or p where it is empty. Exact arithmetic never draws from an empty one; rounding can."""
    rest = leftover(weight, p, q)
    return rest if sum(rest) > 0 else p


def normalized(probs: Probs) -> Probs:
    """probs with sum 1; unchanged where they are all zero."""
    total = sum(probs)
    return [mass / total for mass in probs] if total else probs
