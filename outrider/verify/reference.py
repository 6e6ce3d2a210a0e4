"""The definitions: each verifier on one sequence, in plain Python.

    tokens, parents   the draft, a tree with its root: parents[0] == -1, parents[n] < n
    target(n)         p, the target's law of the token after node n
    drafter(n)        q, the law the children of node n were drawn from; all mass on the guess if it was chosen
    siblings          how the children of a node were made; a chain of drawn guesses is IID
    choose            makes every random choice, and is given the probabilities

They return (path, token): the accepted nodes from the root down, and the token drawn at the last of them. Numbers may
be floats or fractions: with noise behind `choose` these are the twins of the batched forms, and with fractions and
a `choose` that takes every branch they are proved to keep the target's law (outrider/testing/oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Protocol

from outrider.core.types import Siblings

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
    siblings: Siblings = Siblings.IID,
) -> Outcome:
    """Keep guess x with probability min(1, p(x)/q(x)); after a refusal the residual stands in for p. Chains and trees.

    A chain: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2. Several children, each judged
    by what the ones before it have left of p: SpecInfer (2305.09781) with replacement, Sequoia (2402.12374) without, Hu et
    al. (2502.18779) where the last alone was drawn.
    """
    path = [0]
    while True:
        node, p = path[-1], target(path[-1])
        for child, q in offers(node, tokens, parents, drafter, siblings, len(p)):
            x = tokens[child]
            if choose.coin(p[x], q[x], depth=len(path), node=child):
                path.append(child)
                break
            p = normal(residual(1, p, q))
        else:
            return path, choose.token(p, depth=len(path))  # the bonus, where nothing was refused


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


def reference_traversal(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Callable[[int], Law],
    drafter: Callable[[int], Law],
    choose: Choices,
    siblings: Siblings = Siblings.IID,
) -> Outcome:
    """From the leaves up: a node is judged after all below it were refused, by the ratio of its whole path. Trees.

    Weng et al. 2505.12398, algorithm 2; on a chain it is `reference_block`, decision for decision. Something at or below a
    node is kept with probability `weight`, whatever hangs there, and so its siblings learn nothing from its refusal but
    that; which takes for granted that what is drawn below one is independent of what is drawn below another.
    """

    def visit(node: int, depth: int, weight: Number) -> Outcome | None:
        p = target(node)
        for child, q in offers(node, tokens, parents, drafter, siblings, len(p)):
            x = tokens[child]
            found = visit(child, depth + 1, clipped_ratio(weight * p[x], q[x]))
            if found:
                return [node, *found[0]], found[1]
            rest = leftover(weight, p, q)
            mass = sum(rest)
            p = normal(rest) if mass else p
            weight = 1 if weight == 1 else mass / (mass + 1 - weight)
        if node == 0 or choose.coin(weight, 1, depth=depth, node=node):
            return [node], choose.token(p, depth=depth + 1)
        return None

    found = visit(0, 0, 1)
    assert found is not None  # the root is committed
    return found


def offers(
    node: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    drafter: Callable[[int], Law],
    siblings: Siblings,
    vocab: int,
) -> Iterator[tuple[int, Law]]:
    """The children of a node in the order they are judged, each with the law it was drawn from, given its siblings.

    TOP_THEN_SAMPLED: the one that was drawn comes first, so that the others' mass stays whole for it to be judged by.
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
            yield child, normal([0 if x in gone else mass for x, mass in enumerate(q)]) if gone else q


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


def normal(law: Law) -> Law:
    """The law with sum 1; as it is where it is empty."""
    total = sum(law)
    return [mass / total for mass in law] if total else law
