"""An audit of texts that may stop at any time: a bet on every known mistake, with the target's own probabilities as odds.

If tokens are drawn from p, the wealth of a bet, the product of (1 - e) + e * law(y) / p(y), is a martingale that starts at 1. So
is the mean of all bets. By Ville's inequality it reaches 1/alpha at any time with probability alpha at most (Ramdas et al.,
2210.01948).
There is no baseline run, and the texts may be recorded ones of production. A bet whose law is the engine's mistake grows fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from outrider.core.params import SamplingParams
from outrider_certify.causes import CAUSES, Cause, Law, TokenPlace, normalized, point
from outrider_certify.subjects.base import Row

STAKES = (0.05, 0.2, 0.5, 0.9)
_STAKES = np.array(STAKES)
_LEAST = 1e-12  # a token below this probability counts as one that the target never writes


def _tilted(more: bool, drafted: bool) -> Law:
    """p, with more or less mass where the drafter (or the target itself) is most confident."""

    def law(at: TokenPlace) -> np.ndarray | None:
        if drafted and (at.q is None or not at.p.whole):
            return None
        p = at.p.probs
        best = (at.q.probs > p) if drafted and at.q is not None else point(int(p.argmax()), len(p)) > 0
        if not at.p.whole:
            share = p[best].sum()
            grown = share + (1 - share) * 0.5 if more else share * 0.5
            if not 0 < share < 1:
                return None
            return np.where(best, p * grown / share, p * (1 - grown) / (1 - share))
        return normalized(np.where(best, p * (2.0 if more else 0.5), p))

    return law


UNNAMED = (
    Cause("the tokens that the drafter prefers come too often", _tilted(True, True)),
    Cause("the tokens that the drafter prefers come too rarely", _tilted(False, True)),
    Cause("the likeliest tokens come too often", _tilted(True, False)),
    Cause("the likeliest tokens come too rarely", _tilted(False, False)),
)
Bet = tuple[str, float]


def ratio(law: np.ndarray, row: Row, token: int) -> float:
    """law(token) / p(token). A token that is not among the known ones has the mass that they leave."""
    at = token if row.ids is None else int(np.flatnonzero(row.ids == token)[0]) if token in row.ids else -1
    if row.ids is not None and at < 0:
        return max(1 - float(law.sum()), 0.0) / max(1 - float(row.probs.sum()), _LEAST)
    return float(law[at]) / max(float(row.probs[at]), _LEAST)


@dataclass
class Audit:
    """Wealth of every bet so far, as logarithms.

    alpha: the probability of a false alarm. crossed: tokens after which the alarm was raised; None without one.
    """

    alpha: float = 1e-6
    causes: Sequence[Cause] = CAUSES + UNNAMED
    tokens: int = 0
    crossed: int | None = None
    _logs: np.ndarray = field(init=False, repr=False)  # float64 [cause, stake]
    _made: np.ndarray = field(init=False, repr=False)  # bool [cause]: a bet on it was ever made

    def __post_init__(self) -> None:
        self._logs = np.zeros((len(self.causes), len(STAKES)))
        self._made = np.zeros(len(self.causes), dtype=bool)

    @cached_property
    def _names(self) -> list[str]:
        return [f"{number} {cause.name}" for number, cause in enumerate(self.causes)]

    @property
    def wealth(self) -> dict[Bet, float]:
        """The logarithm of what every bet has that was made."""
        return {
            (self._names[n], stake): float(self._logs[n, at])
            for n in np.flatnonzero(self._made)
            for at, stake in enumerate(STAKES)
        }

    def see(self, place: TokenPlace, token: int) -> bool:
        """Count one token. Returns whether the alarm was raised, now or before."""
        self.tokens += 1
        for number, cause in enumerate(self.causes):
            law = cause.law(place)
            if law is not None:
                self._made[number] = True
                self._logs[number] += np.log(1 - _STAKES + _STAKES * ratio(law, place.p, token))
        return self._alarm()

    def add(self, increments: Mapping[Bet, float], tokens: int) -> bool:
        """Count the wealth that another audit won on later tokens."""
        self.tokens += tokens
        for (name, stake), more in increments.items():
            number = self._names.index(name)
            self._made[number] = True
            self._logs[number, STAKES.index(stake)] += more
        return self._alarm()

    def _alarm(self) -> bool:
        if self.crossed is None and self.log_wealth >= math.log(1 / self.alpha):
            self.crossed = self.tokens
        return self.crossed is not None

    @property
    def log_wealth(self) -> float:
        """The logarithm of the mean of all bets. A bet that was never made keeps its 1."""
        top = float(self._logs.max())
        return top + math.log(float(np.exp(self._logs - top).mean()))

    def ranking(self) -> list[tuple[str, float]]:
        """(mistake, best log wealth of a bet on it), the largest first."""
        best: dict[str, float] = {}
        for (name, _), logs in self.wealth.items():
            plain = name.split(" ", 1)[1]
            best[plain] = max(best.get(plain, -math.inf), logs)
        return sorted(best.items(), key=lambda pair: -pair[1])

    def lead(self) -> float:
        """By how much the best bet is ahead of the next one with another name, in nats."""
        ranking = self.ranking()
        return ranking[0][1] - ranking[1][1] if len(ranking) > 1 else math.inf


def places(
    rows: Sequence[Row],
    drafts: Sequence[Row] | None,
    params: SamplingParams,
    prompt: Sequence[int],
    tokens: Sequence[int],
    end_ids: tuple[int, ...],
    steps: Sequence[tuple[int, int]] = (),
) -> Iterable[tuple[TokenPlace, int]]:
    """The place of each token of a text, and the token. steps: (step, depth) of each, if known."""
    for at, (row, token) in enumerate(zip(rows, tokens, strict=False)):
        begun = len(prompt) + at - steps[at][1] if steps else None
        q = None if drafts is None else drafts[at]
        before = None if drafts is None or at == 0 else drafts[at - 1]
        text = [*prompt, *tokens[:at]]
        yield TokenPlace(row, q, before, params, text, len(prompt), end_ids, begun), token
