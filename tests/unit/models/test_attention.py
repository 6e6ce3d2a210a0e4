"""The three forms of attention over the slot cache: the reference defines it, the masked form of devices agrees closely, and
the native one agrees closely and gives a node the same bits whoever is beside it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from outrider.core.tree import tree
from outrider.kernels import cpu as native
from outrider.kernels.cpu import Scoring
from outrider.kernels.vectors import pack_vectors, vector_dim
from outrider.models import attention
from outrider.models.attention import attend, attend_native, attend_reference
from outrider.models.cache import KV_CACHE_DTYPES, SlotCache
from outrider.models.hf import device
from outrider.models.hf.device import DeviceCache
from outrider.models.nodes import Nodes

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 20, 12  # no multiple of a vector's width; groups of three heads

OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.linspace(-2, 3, HEADS, dtype=np.float32)},
    "all": {"window": 7, "softcap": 3.0, "sinks": np.linspace(-2, 3, HEADS, dtype=np.float32)},
}

needs_native = pytest.mark.skipif(not native.available(), reason="needs the native kernels")


def attend_masked(nodes: Nodes, layer: int, query: np.ndarray, scoring: Scoring) -> np.ndarray:
    sinks = None if scoring.sinks is None else torch.from_numpy(scoring.sinks)
    given = Scoring(scoring.scaling, scoring.window, scoring.softcap, sinks)
    return device.attend(nodes, layer, torch.from_numpy(query), given).numpy()


def write(nodes: Nodes, layer: int, key: np.ndarray, value: np.ndarray) -> None:
    if isinstance(nodes.cache, DeviceCache):
        device.write(nodes, layer, torch.from_numpy(key), torch.from_numpy(value))
    else:
        attention.write(nodes, layer, key, value)


def random_parents(nodes: list[int], seed: int) -> np.ndarray:
    draw = random.Random(seed)
    return np.asarray(tree([[(0, -1), *((0, draw.randrange(i)) for i in range(1, n))] for n in nodes])[1])


def filled(lengths: list[int], dtype: str = "auto", masked: bool = False) -> SlotCache:
    """One layer, with keys and values in the committed slots and rubbish everywhere else. masked: as a device has it."""
    draw, on = np.random.default_rng(0), torch if masked else np
    given = len(lengths), 512, dtype
    cache = DeviceCache(*given, {}, torch.device("cpu")) if masked else SlotCache(*given)
    cache.reserve([0], 200)
    keys, values = cache.layer(0, (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    for t in (keys, values):
        numbers = on.asarray(draw.standard_normal((*t.shape[:3], vector_dim(t)), np.float32))
        t[...] = pack_vectors(numbers, t.dtype, on)
    cache.length = list(lengths)
    return cache


def batch(cache: SlotCache, slots: list[int], count: int, parents: np.ndarray | None) -> Nodes:
    """`count` new nodes in each slot. Attention reads no token."""
    return Nodes(np.zeros((len(slots), count), np.int64), cache, slots, parents)


def states(batch: int, nodes: int) -> tuple[np.ndarray, ...]:
    """Query, key and value [batch, head, node, dim], laid out as modelling code lays them out."""
    draw = np.random.default_rng(1)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return tuple(draw.standard_normal((batch, nodes, *s), np.float32).swapaxes(1, 2) for s in shapes)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", [attend_masked, pytest.param(attend_native, marks=needs_native)])
@pytest.mark.parametrize("dtype", list(KV_CACHE_DTYPES))
def test_forms_agree_on_trees(form, options: dict, dtype: str) -> None:
    lengths, rows = [0, 9, 70, 130], [2, 0, 3]
    parents = random_parents([7, 1, 12], seed=3)
    query, key, value = states(len(rows), parents.shape[1])
    found = []
    for each in (attend_reference, form):
        nodes = batch(filled(lengths, dtype, each is attend_masked), rows, parents.shape[1], parents)
        write(nodes, 0, key, value)
        found.append(each(nodes, 0, query, Scoring(0.3, **options))[parents >= -1])
    np.testing.assert_allclose(found[1], found[0], atol=2e-6, rtol=1e-5)


def test_a_window_counts_positions_not_slots() -> None:
    """Two siblings lie between a node and its parent in the scratch, and not between them in the text."""
    cache = filled([4])
    parents = np.array([[-1, 0, 0, 0, 3]])
    query, key, value = states(1, 5)
    nodes = batch(cache, [0], 5, parents)
    write(nodes, 0, key, value)
    assert nodes.mask(3)[0, 4].nonzero()[0].tolist() == [4, 7, 8]
    assert nodes.mask(5)[0, 4].nonzero()[0].tolist() == [2, 3, 4, 7, 8]
    before = attend(nodes, 0, query, Scoring(0.3, window=3))
    for slot in (3, 5, 6):  # beyond the window, and the siblings
        cache.layers[0][0][0, :, slot] = 50.0
    assert np.array_equal(attend(nodes, 0, query, Scoring(0.3, window=3))[0, 4], before[0, 4])


def test_positions_and_last_nodes() -> None:
    parents = np.array([[-1, 0, 1, 0], [-1, 0, -2, -2]])
    nodes = batch(filled([5, 2]), [0, 1], 4, parents)
    assert nodes.positions.tolist() == [[5, 6, 7, 6], [2, 3, 2, 2]]
    assert nodes.last == [3, 1]
    chain = batch(filled([5, 2]), [1, 0], 3, None)
    assert chain.positions.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert chain.last == [2, 2]
    assert chain.mask(None).shape == (2, 3, 8)
    assert chain.mask(None)[0, 1].nonzero()[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", [attend_reference, attend_masked, pytest.param(attend_native, marks=needs_native)])
def test_a_tree_may_come_in_pieces(form, options: dict) -> None:
    """Nodes written by an earlier forward of the same step are seen where they are ancestors, and only there."""
    lengths, rows = [3, 62, 0], [2, 0, 1]
    parents = random_parents([9, 14, 6], seed=5)
    query, key, value = states(3, parents.shape[1])
    masked = form is attend_masked
    nodes = batch(filled(lengths, masked=masked), rows, parents.shape[1], parents)
    write(nodes, 0, key, value)
    whole = form(nodes, 0, query, Scoring(0.3, **options))
    cache, pieces, done = filled(lengths, masked=masked), [], 0
    for upto in (1, 5, 6, parents.shape[1]):
        part = batch(cache, rows, upto - done, parents[:, :upto])
        new = slice(done, upto)
        write(part, 0, key[:, :, new], value[:, :, new])
        assert np.array_equal(part.positions, nodes.positions[:, new])
        pieces.append(form(part, 0, query[:, :, new], Scoring(0.3, **options)))
        done = upto
    real = parents >= -1
    if masked:  # its rounding depends on the span
        np.testing.assert_allclose(np.concatenate(pieces, 1)[real], whole[real], atol=2e-6, rtol=1e-5)
    else:
        assert np.array_equal(np.concatenate(pieces, 1)[real], whole[real])
