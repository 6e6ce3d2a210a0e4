"""Token choice in native code. `tests/unit/core/test_noise.py` compares the noise with Philox and with its twin."""

from __future__ import annotations

import numpy as np
import pytest
from native_parts import argmax

from outrider.kernels import cpu as native

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))


def test_extreme_words_stay_finite() -> None:
    g = native.gumbel(3, 0, 0, 0, 2_000_000)
    assert np.isfinite(g).all()
    assert -2.82 < g.min() < -2.4
    assert 12 < g.max() < 23


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_the_choice_is_the_largest_of_scores_and_noise(scale: float, temperature: float) -> None:
    """Scores of some tokens get the noise of these tokens: the choice is that over all, with -inf for those that are left out."""
    draw = np.random.default_rng(0)
    for n in (1, 5, 32, 77, 4099):
        for position in range(4):
            scores = draw.standard_normal(n, np.float32) * np.float32(scale)
            ids, whole = np.sort(draw.permutation(3 * n)[:n]), np.full(3 * n, -np.inf, np.float32)
            whole[ids] = scores
            expected = (whole / np.float32(temperature) + native.gumbel(9, 0, 0, position, 3 * n)).argmax()
            assert native.argmax_gumbel(whole, 9, 0, 0, position, temperature=temperature) == int(expected)
            found = native.argmax_gumbel(scores, 9, 0, 0, position, temperature=temperature, ids=ids)
            assert ids[found] == expected
            assert argmax(whole) == int(whole.argmax())
    with pytest.raises(ValueError, match=r"ids must be int64 \[4\]"):
        native.argmax_gumbel(np.zeros(4), 9, 0, 0, 0, ids=np.arange(3))


def test_the_lowest_index_wins_a_tie() -> None:
    scores = np.zeros(1000, np.float32)
    assert argmax(scores) == 0
    scores[[5, 77, 999]] = 3
    assert argmax(scores) == 5
    scores[:] = float("-inf")
    assert argmax(scores) == native.argmax_gumbel(scores, 1, 0, 0, 0) == 0
    scores[-1] = float("inf")
    assert argmax(scores) == native.argmax_gumbel(scores, 1, 0, 0, 0) == 999


@pytest.mark.parametrize("place", [0, 8, 999])
def test_nan_is_reported(place: int) -> None:
    scores = np.zeros(1000, np.float32)
    scores[place] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        argmax(scores)
    with pytest.raises(ValueError, match="NaN"):
        native.argmax_gumbel(scores, 1, 0, 0, 0)
