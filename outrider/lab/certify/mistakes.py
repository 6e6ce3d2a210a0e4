"""Known mistakes of verifiers, as rules that enumeration can compare a verifier with. Each was shipped by a real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.testing.oracle import Rule
from outrider.verify.reference import clipped_ratio, leftover, reference_block, reference_rejection, residual

Target = Callable[[int], Any]


def no_residual(tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any) -> Any:
    path, _ = _walk(tokens, target, drafter, choose)
    return path, choose.token(target(path[-1]), depth=len(path))


def residual_of_bonus(
    tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any
) -> Any:
    path, rejected = _walk(tokens, target, drafter, choose)
    if not rejected and len(path) > 1:
        return path, choose.token(residual(1, target(path[-1]), drafter(path[-2])), depth=len(path))
    at = path[-1]
    return path, choose.token(residual(1, target(at), drafter(at)) if rejected else target(at), depth=len(path))


def softmax_of_residual(
    tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any
) -> Any:
    """|p - q| in place of its positive part."""
    path, rejected = _walk(tokens, target, drafter, choose)
    at = path[-1]
    probs = target(at)
    if rejected:
        gap = [abs(a - b) for a, b in zip(target(at), drafter(at), strict=True)]
        probs = gap if sum(gap) else probs
    return path, choose.token(probs, depth=len(path))


def all_accepted(tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any) -> Any:
    last = len(tokens) - 1
    return list(range(last + 1)), choose.token(target(last), depth=last + 1)


def argmax_accepted(tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any) -> Any:
    for n in range(len(tokens) - 1):
        p = target(n)
        if p[tokens[n + 1]] != max(p):
            return list(range(n + 1)), choose.token(residual(1, p, drafter(n)), depth=n + 1)
    return list(range(len(tokens))), choose.token(target(len(tokens) - 1), depth=len(tokens))


def ratio_upside_down(
    tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any
) -> Any:
    path = [0]
    for n in range(1, len(tokens)):
        p, q, x = target(n - 1), drafter(n - 1), tokens[n]
        if not choose.coin(q[x], p[x], depth=n, node=n):
            return path, choose.token(residual(1, p, q), depth=n)
        path.append(n)
    return path, choose.token(target(path[-1]), depth=len(path))


def flat_q(tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any) -> Any:
    """Judged by a uniform q."""

    def uniform(n: int) -> list[Any]:
        q = drafter(n)
        return [sum(q) / len(q)] * len(q)

    return reference_rejection(tokens, parents, target, uniform, choose)


def stale_q(tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any) -> Any:
    return reference_rejection(tokens, parents, target, lambda n: drafter(max(n - 1, 0)), choose)


def shifted_p(tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any) -> Any:
    return reference_rejection(tokens, parents, lambda n: target(max(n - 1, 0)), drafter, choose)


def _walk(tokens: Sequence[int], target: Target, drafter: Target, choose: Any) -> tuple[list[int], bool]:
    """The accepted nodes of a chain by the rule of rejection, and whether a draft token was rejected."""
    path = [0]
    for n in range(1, len(tokens)):
        x = tokens[n]
        if not choose.coin(target(n - 1)[x], drafter(n - 1)[x], depth=n, node=n):
            return path, True
        path.append(n)
    return path, False


def _block(*, first_failure: bool = False, token_residual: bool = False, weightless: bool = False) -> Rule:
    """The rule of Sun et al. 2403.10444 with one thing wrong."""

    def rule(tokens: Sequence[int], parents: Sequence[int], target: Target, drafter: Target, choose: Any) -> Any:
        last = len(tokens) - 1
        kept, kept_weight, weight = 0, 1, 1
        for n in range(1, last + 1):
            x = tokens[n]
            weight = clipped_ratio(weight * target(n - 1)[x], drafter(n - 1)[x])
            part, whole = weight, 1
            if n < last:
                part = sum(leftover(1 if weightless else weight, target(n), drafter(n)))
                whole = part + 1 - weight
            if choose.coin(part, whole, depth=n, node=n) or weight == 1:
                kept, kept_weight = n, weight
            elif first_failure:
                break
        probs = target(last)
        if kept < last:
            probs = residual(1 if token_residual else kept_weight, target(kept), drafter(kept))
        return list(range(kept + 1)), choose.token(probs, depth=kept + 1)

    return rule


def _block_of(rule: Callable[[Target], Target]) -> Rule:
    return lambda tokens, parents, target, drafter, choose: reference_block(
        tokens, parents, target, rule(drafter), choose
    )


RULES: dict[str, Rule] = {
    "no residual: after a rejection the token is drawn from p itself": no_residual,
    "the residual is drawn after everything was accepted, in place of the bonus token": residual_of_bonus,
    "the residual is |p - q| in place of its positive part": softmax_of_residual,
    "every draft token is accepted": all_accepted,
    "a draft token is accepted only if it is the target's likeliest": argmax_accepted,
    "the ratio is upside down: q/p in place of p/q": ratio_upside_down,
    "wrong q: draft tokens are judged by a uniform q": flat_q,
    "stale q: a draft token is judged by the q of the position before": stale_q,
    "the target's distributions are shifted by one position": shifted_p,
    "block verification stops at the first coin that fails": _block(first_failure=True),
    "block verification with the residual of the token rule": _block(token_residual=True),
    "block verification leaves the prefix's weight out of the residual mass": _block(weightless=True),
    "stale q in block verification": _block_of(lambda drafter: lambda n: drafter(max(n - 1, 0))),
}
"""The mistake in words -> the rule with it. All judge chains."""
