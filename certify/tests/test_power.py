"""What a certificate says that it would have found, checked by simulation, and looks that keep the level."""

from __future__ import annotations

import numpy as np
import pytest

from outrider_certify import bounds
from outrider_certify.certificate import Conclusion
from outrider_certify.statistical import SQUARE, Statistical
from outrider_certify.subject import GeneratedText, SpeculationVariant, Subject, TextRequest, TokenDistribution
from outrider_certify.trials import TrialJournal, run_kinds

CELLS = SQUARE**2


def shifted(deviation: float) -> np.ndarray:
    """Cells of which half are too large and half too small, with this total variation to equal ones."""
    return (1 + 2 * deviation * np.where(np.arange(CELLS) % 2, 1, -1)) / CELLS


def power(deviation: float, n: int, level: float, runs: int = 4000) -> float:
    counts = np.random.default_rng(0).multinomial(n, shifted(deviation), size=runs)
    statistic = ((counts - n / CELLS) ** 2 / (n / CELLS)).sum(1)
    limit = bounds.where_zero(lambda x: level - bounds.chi2_tail(x, CELLS - 1))
    return float((statistic > limit).mean())


@pytest.mark.parametrize("n", [2_000, 50_000])
@pytest.mark.parametrize("level", [0.005, 0.005 / 2 / 40])
def test_the_stated_deviation_is_found_as_often_as_stated_within_ten_percent(n: int, level: float) -> None:
    stated = bounds.smallest_deviation(CELLS, n, level)
    assert power(0.9 * stated, n, level) < bounds.POWER < power(1.1 * stated, n, level)


def test_the_bound_holds_wherever_the_distribution_is() -> None:
    for deviation in (0.0, 0.02, 0.1):
        counts = np.random.default_rng(1).multinomial(2_000, shifted(deviation), size=1000)
        equal = np.full(CELLS, 1 / CELLS)
        assert all(bounds.total_variation_at_most(c, equal, 0.01) >= deviation for c in counts[:300])


def test_all_looks_together_spend_the_level_once() -> None:
    assert sum(bounds.spent(look) for look in range(1, 10_000)) <= 1
    assert bounds.spent(1) == 0.5


class PairsTilted(Subject):
    """Sixteen tokens, all equally likely. The second of each pair depends on the first: no single token shows it."""

    exact_numbers = True

    def __init__(self, deviation: float) -> None:
        super().__init__()
        self.deviation = deviation

    def prompts(self) -> list[tuple[int, ...]]:
        return [(i,) for i in range(6)]

    def generate(self, requests: list[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        return [self._text(r, i) for r in requests for i in range(r.params.n)]

    def _text(self, request: TextRequest, index: int) -> GeneratedText:
        rng, tokens = np.random.default_rng([request.params.seed or 0, index]), list[int]()
        cells = shifted(self.deviation).reshape(SQUARE, SQUARE)
        for _ in range(request.params.max_tokens // 2):
            a = int(rng.integers(16))
            part = np.roll(cells[0], a // 4)
            b = int(rng.choice(4, p=part / part.sum()))
            tokens += [a, 4 * b + int(rng.integers(4))]
        return GeneratedText(tokens, prompt=list(request.prompt), finish="length")

    def distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        return [TokenDistribution(np.full(16, 1 / 16)) for _ in text.tokens]


def found(deviation: float, runs: int, most: int = 32) -> tuple[float, float]:
    """(share of runs that find it, the deviation that they state)"""
    hits, stated = 0, 0.0
    for seed in range(runs):
        kind = Statistical(PairsTilted(deviation), length=48, seed=seed)
        [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
        hits += part.conclusion is Conclusion.DIFFERS
        stated = stated or part.figures["smallest_deviation"]
    return hits / runs, stated


@pytest.mark.long
def test_a_whole_certificate_finds_what_it_states() -> None:
    """An engine that is off by the stated deviation, and by 10 % less and more, in 200 runs each."""
    _, stated = found(0.0, 1)
    few, many = found(0.9 * stated, 200)[0], found(1.1 * stated, 200)[0]
    assert few < bounds.POWER <= many, (few, many)
