"""Attention over the slot cache: a node's result is a function of its keys in the order of their positions only."""

from __future__ import annotations

import random
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from outrider.kernels import cpu as native
from outrider.kernels.cpu import AttentionPlan, Scoring, attention
from outrider.kernels.vectors import pack_vectors, unpack_vectors, vector_dim

PACKED = [ml_dtypes.bfloat16, np.int8]

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """One node in float64. q [head, dim], k and v [kv_head, token, dim], in the order of positions."""
    if window:
        k, v = k[:, -window:], v[:, -window:]
    group = len(q) // len(k)
    k, v = (t.astype(np.float64).repeat(group, 0) for t in (k, v))
    scores = np.einsum("hd,hkd->hk", q.astype(np.float64), k) * scaling
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    if sinks is not None:
        scores = np.concatenate([scores, sinks[:, None]], 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hk,hkd->hd", (weights / weights.sum(-1, keepdims=True))[:, : k.shape[1]], v)


def random_tree(nodes: int, rng: random.Random) -> list[int]:
    return [-1, *(rng.randint(max(0, i - 3), i - 1) for i in range(1, nodes))]


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(n, marks=pytest.mark.long) for n in range(16, 40))])
def test_a_node_has_the_bits_of_a_committed_token(seed: int) -> None:
    """Chains, random trees and ragged batches; odd head sizes; windows, caps and sinks; other slots are NaN."""
    draw, rng = np.random.default_rng(seed), random.Random(seed)
    batch, nodes = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 5, 9, 33])
    kv_heads, group, dim = rng.choice([1, 2, 4]), rng.choice([1, 3, 8, 20]), rng.choice([8, 20, 64, 80, 128])
    value_dim = rng.choice([dim, 12, 64])
    rows = rng.sample(range(4), batch)
    lengths = [rng.choice([0, 1, 31, 32, 50, 63, 64, 200, 300]) for _ in rows]
    capacity = max(lengths) + nodes + rng.choice([0, 7])
    keys = np.full((4, kv_heads, capacity, dim), np.nan, np.float32)
    values = np.full((4, kv_heads, capacity, value_dim), np.nan, np.float32)
    for row, length in zip(rows, lengths, strict=True):
        keys[row, :, : length + nodes] = normal(draw, kv_heads, length + nodes, dim)
        values[row, :, : length + nodes] = normal(draw, kv_heads, length + nodes, value_dim)
    parents = None
    if rng.random() < 0.7:
        sizes = [rng.randint(1, nodes) for _ in rows]
        parents = np.array([random_tree(n, rng) + [-2] * (nodes - n) for n in sizes])
    q = normal(draw, batch, nodes, kv_heads * group, dim)
    window, softcap = rng.choice([None, None, 1, 10, 70]), rng.choice([None, None, 5.0])
    sinks = rng.choice([None, normal(draw, kv_heads * group)])
    scaling = dim**-0.5
    out = attention(
        AttentionPlan(rows, lengths, nodes, parents), q, keys, values, Scoring(scaling, window, softcap, sinks)
    )
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        for n in range(nodes):
            above = list(range(-1, nodes - 1)) if parents is None else parents[b].tolist()
            if above[n] == -2:
                assert not out[b, n].any()
                continue
            path, at = [], n
            while at >= 0:
                path.append(at)
                at = above[at]
            slots = [*range(length), *(length + p for p in reversed(path))]
            k, v = keys[row][:, slots], values[row][:, slots]
            assert np.abs(out[b, n] - reference(q[b, n], k, v, scaling, window, softcap, sinks)).max() < 1e-5
            one = attention(
                AttentionPlan([0], [len(slots) - 1], 1),
                q[b : b + 1, n : n + 1],
                np.ascontiguousarray(k[None]),
                np.ascontiguousarray(v[None]),
                Scoring(scaling, window, softcap, sinks),
            )
            assert np.array_equal(one[0, 0], out[b, n])


def isas() -> Iterator[str]:
    """Each instruction set of this processor, in use while it is the current one."""
    before = native.isa()
    try:
        yield from (isa for isa in native.isas() if native.use_isa(isa))
    finally:
        native.use_isa(before)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("dim", [1, 7, 20, 31, 32, 33, 80, 128])
