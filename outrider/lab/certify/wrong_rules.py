"""Known mistakes of verifiers, as rules that enumeration can compare a verifier with. Each was shipped by a real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.testing.oracle import Rule
from outrider.verify.reference import clipped_ratio, leftover, reference_block, residual

NodeProbs = Callable[[int], Any]


def _before(probs: NodeProbs) -> NodeProbs:
    """The distributions of the position before."""
    return lambda n: probs(max(n - 1, 0))


def _uniform(probs: NodeProbs) -> NodeProbs:
    return lambda n: [sum(probs(n)) / len(probs(n))] * len(probs(n))


def _rejection(
    *,
    coin: Callable[[Any, Any, int], tuple[Any, Any]] = lambda p, q, x: (p[x], q[x]),
    after: Callable[[Any, Any], Any] = lambda p, q: residual(1, p, q),
    bonus_from_residual: bool = False,
    of_p: Callable[[NodeProbs], NodeProbs] = lambda probs: probs,
    of_q: Callable[[NodeProbs], NodeProbs] = lambda probs: probs,
) -> Rule:
    """Rejection on a chain with one thing wrong.

    coin: (part, whole) of the probability to accept token x. after: the distribution after a rejection. of_p, of_q: what the rule
    takes for the distributions.
    """

    def rule(
        tokens: Sequence[int], parents: Sequence[int], target: NodeProbs, drafter: NodeProbs, choose: Any
    ) -> tuple[list[int], int]:
        target, drafter, last = of_p(target), of_q(drafter), len(tokens) - 1
        for n in range(1, last + 1):
            p, q = target(n - 1), drafter(n - 1)
            if not choose.coin(*coin(p, q, tokens[n]), depth=n, node=n):
                return list(range(n)), choose.token(after(p, q), depth=n)
        bonus = target(last)
        if bonus_from_residual and last:
            bonus = residual(1, bonus, drafter(last - 1))
        return list(range(last + 1)), choose.token(bonus, depth=last + 1)

    return rule


def _absolute_residual(p: Any, q: Any) -> Any:
    gap = [abs(a - b) for a, b in zip(p, q, strict=True)]
    return gap if sum(gap) else p


def _block(*, first_failure: bool = False, token_residual: bool = False, weightless: bool = False) -> Rule:
    """The rule of Sun et al. 2403.10444 with one thing wrong."""

    def rule(
        tokens: Sequence[int], parents: Sequence[int], target: NodeProbs, drafter: NodeProbs, choose: Any
    ) -> tuple[list[int], int]:
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


def _stale_block(
    tokens: Sequence[int], parents: Sequence[int], target: NodeProbs, drafter: NodeProbs, choose: Any
) -> tuple[list[int], int]:
    return reference_block(tokens, parents, target, _before(drafter), choose)


RULES: dict[str, Rule] = {
    "no residual: after a rejection the token is drawn from p itself": _rejection(after=lambda p, q: p),
    "the residual is drawn after everything was accepted, in place of the bonus token": _rejection(
        bonus_from_residual=True
    ),
    "the residual is |p - q| in place of its positive part": _rejection(after=_absolute_residual),
    "every draft token is accepted": _rejection(coin=lambda p, q, x: (1, 1)),
    "a draft token is accepted only if it is the target's likeliest": _rejection(
        coin=lambda p, q, x: (int(p[x] == max(p)), 1)
    ),
    "the ratio is upside down: q/p in place of p/q": _rejection(coin=lambda p, q, x: (q[x], p[x])),
    "wrong q: draft tokens are judged by a uniform q": _rejection(of_q=_uniform),
    "stale q: a draft token is judged by the q of the position before": _rejection(of_q=_before),
    "the target's distributions are shifted by one position": _rejection(of_p=_before),
    "block verification stops at the first coin that fails": _block(first_failure=True),
    "block verification with the residual of the token rule": _block(token_residual=True),
    "block verification leaves the prefix's weight out of the residual mass": _block(weightless=True),
    "stale q in block verification": _stale_block,
}
"""The mistake in words -> the rule with it. All judge chains."""
