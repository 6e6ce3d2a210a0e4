"""The recurrences of linear attention and Mamba: the published formulas, and a node that has the same bits in any chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from native_parts import delta_rule, selective

from outrider.kernels import cpu as native

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

Scan = Callable[..., tuple[np.ndarray, list[list[np.ndarray | None]]]]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rule(rows: int, heads: int, keys: int, width: int, per_key: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Inputs and a state before the first node."""
    q, k, v = drawn(rows, heads, keys), drawn(rows, heads, keys, seed=1), drawn(rows, heads, width, seed=2)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    decay = sigmoid(drawn(rows, heads, *[keys] * per_key, seed=3))
    return [q, k, v, decay, sigmoid(drawn(rows, heads, seed=4))], drawn(heads, keys, width, seed=5)


def space(rows: int, groups: int, channels: int, width: int, per_column: bool) -> tuple[list[np.ndarray], np.ndarray]:
    x, step = drawn(rows, channels), np.exp(drawn(rows, channels, seed=1))
    a = -np.exp(drawn(channels, *[width] * per_column, seed=2))
    return [x, step, a, drawn(rows, groups, width), drawn(rows, groups, width, seed=3)], drawn(channels, width, seed=5)


def rule_by_definition(inputs: list[np.ndarray], state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, decay, beta = (t.astype(np.float64) for t in inputs)
    state, out = state.astype(np.float64), []
    for t in range(len(v)):
        state = state * (decay[t][..., None] if decay.ndim == 3 else decay[t][:, None, None])
        error = beta[t][:, None] * (v[t] - np.einsum("hkw,hk->hw", state, k[t]))
        state = state + np.einsum("hk,hw->hkw", k[t], error)
        out.append(np.einsum("hkw,hk->hw", state, q[t]))
    return np.stack(out), state


def space_by_definition(inputs: list[np.ndarray], state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, step, a, b, c = (t.astype(np.float64) for t in inputs)
    state, out, each = state.astype(np.float64), [], x.shape[1] // b.shape[1]
    for t in range(len(x)):
        mine, read = (y[t].repeat(each, 0) for y in (b, c))
        state = state * np.exp(step[t][:, None] * (a if a.ndim == 2 else a[:, None]))
        state = state + step[t][:, None] * mine * x[t][:, None]
        out.append((state * read).sum(-1))
    return np.stack(out), state


SHAPES: list[Any] = [
    (delta_rule, rule_by_definition, rule(9, 2, 16, 32, False)),
    (delta_rule, rule_by_definition, rule(9, 3, 24, 44, True)),
    (delta_rule, rule_by_definition, rule(5, 1, 8, 3, False)),
    (selective, space_by_definition, space(9, 2, 24, 32, False)),
    (selective, space_by_definition, space(9, 1, 21, 16, True)),
    (selective, space_by_definition, space(5, 3, 6, 5, True)),
]


@pytest.mark.parametrize(("scan", "definition", "given"), SHAPES)
def test_it_is_the_formula(scan: Scan, definition: Any, given: tuple[list[np.ndarray], np.ndarray]) -> None:
    inputs, start = given
    rows = len(inputs[0])
    out, states = scan(*inputs, [start], [[*range(rows)]], [[n == rows - 1 for n in range(rows)]])
    expected, after = definition(*given)
    assert np.allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert states[0][:-1] == [None] * (rows - 1)
    found = states[0][-1]
    assert found is not None
    assert np.allclose(found, after, rtol=1e-4, atol=1e-4 * np.abs(after).max())


@pytest.mark.parametrize(("scan", "definition", "given"), SHAPES)
def test_a_node_has_the_same_bits_in_any_chain(
    scan: Scan, definition: Any, given: tuple[list[np.ndarray], np.ndarray]
) -> None:
    """One by one, as one chain, in pieces that go on from a kept state, beside others, and in rows out of order."""
    inputs, start = given
    rows, before = len(inputs[0]), start.copy()
    alone, state = [], start
    for row in range(rows):
        out, states = scan(*inputs, [state], [[row]], [[True]])
        assert not out[[n for n in range(rows) if n != row]].any(), "rows of no chain are zeros"
        alone.append(out[row])
        state = states[0][0]
        assert state is not None
    whole, states = scan(*inputs, [start], [[*range(rows)]], [[n in (2, rows - 1) for n in range(rows)]])
    assert np.array_equal(whole, np.stack(alone))
    assert np.array_equal(states[0][-1], state)  # pyright: ignore[reportArgumentType]
    rest, ends = scan(
        *inputs, [states[0][2], start], [[*range(3, rows)], [2, 0]], [[True] * (rows - 3), [False, False]]
    )
    assert np.array_equal(rest[3:], whole[3:])
    beside, _ = scan(*inputs, [start], [[2, 0]], [[False, False]])
    assert np.array_equal(rest[[2, 0]], beside[[2, 0]])
    assert np.array_equal(ends[0][-1], state)  # pyright: ignore[reportArgumentType]
    assert np.array_equal(start, before), "a start is left as it was"


def test_what_does_not_fit_is_refused() -> None:
    inputs, start = rule(3, 2, 16, 32, False)
    chain = [[0, 1, 2]], [[False] * 3]
    with pytest.raises(ValueError, match=r"a state must be float32 \[2, 16, 32\]"):
        delta_rule(*inputs, [start[:1]], *chain)
    with pytest.raises(ValueError, match="query must be float32"):
        delta_rule(inputs[0].astype(np.float64), *inputs[1:], [start], *chain)
    with pytest.raises(ValueError, match="row beyond the 3"):
        delta_rule(*inputs, [start], [[0, 3]], [[False, False]])
    inputs, start = space(3, 2, 6, 8, True)
    with pytest.raises(ValueError, match="4 groups must divide 6"):
        selective(*inputs[:3], *(np.tile(t, (1, 2, 1)) for t in inputs[3:]), [start], *chain)
