"""The three forms of attention over the slot cache: the reference defines it, the masked form agrees closely, and the
native one agrees closely and gives a node the same bits whoever is beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core.tree import tree
from outrider.kernels import cpu as native
from outrider.kernels.cpu import Scoring
from outrider.kernels.vectors import pack_vectors, vector_dim
from outrider.models.attention import attend, attend_masked, attend_native, attend_reference, write
from outrider.models.cache import KV_CACHE_DTYPES, SlotCache
from outrider.models.nodes import Nodes

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 20, 12  # no multiple of a vector's width; groups of three heads

OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 3, HEADS)},
    "all": {"window": 7, "softcap": 3.0, "sinks": torch.linspace(-2, 3, HEADS)},
}

needs_native = pytest.mark.skipif(not native.available(), reason="needs the native kernels")


def random_parents(nodes: list[int], seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for n in nodes:
        parents = [int(torch.randint(0, i, (1,), generator=draw)) for i in range(1, n)]
        rows.append([(0, -1), *((0, p) for p in parents)])
    return tree(rows)[1]


def filled(lengths: list[int], seed: int = 0, dtype: str = "auto") -> SlotCache:
    """One layer, with keys and values in the committed slots and rubbish everywhere else."""
    draw = torch.Generator().manual_seed(seed)
    cache = SlotCache(len(lengths), 512, dtype)
    cache.reserve([0], 200)
    keys, values = cache.layer(0, (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), torch.empty(0))
    for t in (keys, values):
        t.copy_(pack_vectors(torch.randn(*t.shape[:3], vector_dim(t), generator=draw), t.dtype))
    cache.length = list(lengths)
    return cache


def batch(cache: SlotCache, slots: list[int], count: int, parents: Tensor | None) -> Nodes:
    """`count` new nodes in each slot. Attention reads no token."""
    return Nodes(torch.zeros(len(slots), count, dtype=torch.long), cache, slots, parents)


def states(batch: int, nodes: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [batch, head, node, dim], laid out as modelling code lays them out."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return tuple(torch.randn(batch, nodes, *s, generator=draw).transpose(1, 2) for s in shapes)  # pyright: ignore


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", [attend_masked, pytest.param(attend_native, marks=needs_native)])
@pytest.mark.parametrize("dtype", list(KV_CACHE_DTYPES))
def test_forms_agree_on_trees(form, options: dict, dtype: str) -> None:
    lengths, rows = [0, 9, 70, 130], [2, 0, 3]
    parents = random_parents([7, 1, 12], seed=3)
    query, key, value = states(len(rows), parents.shape[1])
    nodes = batch(filled(lengths, dtype=dtype), rows, parents.shape[1], parents)
    write(nodes, 0, key, value)
    expected, got = (f(nodes, 0, query, Scoring(0.3, **options)) for f in (attend_reference, form))
    real = parents >= -1
    torch.testing.assert_close(got[real], expected[real], atol=2e-6, rtol=1e-5)


def test_a_window_counts_positions_not_slots() -> None:
    """Two siblings lie between a node and its parent in the scratch, and not between them in the text."""
    cache = filled([4])
    parents = torch.tensor([[-1, 0, 0, 0, 3]])
    query, key, value = states(1, 5)
    nodes = batch(cache, [0], 5, parents)
    write(nodes, 0, key, value)
    assert nodes.mask(3)[0, 0, 4].nonzero().flatten().tolist() == [4, 7, 8]
    assert nodes.mask(5)[0, 0, 4].nonzero().flatten().tolist() == [2, 3, 4, 7, 8]
    before = attend(nodes, 0, query, Scoring(0.3, window=3))
    for slot in (3, 5, 6):  # beyond the window, and the siblings
        cache.layers[0][0][0, :, slot] = 50.0
    assert torch.equal(attend(nodes, 0, query, Scoring(0.3, window=3))[0, 4], before[0, 4])


def test_positions_and_last_nodes() -> None:
    parents = torch.tensor([[-1, 0, 1, 0], [-1, 0, -2, -2]])
    nodes = batch(filled([5, 2]), [0, 1], 4, parents)
    assert nodes.positions.tolist() == [[5, 6, 7, 6], [2, 3, 2, 2]]
    assert nodes.last == [3, 1]
    chain = batch(filled([5, 2]), [1, 0], 3, None)
    assert chain.positions.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert chain.last == [2, 2]
    assert chain.visible.shape == (2, 3, 8)
    assert chain.visible[0, 1].nonzero().flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", [attend_reference, attend_masked, pytest.param(attend_native, marks=needs_native)])
def test_a_tree_may_come_in_pieces(form, options: dict) -> None:
    """Nodes written by an earlier forward of the same step are seen where they are ancestors, and only there."""
    lengths, rows = [3, 62, 0], [2, 0, 1]
    parents = random_parents([9, 14, 6], seed=5)
    query, key, value = states(3, parents.shape[1])
    nodes = batch(filled(lengths), rows, parents.shape[1], parents)
    write(nodes, 0, key, value)
    whole = form(nodes, 0, query, Scoring(0.3, **options))
    cache, pieces, done = filled(lengths), [], 0
    for upto in (1, 5, 6, parents.shape[1]):
        part = batch(cache, rows, upto - done, parents[:, :upto])
        new = slice(done, upto)
        write(part, 0, key[:, :, new], value[:, :, new])
        assert torch.equal(part.positions, nodes.positions[:, new])
        pieces.append(form(part, 0, query[:, :, new], Scoring(0.3, **options)))
        done = upto
    real = parents >= -1
    if form is attend_masked:  # its rounding depends on the span
        torch.testing.assert_close(torch.cat(pieces, 1)[real], whole[real], atol=2e-6, rtol=1e-5)
    else:
        assert torch.equal(torch.cat(pieces, 1)[real], whole[real])
