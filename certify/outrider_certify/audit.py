"""An audit of texts that may stop at any time: a bet on every known mistake, with the target's own probabilities as odds.

The wealth of a bet is the product of (1 - e) + e * predicted(y) / p(y) over the tokens y. If they are drawn from p, it is a
martingale that starts at 1, and so is the mean of all bets. By Ville's inequality that mean reaches 1/alpha at any time with
probability alpha at most (Ramdas et al., 2210.01948). There is no baseline run, and the texts may be recorded ones of production.
A bet on the engine's own mistake grows fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider_certify.mistakes import MISTAKES, TokenContext
from outrider_certify.subject import TokenDistribution

STAKES = np.array((0.05, 0.2, 0.5, 0.9))
_LEAST = 1e-12  # a token below this probability counts as one that the target never writes


def ratio(predicted: np.ndarray, p: TokenDistribution, token: int) -> float:
    """predicted(token) / p(token). A token that is not among the known ones has the mass that they leave."""
    at = p.index(token)
    if at is None:
        return max(1 - float(predicted.sum()), 0.0) / max(1 - float(p.probs.sum()), _LEAST)
    return float(predicted[at]) / max(float(p.probs[at]), _LEAST)


class Audit:
    """Wealth of every bet so far."""

    def __init__(self, alpha: float = 1e-6) -> None:
        self.alpha, self.tokens = alpha, 0  # alpha: the probability of a false alarm
        self.crossed: int | None = None  # tokens after which the alarm was raised
        self.logs = np.zeros((len(MISTAKES), len(STAKES)))  # the logarithms of the wealth
        self.placed = np.zeros(len(MISTAKES), dtype=bool)  # whether a bet on the mistake was ever placed

    def see(self, context: TokenContext, token: int) -> bool:
        """Count one token. Returns whether the alarm was raised, now or before."""
        ratios, placed = np.ones(len(MISTAKES)), np.zeros_like(self.placed)
        for number, (_, predict) in enumerate(MISTAKES):
            if (predicted := predict(context)) is not None:
                placed[number], ratios[number] = True, ratio(predicted, context.p, token)
        return self.add(np.log(1 - STAKES + STAKES * ratios[:, None]), placed, 1)

    def add(self, logs: np.ndarray, placed: np.ndarray, tokens: int) -> bool:
        """Count the wealth that was won on later tokens. Returns whether the alarm was raised, now or before."""
        self.logs, self.placed, self.tokens = self.logs + logs, self.placed | placed, self.tokens + tokens
        if self.crossed is None and self.log_wealth >= self.alarm:
            self.crossed = self.tokens
        return self.crossed is not None

    @property
    def log_wealth(self) -> float:
        """The logarithm of the mean of all bets. A bet that was never placed keeps its 1."""
        top = float(self.logs.max())
        return top + math.log(float(np.exp(self.logs - top).mean()))

    @property
    def alarm(self) -> float:
        """The log wealth at which the alarm is raised."""
        return math.log(1 / self.alpha)

    def ranking(self) -> list[tuple[str, float]]:
        """(mistake, best log wealth of a bet on it), the largest first."""
        best: dict[str, float] = {}
        for number in np.flatnonzero(self.placed):
            name = MISTAKES[number][0]
            best[name] = max(best.get(name, -math.inf), float(self.logs[number].max()))
        return sorted(best.items(), key=lambda pair: -pair[1])

    def lead(self) -> float:
        """By how much the best bet is ahead of the next one with another name, in nats."""
        ranking = self.ranking()
        return ranking[0][1] - ranking[1][1] if len(ranking) > 1 else math.inf


class StratifiedAudit:
    """One audit of all tokens and one of each stratum. Half of the money is bet on the whole, and half on the strata."""

    def __init__(self, alpha: float, labels: Sequence[str]) -> None:
        """Begin with a wealth of 1.

        Args:
            alpha: The probability of a false alarm of all of it.
            labels: The strata, each of which has an equal share.
        """
        self.whole, self.crossed = Audit(alpha), None
        self.parts = {label: Audit(alpha) for label in labels}

    def add(self, label: str, logs: np.ndarray, placed: np.ndarray, tokens: int) -> None:
        """Count the wealth that was won on later tokens of one stratum."""
        self.whole.add(logs, placed, tokens)
        self.parts[label].add(logs, placed, tokens)
        if self.crossed is None and self.log_wealth >= self.whole.alarm:
            self.crossed = self.whole.tokens

    @property
    def tokens(self) -> int:
        return self.whole.tokens

    @property
    def log_wealth(self) -> float:
        """The logarithm of all money, which starts at 1."""
        logs = np.array([self.whole.log_wealth, *(part.log_wealth for part in self.parts.values())])
        shares = np.array([0.5, *[0.5 / len(self.parts)] * len(self.parts)])
        return float(logs.max() + np.log((shares * np.exp(logs - logs.max())).sum()))

    def guilty(self) -> list[str]:
        """The strata whose own bets won."""
        return [label for label, part in self.parts.items() if part.log_wealth >= self.whole.alarm / 2]

    def ranked(self, labels: Sequence[str]) -> Audit:
        """The audit that names a mistake: of the only stratum that is guilty, or of the whole."""
        return self.parts[labels[0]] if len(labels) == 1 else self.whole
