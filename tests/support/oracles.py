"""The rules, an oracle with a planted fault, and a drafter that chooses: for the proofs of the oracle and the verifiers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from outrider.core.types import Siblings
from outrider.testing.oracle import Drafted, Drafter, Oracle, Rule, Text, Toy, point
from outrider.verify import VERIFIERS

RULES: dict[str, Rule] = {name: verifier.reference for name, verifier in VERIFIERS.items()}


def judging(rule: str, siblings: Siblings) -> Rule:
    """The reference of a verifier for one way of making siblings."""
    return functools.partial(VERIFIERS[rule].reference, siblings=siblings)


class ReusedCoins(Oracle):
    """A planted fault: coins are keyed by position alone, so a later step reads the same uniform number again."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        super().__init__(script)
        self.known: dict[
            int, tuple[Fraction, Fraction]
        ] = {}  # position -> an interval that contains its uniform number

    def coin(self, part: Any, whole: Any, *, depth: int, node: int) -> bool:
        low, high = self.known.get(self.position + depth, (Fraction(0), Fraction(1)))
        cut = min(max(Fraction(part) / whole if whole else Fraction(0), low), high)
        below = self.pick([cut - low, high - cut]) == 0
        self.known[self.position + depth] = (low, cut) if below else (cut, high)
        return below


def chosen_chain(gamma: int) -> Drafter:
    """Proposes the largest of q: a choice, not a draw, so the declared q has all its mass on the token."""

    def draft(toy: Toy, text: Text, choose: Any) -> Drafted:
        drafted: Text = ()
        for _ in range(gamma):
            q = toy.q(text + drafted)
            drafted += (q.index(max(q)),)
        return [0, *drafted], list(range(-1, gamma)), [point(token, toy.vocab) for token in drafted]

    return draft


def stopping_chain(gamma: int, stop: Callable[[Text, Text, Any], bool], length: int | None = None) -> Drafter:
    """Draws up to gamma tokens from q. `stop(text, drafted, choose)` may end the chain before the next draw.

    length: where the text ends, as for `grown_tree`.
    """

    def draft(toy: Toy, text: Text, choose: Any) -> Drafted:
        drafted: Text = ()
        q = []
        room = gamma if length is None else min(gamma, length - len(text) - 1)
        while len(drafted) < room and not stop(text, drafted, choose):
            q.append(toy.q(text + drafted))
            drafted += (choose.pick(q[-1]),)
        return [0, *drafted], list(range(-1, len(drafted))), q

    return draft
