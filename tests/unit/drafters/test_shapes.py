"""What speculation is worth, against closed forms and brute force."""

import itertools

import pytest
from depths import best_depth
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.shapes import expected_tokens, geometric, speedup

ALPHAS = st.floats(0.01, 0.99)


@given(alpha=ALPHAS, gamma=st.integers(0, 20))
def test_leviathans_expectation(alpha, gamma):
    assert expected_tokens(geometric(alpha, gamma)) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


@given(alpha=ALPHAS, gamma=st.integers(0, 20), c=st.floats(0, 1))
def test_leviathans_speedup(alpha, gamma, c):
    expected = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
    assert speedup(geometric(alpha, gamma), gamma * c) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("alpha", "c", "s", "value", "depth"),
    [(0.6, 0.02, 0.01, 2.07, 5), (0.7, 0.05, 0.02, 2.18, 5), (0.8, 0.1, 0.02, 2.31, 5), (0.9, 0.2, 0.1, 1.87, 5)],
)
def test_best_depths_that_are_known(alpha, c, s, value, depth):
    """With V(M) = 1 + s (M - 1)."""
    seconds = [1 + s * k + c * k for k in range(40)]
    found = best_depth(geometric(alpha, 39), seconds)
    assert found == depth
    assert expected_tokens(geometric(alpha, found)) / seconds[found] == pytest.approx(value, abs=0.01)


@given(alpha=ALPHAS, c=st.floats(0.001, 1))
def test_improvement_exists_just_where_alpha_is_more_than_c(alpha, c):
    depth = best_depth(geometric(alpha, 30), [1 + c * k for k in range(31)])
    assert (depth > 0) == (alpha > c)


@given(
    falls=st.lists(ALPHAS, min_size=1, max_size=10),
    level=st.floats(0.01, 0.5),
)
def test_the_marginal_rule_finds_the_best_depth(falls, level):
    survival = list(itertools.accumulate(falls, lambda a, b: a * b))
    seconds = [1 + level * k for k in range(len(survival) + 1)]
    tokens, depth = 1.0, 0
    while depth < len(survival) and survival[depth] * seconds[depth] > level * tokens:
        tokens += survival[depth]
        depth += 1
    best = best_depth(survival, seconds)
    assert tokens / seconds[depth] == pytest.approx(expected_tokens(survival[:best]) / seconds[best])  # or a draw


def test_probabilities_are_probabilities():
    with pytest.raises(ValueError, match=r"alpha is a probability, got 1\.5"):
        geometric(1.5, 3)
