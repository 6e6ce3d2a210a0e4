"""What speculation is worth, against closed forms and brute force."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control import CostModel
from outrider.control.cost_model import interpolate
from outrider.control.shapes import best_depth, expected_tokens, geometric, speedup

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


def test_interpolation():
    points = {1: 1.0, 3: 2.0, 5: 2.0}
    assert [interpolate(points, x) for x in (1, 2, 3, 4, 9, 0)] == [1, 1.5, 2, 2, 2, 0.5]
    assert interpolate({4: 7.0}, 100) == 7
    assert interpolate({1: 2.0, 2: 1.0}, 9) == 1  # noise is no reason to expect that more costs less


def model():
    target = [[r, n, c, r * (1 + 0.1 * (n - 1)) + c / 1000] for r in (1, 4) for n in (1, 9) for c in (0, 1000)]
    draft = [[1, w, d, c, w * (0.1 + (0.1 + c / 10000) * d)] for w in (1, 4) for d in (0, 1, 3) for c in (0, 1000)]
    return CostModel({"machine": "x"}, target, draft, prefill=0.01, fixed=0.5)


def test_a_cost_model_interpolates_rows_nodes_and_context():
    cost = model()
    assert cost.target_seconds(1, 1, 0) == 1
    assert cost.target_seconds(2, 5, 500) == pytest.approx(2 * 1.4 + 0.5)
    assert cost.draft_seconds(1, 3, 500) == pytest.approx(0.1 + 0.45)
    assert cost.draft_seconds(1, 2, 0, width=4) == pytest.approx(1.2)
    assert cost.draft_seconds(1, 0, 500) == pytest.approx(0.1)  # what a step costs before anybody guesses
    assert cost.step_seconds(1, 2, 2, 0) == pytest.approx(0.5 + 0.3 + 1.2)


def test_a_cost_model_is_read_back():
    cost = model()
    assert CostModel.from_json(cost.to_json()) == cost


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "not json", json.dumps({"key": {}, "target": [], "draft": [], "prefill": 1, "fixed": 1})]
)
def test_what_is_no_cost_model_is_refused(text):
    with pytest.raises(ValueError, match="measure again with calibrate"):
        CostModel.from_json(text)
