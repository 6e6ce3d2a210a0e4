"""The price of a second: prefixes, batches and forecasts, against brute force."""

from __future__ import annotations

import itertools
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control.price import MARGIN, best_prefix, forecast, least_survival, worth_verifying

CHANCES = st.lists(st.floats(0.01, 1.0), max_size=5)
SECONDS = st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12)


def more(steps: list[float], count: int) -> list[float]:
    return list(accumulate(steps[:count]))


@given(CHANCES, SECONDS, st.floats(0.1, 4.0))
def test_the_best_prefix_is_the_best_of_all(chances: list[float], steps: list[float], price: float) -> None:
    survival = list(accumulate(chances, lambda a, b: a * b))
    count, value = best_prefix(survival, price, more(steps, len(survival)))
    every = [sum(survival[:n]) - price * sum(steps[:n]) for n in range(len(survival) + 1)]
    assert value == pytest.approx(max(every), abs=1e-9)
    assert every[count] == pytest.approx(value, abs=1e-9)
    assert every[0] == 0, "plain decoding is worth nothing more than itself"


@given(st.lists(CHANCES, min_size=1, max_size=3), SECONDS, st.floats(0.1, 4.0))
@settings(max_examples=60)
def test_a_batch_is_verified_as_well_as_by_brute_force(
    rows: list[list[float]], steps: list[float], price: float
) -> None:
    rows = [list(accumulate(row[:4], lambda a, b: a * b)) for row in rows]
    kept = worth_verifying(rows, price, lambda count: more(steps, count))

    def value(counts: tuple[int, ...]) -> float:
        tokens = sum(sum(row[:n]) for row, n in zip(rows, counts, strict=True))
        return tokens - price * sum(steps[: sum(counts)])

    best = max(map(value, itertools.product(*(range(len(row) + 1) for row in rows))))
    counts = tuple(map(len, kept))
    assert value(counts) == pytest.approx(best, abs=1e-9)
    assert all(nodes == list(range(len(nodes))) for nodes in kept), "a node goes with its parent"


@given(st.lists(CHANCES, min_size=1, max_size=4), SECONDS, st.floats(0.1, 4.0), st.randoms())
@settings(max_examples=60)
def test_sequences_in_another_order_keep_as_much(
    rows: list[list[float]], steps: list[float], price: float, draw
) -> None:
    rows = [list(accumulate(row, lambda a, b: a * b)) for row in rows][:3]
    order = list(range(len(rows)))
    draw.shuffle(order)
    one = worth_verifying(rows, price, lambda count: more(steps, count))
    other = worth_verifying([rows[b] for b in order], price, lambda count: more(steps, count))
    total = lambda kept, rows: sum(sum(rows[b][n] for n in nodes) for b, nodes in enumerate(kept))  # noqa: E731
    assert total(one, rows) == pytest.approx(total(other, [rows[b] for b in order]))


def test_a_chain_ends_where_its_next_token_costs_more_than_it_brings() -> None:
    assert least_survival(10.0, 0.05, 0.8) == pytest.approx(0.5 * MARGIN / 0.8)
    assert least_survival(10.0, 1.0, 0.8) == 0.98
    assert least_survival(10.0, 0.0, 0.8) == 0.01


def by_hand(chains: list[list[float]], level: float, node: float, depth: int) -> float:
    """Speed over plain decoding of a fixed depth, where a plain step takes a second."""
    tokens = sum(1 + sum(accumulate(chain[:depth], lambda a, b: a * b)) for chain in chains)
    return tokens / (len(chains) * (1 + depth * (level + node)))


@given(st.floats(0.3, 0.95), st.floats(0.02, 0.6))
@settings(max_examples=60)
def test_a_forecast_is_about_the_best_fixed_depth_of_even_chains(chance: float, level: float) -> None:
    chains = [[chance] * 8] * 3
    found = forecast(chains, lambda nodes: 1 + 0.03 * (nodes - 1), lambda levels: level * levels, chance)
    best = max(by_hand(chains, level, 0.03, depth) for depth in range(9))
    assert found.speed >= 1
    assert found.speed <= best + 1e-9
    assert found.speed > 0.88 * best, "the margin costs a little where chances are certain"


def test_what_never_pays_is_forecast_to_bring_nothing() -> None:
    found = forecast([[0.6] * 8], lambda nodes: 1.0 + 0.1 * (nodes - 1), lambda levels: 1.0 * levels, 0.8)
    assert found.speed == 1.0
    assert found.tokens - found.levels * 1.0 < 0


def test_a_dearer_level_is_never_forecast_to_be_faster() -> None:
    chains = [[0.9, 0.5, 0.8, 0.7], [0.4, 0.9, 0.9, 0.2], [0.99, 0.97, 0.6, 0.9]]
    speeds = [
        forecast(chains, lambda n: 1 + 0.05 * (n - 1), lambda n, c=cost: c * n, 0.8).speed  # type: ignore[misc]
        for cost in (0.01, 0.1, 0.2, 0.4, 0.8, 1.5)
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 1.5
    assert speeds[-1] == 1