def test_packing_is_its_twin_and_rounds_to_the_nearest(dim: int, dtype: type) -> None:
    x = normal(np.random.default_rng(dim), 60, 3, dim) * np.logspace(-36, 36, 60, dtype=np.float32)[:, None, None]
    x[3], x[4], x[5, 0, dim // 2], x[5, 1, 0] = 0.0, 1e-42, float("nan"), float("-inf")
    expected = pack_vectors(x, dtype)
    floats = unpack_vectors(expected)
    assert vector_dim(expected) == dim
    for isa in isas():
        got = native.pack_vectors(x, dtype)
        same = got == expected if dtype == np.int8 else (got == expected) | np.isnan(unpack_vectors(got))
        assert same.all(), isa
    whole = np.isfinite(x).all(-1)
    assert not np.isfinite(floats[~whole]).all(-1).any()  # a damaged model still shows
    for at in range(0, dim, 32):
        block, rounded = x[whole][:, at : at + 32], floats[whole][:, at : at + 32]
        bound = np.abs(block).max(-1, keepdims=True) / 254 if dtype == np.int8 else np.abs(block) * 2**-8
        assert (np.abs(rounded - block) <= (bound * (1 + 2**-7)).clip(1e-31)).all()


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("seed", range(8))
def test_packed_keys_and_values_give_the_bits_of_the_floats_they_stand_for(seed: int, dtype: type) -> None:
    """Chains and trees of 1 to 300 nodes, some of them in the scratch already; every instruction set."""
    draw, rng = np.random.default_rng(seed), random.Random(seed)
    batch, nodes = rng.choice([1, 2, 3]), rng.choice([1, 2, 5, 33, 100, 300])
    kv_heads, group, dim = rng.choice([1, 2]), rng.choice([1, 3, 8, 20]), rng.choice([8, 20, 64, 80, 128])
    value_dim, rows = rng.choice([dim, 12]), rng.sample(range(4), batch)
    lengths = [rng.choice([0, 1, 31, 32, 50, 64, 300]) for _ in rows]
    shape = (4, kv_heads, max(lengths) + nodes + 3)
    keys, values = (pack_vectors(normal(draw, *shape, d), dtype) for d in (dim, value_dim))
    parents, held = None, 0
    if rng.random() < 0.8:
        sizes = [rng.randint(1, nodes) for _ in rows]
        parents = np.array([random_tree(n, rng) + [-2] * (nodes - n) for n in sizes])
        held = rng.choice([0, 0, nodes // 3])
    plan = AttentionPlan(rows, lengths, nodes - held, parents, held)
    q = normal(draw, batch, nodes - held, kv_heads * group, dim)
    scoring = Scoring(dim**-0.5, rng.choice([None, None, 1, 10, 70]), rng.choice([None, 5.0]))
    expected = attention(plan, q, unpack_vectors(keys), unpack_vectors(values), scoring)
    for isa in isas():
        assert np.array_equal(attention(plan, q, keys, values, scoring), expected), isa
    for n in rng.sample(range(nodes - held), min(3, nodes - held)):  # alone: the last of the nodes before it are held
        if parents is not None:
            one = AttentionPlan(rows, lengths, 1, parents[:, : held + n + 1], held + n)
            assert np.array_equal(attention(one, q[:, n : n + 1], keys, values, scoring)[:, 0], expected[:, n])


@pytest.mark.parametrize("length", [1, 15, 255, 256, 257, 777, 4_099, pytest.param(20_001, marks=pytest.mark.long)])
def test_a_node_has_its_bits_over_any_context_cut_in_any_way(length: int) -> None:
    """A tree and a piece of a prompt, the nodes alone, one thread and two, every instruction set and precision."""
    draw = np.random.default_rng(length)
    nodes, heads, dim, value_dim = 5, 3, 24, 20
    sets = [isa for isa in native.isas() if isa != "portable" or length < 1000]  # it has no multiply-add, so it is slow
    keys, values = normal(draw, 1, 1, length + nodes, dim), normal(draw, 1, 1, length + nodes, value_dim)
    q = normal(draw, 1, nodes, heads, dim)
    for dtype in (np.float32, *PACKED):
        k, v = pack_vectors(keys, dtype), pack_vectors(values, dtype)
        for parents in (None, np.array([random_tree(nodes, random.Random(length))])):
            for window in (None, length // 2 + 3):
                scoring = Scoring(dim**-0.5, window)
                threads, found = native.num_threads(), []
                for count in (1, 2):
                    native.set_num_threads(count)
                    plan = AttentionPlan([0], [length], nodes, parents)
                    found += [attention(plan, q, k, v, scoring) for isa in isas() if isa in sets]
                    for n in range(nodes) if parents is not None else ():
                        one = AttentionPlan([0], [length], 1, parents[:, : n + 1], n)
                        assert np.array_equal(attention(one, q[:, n : n + 1], k, v, scoring)[:, 0], found[0][:, n])
                native.set_num_threads(threads)
                assert all(np.array_equal(found[0], other) for other in found)
                if parents is None:
                    at, (whole_k, whole_v) = length + nodes, (unpack_vectors(t)[0] for t in (k, v))
                    twin = reference(q[0, -1], whole_k[:, :at], whole_v[:, :at], scoring.scaling, window, None, None)
                    assert np.abs(found[0][0, -1] - twin).max() < 1e-5


def test_large_scores_do_not_overflow() -> None:
    q, k = np.full((1, 1, 1, 8), 50, np.float32), np.full((1, 1, 70, 8), 50, np.float32)
    v = normal(np.random.default_rng(0), 1, 1, 70, 8)
    k[:, :, 10] = -50
    out = attention(AttentionPlan([0], [69], 1), q, k, v, Scoring(1.0))
    keep = [i for i in range(70) if i != 10]
    assert np.abs(out[0, 0, 0] - v[0, 0, keep].mean(0)).max() < 1e-5


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="node 1 of entry 0 has parent 1"):
        AttentionPlan([0], [0], 2, np.array([[-1, 1]]))
    with pytest.raises(ValueError, match="int64"):
        AttentionPlan([0], [0], 2, np.array([[-1, 0]], np.int32))
    with pytest.raises(ValueError, match="give the parents of all 3"):
        AttentionPlan([0], [0], 1, None, 2)
    k, q = np.ones((1, 2, 10, 8), np.float32), np.ones((1, 2, 4, 8), np.float32)
    with pytest.raises(ValueError, match="cells up to 11 of 10"):
        attention(AttentionPlan([0], [9], 2), q, k, k, Scoring(1.0))
    with pytest.raises(ValueError, match="slot 3 of 1"):
        attention(AttentionPlan([3], [2], 2), q, k, k, Scoring(1.0))
    with pytest.raises(ValueError, match="values must be int8"):
        attention(AttentionPlan([0], [2], 2), q, pack_vectors(k, np.int8), k, Scoring(1.0))
    with pytest.raises(ValueError, match="float32"):
        attention(AttentionPlan([0], [2], 2), q.astype(np.float64), k, k, Scoring(1.0))
