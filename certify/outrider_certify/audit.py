"""An audit of texts that may stop at any time: a bet on every known mistake, with the target's own probabilities as odds.

The wealth of a bet is the product of (1 - e) + e * predicted(y) / p(y) over the tokens y. If they are drawn from p, it is a
martingale that starts at 1, and so is the mean of all bets. By Ville's inequality that mean reaches 1/alpha at any time with
probability alpha at most (Ramdas et al., 2210.01948). There is no baseline run, and the texts may be recorded ones of production.
A bet on the engine's own mistake grows fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider_certify.mistakes import MISTAKES, Mistake, TokenContext
from outrider_certify.subject import SamplingParams, TokenDistribution

STAKES = (0.05, 0.2, 0.5, 0.9)
_STAKES = np.array(STAKES)
_LEAST = 1e-12  # a token below this probability counts as one that the target never writes
Bet = tuple[str, float]


def ratio(predicted: np.ndarray, p: TokenDistribution, token: int) -> float:
    """predicted(token) / p(token). A token that is not among the known ones has the mass that they leave."""
    at = p.index(token)
    if at is None:
        return max(1 - float(predicted.sum()), 0.0) / max(1 - float(p.probs.sum()), _LEAST)
    return float(predicted[at]) / max(float(p.probs[at]), _LEAST)


@dataclass
class Audit:
    """Wealth of every bet so far, as logarithms.

    alpha: the probability of a false alarm. crossed: tokens after which the alarm was raised; None without one.
    """

    alpha: float = 1e-6
    mistakes: Sequence[Mistake] = MISTAKES
    tokens: int = 0
    crossed: int | None = None
    _logs: np.ndarray = field(init=False, repr=False)  # float64 [mistake, stake]
    _made: np.ndarray = field(init=False, repr=False)  # bool [mistake]: a bet on it was ever made

    def __post_init__(self) -> None:
        self._names = [f"{number} {mistake.name}" for number, mistake in enumerate(self.mistakes)]
        self._logs = np.zeros((len(self.mistakes), len(STAKES)))
        self._made = np.zeros(len(self.mistakes), dtype=bool)

    @property
    def wealth(self) -> dict[Bet, float]:
        """The logarithm of what every bet has that was made."""
        return {
            (self._names[n], stake): float(self._logs[n, at])
            for n in np.flatnonzero(self._made)
            for at, stake in enumerate(STAKES)
        }

    def see(self, context: TokenContext, token: int) -> bool:
        """Count one token. Returns whether the alarm was raised, now or before."""
        self.tokens += 1
        for number, mistake in enumerate(self.mistakes):
            predicted = mistake.predict(context)
            if predicted is not None:
                self._made[number] = True
                self._logs[number] += np.log(1 - _STAKES + _STAKES * ratio(predicted, context.p, token))
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
        for (numbered, _), logs in self.wealth.items():
            name = numbered.split(" ", 1)[1]
            best[name] = max(best.get(name, -math.inf), logs)
        return sorted(best.items(), key=lambda pair: -pair[1])

    def lead(self) -> float:
        """By how much the best bet is ahead of the next one with another name, in nats."""
        ranking = self.ranking()
        return ranking[0][1] - ranking[1][1] if len(ranking) > 1 else math.inf


def contexts(
    distributions: Sequence[TokenDistribution],
    drafts: Sequence[TokenDistribution] | None,
    params: SamplingParams,
    prompt: Sequence[int],
    tokens: Sequence[int],
    end_ids: tuple[int, ...],
    steps: Sequence[tuple[int, int]] = (),
) -> Iterable[tuple[TokenContext, int]]:
    """The context of each token of a text, and the token. steps: (step, depth) of each, if known."""
    for at, (p, token) in enumerate(zip(distributions, tokens, strict=False)):
        begun = len(prompt) + at - steps[at][1] if steps else None
        q = None if drafts is None else drafts[at]
        before = None if drafts is None or at == 0 else drafts[at - 1]
        yield TokenContext(p, q, before, params, [*prompt, *tokens[:at]], len(prompt), end_ids, begun), token
