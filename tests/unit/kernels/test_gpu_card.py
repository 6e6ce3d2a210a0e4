"""On a card alone: the bits of rows at the shapes of real models, and kernels in a graph. TRITON_INTERPRET=0 asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import interpreted
import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.kernels.gpu import APART, attention, choice, linear, norms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(interpreted.DEVICE != "cuda", reason="needs a GPU, and TRITON_INTERPRET=0"),
]
MATRICES = [(2048, 1536), (1536, 1536), (1536, 8960), (4096, 14336), (151936, 1536)]
HEADS = [(12, 2, 128), (32, 8, 128), (4, 1, 256)]
MOST, LENGTH, VOCAB = 512, 3000, 151936
COUNTS = (1, 2, 7, 8, 16, 17, 32, 33, 64, 65, 200)


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    torch.set_default_device(interpreted.DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator(interpreted.DEVICE).manual_seed(11)


def whole(numbers: Any) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.int32)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """As a plan has it: parts for few rows."""
    parts = linear.split(*weight.shape)[0] if len(x) <= APART else 1
    out = torch.full((parts, len(x), len(weight)), float("nan"))
    linear.linear(x, weight, out)
    total = torch.empty(len(x), len(weight))
    norms.sum_norm(out, None, total, None, add=False) if len(weight) < 20000 else total.copy_(out[0])
    return total


@pytest.mark.parametrize(("n", "k"), MATRICES)
def test_bits_of_a_product(n: int, k: int, draw: torch.Generator) -> None:
    x, weight = torch.randn(MOST, k, generator=draw), torch.randn(n, k, generator=draw).bfloat16()
    many = product(x, weight)
    for count in COUNTS:
        rows = torch.randperm(MOST, generator=draw)[:count]
        assert torch.equal(product(x[rows], weight), many[rows]), count


@pytest.mark.parametrize("width", [896, 1536, 4096])
def test_bits_of_a_norm(width: int, draw: torch.Generator) -> None:
    x, weight = torch.randn(MOST, width, generator=draw), torch.randn(width, generator=draw)
    for parts in (3, 8):
        apart = torch.randn(parts, MOST, width, generator=draw)
        total = apart[0]
        for part in apart[1:]:
            total = total + part
        looped, few, out, alone = x.clone(), x[:5].clone(), torch.empty_like(x), torch.empty(5, width)
        norms.sum_norm(total[None], None, looped, out, weight=weight, eps=1e-6)
        norms.sum_norm(apart[:, :5].contiguous(), None, few, alone, weight=weight, eps=1e-6)
        assert torch.equal(few, looped[:5])
        assert torch.equal(alone, out[:5])


def chain(start: int, nodes: int, count: int) -> Any:
    """Of one slot. count: real nodes."""
    positions = whole([start + n if n < count else -1 for n in range(nodes)])
    return SimpleNamespace(positions=positions, slots=whole([0]), starts=whole([start]), paths=None)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("window", [0, 700])
def test_bits_of_attention(heads: int, kv_heads: int, dim: int, window: int, draw: torch.Generator) -> None:
    """A prompt against its rows in chains, with padding, and as the deepest nodes of trees whose siblings lie between."""
    keys, values = (torch.randn(1, kv_heads, LENGTH + 256, dim, generator=draw).bfloat16() for _ in range(2))
    query, first = torch.randn(MOST, heads * dim, generator=draw), LENGTH - MOST
    splits = attention.splits_of(LENGTH + 256)

    def attend(query: Tensor, keys: Tensor, values: Tensor, rows: Any, apart: bool) -> Tensor:
        out = torch.full_like(query, float("nan"))
        room = torch.empty(attention.workspace_size(len(query), heads, dim, splits)) if apart else None
        settings = {"heads": heads, "scale": dim**-0.5, "window": window, "splits": splits}
        attention.attend(query, keys, values, rows, out, room, **settings)
        return out

    prompt = attend(query, keys, values, chain(first, MOST, MOST), False)
    assert not prompt.isnan().any()
    for at in (0, 1, MOST // 5, MOST - 64):
        for nodes in (1, 2, 5, 8, 33, 64):
            rows, own = chain(first + at, nodes, max(nodes - 2, 1)), query[at : at + nodes]
            real = max(nodes - 2, 1)
            assert torch.equal(attend(own, keys, values, rows, True)[:real], prompt[at : at + real]), (at, nodes)
        depth, start = 20, first + at  # nodes 0, 2, 4 and so on are the path; each has a sibling after it
        path = [0, *range(1, 2 * depth, 2)][:depth]
        tree_keys, tree_values = keys.clone(), values.clone()
        for tree, was in ((tree_keys, keys), (tree_values, values)):
            tree[:, :, start : start + 2 * depth] = 7.0
            tree[:, :, [start + n for n in path]] = was[:, :, start : start + depth]
        paths, positions, queries = (
            torch.zeros(2 * depth, 64, dtype=torch.int32),
            [-1] * 2 * depth,
            query[: 2 * depth].clone(),
        )
        for level, node in enumerate(path):
            paths[node, : level + 1] = whole(path[: level + 1])
            positions[node], queries[node] = start + level, query[at + level]
        rows = SimpleNamespace(positions=whole(positions), slots=whole([0]), starts=whole([start]), paths=paths)
        for apart in (True, False):
            out = attend(queries, tree_keys, tree_values, rows, apart)
            assert torch.equal(out[path], prompt[at : at + depth]), (at, apart)


def test_noise_and_choice_at_the_size_of_a_vocabulary(draw: torch.Generator) -> None:
    rows, seeds = SimpleNamespace(positions=whole([5, 99, 12345])), [3, -8, 2**40]
    logits, temperatures = torch.randn(3, VOCAB, generator=draw) * 3, torch.tensor([1.0, 0.7, 0.0])
    best, index = torch.empty(3, choice.blocks_of(VOCAB)), torch.empty(3, choice.blocks_of(VOCAB), dtype=torch.int32)
    choice.choose(logits, best, index, rows, torch.tensor(seeds), temperatures)  # pyright: ignore[reportArgumentType]
    noise = Noise(seeds, [0] * 3).gumbel(Stream.TOKEN, np.array([6, 100, 12346]), VOCAB)
    for row, scores in enumerate(logits.cpu().numpy()):
        warm = float(temperatures[row])
        scores = scores / np.float32(warm) + noise[row] if warm else scores
        top = int(best[row].argmax())
        assert int(index[row, top]) == int(scores.argmax())
        assert float(best[row, top]) == float(scores.max())


def test_a_graph_repeats_a_product_of_what_is_there_then(draw: torch.Generator) -> None:
    x, weight = torch.randn(3, 1536, generator=draw), torch.randn(1536, 1536, generator=draw).bfloat16()
    out = torch.empty(linear.split(1536, 1536)[0], 3, 1536)
    linear.linear(x, weight, out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear.linear(x, weight, out)
    for _ in range(3):
        x.copy_(torch.randn(3, 1536, generator=draw))
        graph.replay()
        again = torch.empty_like(out)
        linear.linear(x, weight, again)
        assert torch.equal(out, again)
