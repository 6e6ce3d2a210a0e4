"""What a certificate says that it would have found, checked by simulation, and looks that keep the level."""

from __future__ import annotations

import numpy as np
import pytest
import simulation
from simulation import CELLS, off_by, shifted

from outrider_certify import bounds
from outrider_certify.certificate import Conclusion


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


def test_a_certificate_finds_twice_the_deviation_that_it_states_and_nothing_in_a_right_engine() -> None:
    stated = off_by(0.0, 0)
    assert stated.conclusion is not Conclusion.DIFFERS
    assert off_by(2 * stated.figures["smallest_deviation"], 1).conclusion is Conclusion.DIFFERS


@pytest.mark.long
def test_certificates_keep_their_promises_over_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """False alarms of 1,000 right engines, and 200 engines each that are off by a tenth less and more than is stated."""
    monkeypatch.setattr("sys.argv", ["simulation"])
    assert simulation.main() == 0
