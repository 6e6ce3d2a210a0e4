"""The kernels of GPUs under Triton's interpreter: their values, and that a row has the same bits in whatever company it is.

With TRITON_INTERPRET=0 they run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import interpreted
import numpy as np
import pytest
import torch
from ggml_blocks import random_blocks
from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.core.types import Draft
from outrider.kernels import cpu as native
from outrider.kernels import gpu
from outrider.kernels.blocks import Blocks
from outrider.kernels.gpu import attention, choice, coded, elementwise, linear, norms, rope
from outrider.verify import batched

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
HEADS, KV_HEADS, DIM, CELLS = 6, 2, 32, 576


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator(interpreted.DEVICE).manual_seed(7)


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    torch.set_default_device(interpreted.DEVICE)
    yield
    torch.set_default_device(None)


def whole(*numbers: object) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def nothing(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a kernel must write: NaN, or a large negative number."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -(10**9), dtype=dtype)


def close(a: Tensor, b: Tensor, most: float) -> None:
    assert float((a.double() - b.double()).norm() / b.double().norm()) < most


def in_order(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass
class Rows:
    tokens: Tensor
    positions: Tensor
    cells: Tensor
    slots: Tensor
    starts: Tensor
    paths: Tensor | None = None
    parents: Tensor | None = None


def chain(slots: list[int], starts: list[int], nodes: int, unused: tuple[int, ...] = ()) -> Rows:
    """unused: rows that are padding."""
    positions = torch.cat([torch.arange(start, start + nodes, dtype=torch.int32) for start in starts])
    positions[list(unused)] = -1
    return Rows(torch.zeros_like(positions), positions, positions, whole(*slots), whole(*starts))


def tree(slots: list[int], starts: list[int], parents: list[list[int]]) -> Rows:
    nodes = len(parents[0])
    paths = torch.zeros(len(slots) * nodes, 64, dtype=torch.int32)
    positions, cells = list[int](), list[int]()
    for e, (start, above) in enumerate(zip(starts, parents, strict=True)):
        for n in range(nodes):
            path = path_of(above, n)
            paths[e * nodes + n, : len(path)] = whole(*path)
            positions.append(start + len(path) - 1)
            cells.append(start + n)
    tokens = torch.zeros(len(cells), dtype=torch.int32)
    flat = whole(*(p for above in parents for p in above))
    return Rows(tokens, whole(*positions), whole(*cells), whole(*slots), whole(*starts), paths, flat)


def path_of(parents: list[int], node: int) -> list[int]:
    return [*(path_of(parents, parents[node]) if node else []), node]


# Linear


@pytest.mark.parametrize(("n", "k"), [(72, 1100), (40, 200)])
def test_a_row_of_a_product_has_its_bits_in_any_company(n: int, k: int, draw: torch.Generator) -> None:
    x, bias = torch.randn(70, k, generator=draw), torch.randn(n, generator=draw)
    weight = torch.randn(n, k, generator=draw).bfloat16()
    parts, size = linear.split(n, k)
    assert (parts, size) == {1100: (2, 640), 200: (1, 256)}[k]
    many = nothing(1, 70, n)
    linear.linear(x, weight, many)
    close(many[0], x.bfloat16().double() @ weight.double().T, 1e-6)
    biased = nothing(1, 70, n)
    linear.linear(x, weight, biased, bias, factor=0.5, softcap=3.0)
    close(biased[0], 3 * torch.tanh(0.5 * (many[0].double() + bias) / 3), 1e-6)
    for rows in ([0], [69, 3, 17], [*range(20)], [*range(49, -1, -1)]):
        apart, halves = nothing(parts, len(rows), n), nothing(1, len(rows), n)
        linear.linear(x[rows], weight, apart)
        assert torch.equal(in_order(apart), many[0, rows])
        linear.linear(x[rows].bfloat16(), weight, halves)
        assert torch.equal(halves[0], many[0, rows])


def test_parts_that_follow_the_rows_are_noticed(draw: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: one row has other parts than many."""
    x, weight = torch.randn(20, 1100, generator=draw), torch.randn(40, 1100, generator=draw).bfloat16()
    many, alone = nothing(1, 20, 40), nothing(3, 1, 40)
    linear.linear(x, weight, many)
    with pytest.raises(ValueError, match="3 parts, where 2"):
        linear.linear(x[:1], weight, alone)
    monkeypatch.setattr(linear, "split", lambda n, k: (3, 384))
    linear.linear(x[:1], weight, alone)
    close(in_order(alone), many[0, :1], 1e-6)
    assert not torch.equal(in_order(alone), many[0, :1])


def test_gate_and_up_are_two_products_and_a_gate(draw: torch.Generator) -> None:
    x, bias = torch.randn(40, 1100, generator=draw), torch.randn(80, generator=draw)
    weight = torch.randn(80, 1100, generator=draw).bfloat16() / 8
    for function, given in (("silu", None), ("gelu_tanh", bias)):
        both, out, alone, expected = nothing(1, 40, 80), nothing(40, 40), nothing(1, 40), nothing(40, 40)
        linear.linear(x, weight, both, given)
        elementwise.gate(both[0, :, :40], both[0, :, 40:], function, expected)
        linear.gated(x, weight, given, out, function)
        linear.gated(x[5:6], weight, given, alone, function)
        assert torch.equal(out, expected)
        assert torch.equal(alone[0], out[5])
        rounded = nothing(40, 40, dtype=torch.bfloat16)
        linear.gated(x.bfloat16(), weight, given, rounded, function)
        assert torch.equal(rounded, out.bfloat16())
        gate, up = both[0].double().split(40, 1)
        act = (
            torch.nn.functional.silu(gate) if function == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
        )
        close(out, act * up, 1e-6)


# Codes


def coded_of(blocks: Blocks, *beside: Blocks) -> coded.Coded:
    out = coded.empty([blocks, *beside], "gguf", *blocks.shape, interpreted.DEVICE)
    assert isinstance(out, coded.Coded)
    out.write(0, coded.of_blocks(torch.from_numpy(blocks.data).to(interpreted.DEVICE), blocks.format))
    return out


@pytest.mark.parametrize("name", coded._FORMATS)
def test_codes_of_a_file_are_its_numbers(name: str) -> None:
    """Exact, or with scales that are rounded to float16."""
    blocks = random_blocks(name, 6, 768 if name.endswith("K") else 224)
    matrix, values = coded_of(blocks), torch.from_numpy(blocks.dense()).to(interpreted.DEVICE)
    assert (matrix.bits, matrix.group) == (8 if name[1] in "568" else 4, 16 if name == "Q6_K" else 32)
    assert matrix.nbytes == 6 * -(-values.shape[1] // 128) * (16 * matrix.bits + 512 // matrix.group)
    assert torch.equal(coded_of(blocks, random_blocks("Q6_K", 1, 256)).floats(), matrix.floats())
    assert torch.equal(matrix.floats(torch.tensor([[5], [0]])), matrix.floats()[[5, 0], None])
    if not name.endswith("K"):
        assert torch.equal(matrix.floats(), values.bfloat16())
        return
    part = (
        values.unflatten(1, (-1, 256)).abs().amax(2).repeat_interleave(256, 1)
    )  # it may be larger than the number itself
    assert ((matrix.floats() - values.bfloat16()).abs() <= part / 1024 + values.abs() / 128).all()
    assert (matrix.floats() == values.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("k", [64, 200])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_floats_are_those_of_the_cpu(kind: str, k: int, draw: torch.Generator) -> None:
    weight = torch.randn(7, k, generator=draw) * torch.logspace(-7, 3, 7)[:, None]
    weight[2, :32] = 0
    matrix = coded.empty([], kind, 7, k, interpreted.DEVICE)
    assert isinstance(matrix, coded.Coded)
    matrix.write(0, coded.rounded(weight, matrix.bits))
    right = torch.from_numpy(native.Packed([weight.cpu().numpy()], kind).dense()).to(interpreted.DEVICE)
    assert torch.equal(matrix.floats(), right.bfloat16())


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "Q5_1"])
def test_a_product_with_codes_has_the_bits_of_one_with_bfloat16(name: str, draw: torch.Generator) -> None:
    """Alone, in parts, in a prompt, and with a gate. The interpreter adds both in one order; a card has one for each kind."""
    n, k = 72, 1280 if name == "Q6_K" else 1120
    matrix, x = coded_of(random_blocks(name, n, k)), torch.randn(70, k, generator=draw)
    parts, floats = linear.split(n, k)[0], matrix.floats()
    for rows in (1, 20, 50, 70):
        for count in {1, parts} if rows < 70 else {1}:
            few, right = nothing(count, rows, n), nothing(count, rows, n)
            linear.linear(x[:rows], matrix, few)
            linear.linear(x[:rows], floats, right)
            assert torch.equal(few, right), (rows, count)
        few, right = nothing(rows, n // 2), nothing(rows, n // 2)
        linear.gated(x[:rows], matrix, None, few, "silu")
        linear.gated(x[:rows], floats, None, right, "silu")
        assert torch.equal(few, right), rows


# Norms


def reference_norm(x: Tensor, weight: Tensor, shift: Tensor | None, layer_norm: bool, eps: float) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if layer_norm else x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + (0 if shift is None else shift)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("post", [False, True])
def test_parts_and_residual_are_added_and_normed(post: bool, layer_norm: bool, draw: torch.Generator) -> None:
    parts, old = torch.randn(3, 4, 100, generator=draw), torch.randn(4, 100, generator=draw)
    bias, weight, shift, after = torch.randn(4, 100, generator=draw)
    wide, out = old.repeat(1, 2), nothing(4, 100)
    stream = wide[:, :100]  # of a wider register
    settings = {"weight": weight, "shift": shift, "eps": 1e-5, "layer_norm": layer_norm, "factor": 0.3}
    norms.sum_norm(parts, bias, stream, out, **settings, post=(after, None, 1e-6) if post else None)
    total = 0.3 * (parts.double().sum(0) + bias)
    total = old + (reference_norm(total, after, None, layer_norm, 1e-6) if post else total)
    close(stream, total, 1e-6)
    close(out, reference_norm(total, weight, shift, layer_norm, 1e-5), 1e-6)
    assert torch.equal(wide[:, 100:], old)
    alone, result = old[2:3].clone(), nothing(1, 100)
    with pytest.raises(ValueError, match="do not lie one after another"):
        norms.sum_norm(parts[:, 2:3], bias, alone, result)
    norms.sum_norm(
        parts[:, 2:3].contiguous(), bias, alone, result, **settings, post=(after, None, 1e-6) if post else None
    )
    assert torch.equal(alone[0], stream[2])
    assert torch.equal(result[0], out[2])
    read, again = stream.clone(), nothing(4, 100)
    norms.sum_norm(None, None, read, again, weight=weight, shift=shift, eps=1e-5, layer_norm=layer_norm)
    assert torch.equal(again, out)
    assert torch.equal(read, stream)
    rounded = nothing(4, 100, dtype=torch.bfloat16)
    norms.sum_norm(None, None, read, rounded, weight=weight, shift=shift, eps=1e-5, layer_norm=layer_norm)
    assert torch.equal(rounded, out.bfloat16())
    norms.sum_norm(parts, None, read, None, add=False)
    assert torch.equal(read, in_order(parts))


def test_groups_are_normed_alone(draw: torch.Generator) -> None:
    x, every, weight = (
        torch.randn(3, 60, generator=draw),
        torch.randn(60, generator=draw),
        torch.randn(20, generator=draw),
    )
    for per_group, given in ((False, weight), (True, every)):
        expected = reference_norm(x.view(3, 3, 20), given.view(-1, 20), None, False, 1e-6).view(3, 60)
        out, more = x.clone(), x.clone()
        norms.group_norm(out, out, given, group=20, eps=1e-6, per_group=per_group)
        norms.group_norm(x, more, given, group=20, eps=1e-6, per_group=per_group, add=True)
        close(out, expected, 1e-6)
        assert torch.equal(more, x + out)


# Rope and the cache


def turned(x: Tensor, cos: Tensor, sin: Tensor, offset: int, interleaved: bool) -> Tensor:
    """x: [R, heads, dim]. cos, sin: [R, half]."""
    half, x = cos.shape[1], x.double().clone()
    part = x[..., offset : offset + 2 * half]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    a, b = a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]
    x[..., offset : offset + 2 * half] = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return x


@pytest.mark.parametrize(
    ("normed", "half", "offset", "interleaved"), [(True, 12, 0, False), (False, 5, 3, True), (False, 0, 0, False)]
)
def test_fused_rope_and_store_are_the_kernels_apart(
    normed: bool, half: int, offset: int, interleaved: bool, draw: torch.Generator
) -> None:
    heads, kv_heads, dim, value_dim = 3, 2, 24, 20
    n, at = heads * dim + kv_heads * (dim + value_dim), chain([2, 0], [3, 9], 2, unused=(3,))
    parts, bias = torch.randn(2, 4, n, generator=draw), torch.randn(n, generator=draw)
    weights = (torch.randn(dim, generator=draw), torch.randn(dim, generator=draw)) if normed else None
    angles = torch.randn(16, half, generator=draw)
    cos, sin = angles.cos(), angles.sin()
    query = nothing(4, heads * dim)
    keys, values = (torch.full((3, kv_heads, 16, d), 7.0).bfloat16() for d in (dim, value_dim))
    plain_keys, plain_values = keys.clone(), values.clone()
    rope.rope_store(
        parts,
        bias,
        query,
        keys,
        values,
        at,
        cos,
        sin,
        heads=heads,
        norms=weights,
        eps=1e-6,
        offset=offset,
        interleaved=interleaved,
    )
    total = parts[0] + parts[1] + bias
    q, k, v = (t.clone() for t in total.split([heads * dim, kv_heads * dim, kv_heads * value_dim], 1))
    for each, weight in zip((q, k), weights or (None, None), strict=True):
        exact = each.view(4, -1, dim)
        exact = exact if weight is None else reference_norm(exact, weight, None, False, 1e-6)
        exact = turned(exact, cos[at.positions.clamp(0)], sin[at.positions.clamp(0)], offset, interleaved)
        if weight is not None:
            norms.group_norm(each, each, weight, group=dim, eps=1e-6)
        if half:
            rope.rope(each, at.positions, cos, sin, dim=dim, offset=offset, interleaved=interleaved)
        close(each[:3], exact.view(4, -1)[:3], 1e-6)
    rope.store(k, v, plain_keys, plain_values, at)
    assert query[3].isnan().all()
    assert torch.equal(values, plain_values)
    if normed and interpreted.DEVICE == "cuda":  # a sum lies in the threads in another way
        close(query[:3], q[:3], 1e-6)
        close(keys, plain_keys, 1e-2)
        return
    assert torch.equal(query[:3], q[:3])
    assert torch.equal(keys, plain_keys)
    for row, (slot, cell) in enumerate([(2, 3), (2, 4), (0, 9)]):
        assert torch.equal(keys[slot, :, cell], k[row].view(kv_heads, dim).bfloat16())
        assert torch.equal(values[slot, :, cell], v[row].view(kv_heads, value_dim).bfloat16())
    assert int((keys != 7).any(-1).sum()) == 3 * kv_heads
    rope.store(k, None, plain_keys, None, replace(at, cells=at.cells + 1))
    assert torch.equal(plain_keys[0, :, 10], keys[0, :, 9])


# Attention


TREES = [[-1, 0, 1, 0, 3], [-1, 0, 0, 1, 3]]


def kind_of(name: str) -> dict[str, Any]:
    """Settings of attention."""
    sinks = torch.linspace(-2, 3, HEADS)
    return {
        "plain": {},
        "window": {"window": 40},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": sinks},
        "all": {"window": 270, "softcap": 5.0, "sinks": sinks},
    }[name]


def cache(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    keys, values = (torch.randn(3, KV_HEADS, CELLS, DIM, generator=draw).bfloat16() for _ in range(2))
    return keys, values[..., :20]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, rows: Rows, apart: bool, splits: int = 3, **settings: object
) -> Tensor:
    out = nothing(len(query), HEADS * values.shape[3], dtype=query.dtype)
    room = nothing(attention.workspace_size(len(query), HEADS, values.shape[3], splits)) if apart else None
    attention.attend(query, keys, values, rows, out, room, heads=HEADS, scale=DIM**-0.5, splits=splits, **settings)
    return out


def expected(query: Tensor, keys: Tensor, values: Tensor, seen: list[int], window=0, softcap=0.0, sinks=None) -> Tensor:
    """keys, values: of one slot. seen: the cells of the row's positions."""
    seen = seen[-window:]
    k, v = (t[:, seen].double().repeat_interleave(HEADS // KV_HEADS, 0) for t in (keys, values))
    scores = torch.einsum("hd,hcd->hc", query.bfloat16().double().view(HEADS, DIM), k) * DIM**-0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], 1)
    return torch.einsum("hc,hcd->hd", scores.softmax(-1)[:, : len(seen)], v).flatten()


@pytest.mark.parametrize(
    ("starts", "kind"),
    [([0, 3], "plain"), ([60, 255], "plain"), ([256, 510], "plain"), ([254, 330], "window"), ([30, 256], "softcap"),
     ([0, 254], "sinks"), ([252, 511], "all")],
)  # fmt: skip
def test_a_node_has_its_bits_in_a_tree_a_chain_a_batch_and_alone(
    starts: list[int], kind: str, draw: torch.Generator
) -> None:
    (keys, values), settings, slots = cache(draw), kind_of(kind), [2, 0]
    query = torch.randn(10, HEADS * DIM, generator=draw)
    rows = tree(slots, starts, TREES)
    apart, looped = (attend(query, keys, values, rows, apart, **settings) for apart in (True, False))
    assert torch.equal(apart, looped)
    with pytest.MonkeyPatch.context() as patch:  # programs may run in any order
        patch.setattr(
            interpreted.interpreter, "range", lambda *n: range(*n)[:: -1 if len(n) == 1 else 1], raising=False
        )
        assert torch.equal(attend(query, keys, values, rows, True, **settings), apart)
    for row, (slot, start) in enumerate(zip([2] * 5 + [0] * 5, [starts[0]] * 5 + [starts[1]] * 5, strict=True)):
        path = path_of(TREES[row // 5], row % 5)
        cells = [*range(start), *(start + n for n in path)]
        close(apart[row], expected(query[row], keys[slot], values[slot], cells, **settings), 1e-2)
        # In plain decoding its path lies in the cells of its positions, and it is alone.
        plain_keys, plain_values = keys.clone(), values.clone()
        for plain, was in ((plain_keys, keys), (plain_values, values)):
            plain[slot, :, : len(cells)] = was[slot, :, cells]
        alone = chain([slot], [len(cells) - 1], 1)
        one = attend(query[row : row + 1], plain_keys, plain_values, alone, row % 2 == 0, 3 + row % 3, **settings)
        assert torch.equal(one[0], apart[row]), (row, kind)


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_a_row_has_its_bits_in_a_prompt(kind: str, draw: torch.Generator) -> None:
    """A chunk of a prompt crosses the border of a split, beside an entry with padding."""
    (keys, values), settings = cache(draw), kind_of(kind)
    query = torch.randn(80, HEADS * DIM, generator=draw)
    prompt = attend(query, keys, values, chain([1, 2], [230, 20], 40, unused=(78, 79)), False, **settings)
    assert prompt[78:].isnan().all()
    for first, nodes in ((0, 1), (24, 4), (39, 1), (50, 3)):
        slot, start = (1, 230 + first) if first < 40 else (2, 20 + first - 40)
        few = attend(query[first : first + nodes], keys, values, chain([slot], [start], nodes), True, **settings)
        assert torch.equal(few, prompt[first : first + nodes])
        halves = attend(
            query[first : first + nodes].bfloat16(), keys, values, chain([slot], [start], nodes), True, **settings
        )
        assert torch.equal(halves, few.bfloat16())
        close(few[0], expected(query[first], keys[slot], values[slot], [*range(start + 1)], **settings), 1e-2)


def test_keys_in_another_order_are_noticed(draw: torch.Generator) -> None:
    """A planted fault: a path is read from its end."""
    keys, values = cache(draw)
    query, rows = torch.randn(5, HEADS * DIM, generator=draw), tree([0], [30], TREES[:1])
    right = attend(query, keys, values, rows, True)
    assert rows.paths is not None
    wrong = rows.paths.clone()
    wrong[4, :3] = wrong[4, :3].flip(0)
    turned_over = attend(query, keys, values, replace(rows, paths=wrong), True)
    assert torch.equal(turned_over[:4], right[:4])
    assert not torch.equal(turned_over[4], right[4])
    close(turned_over[4], right[4], 1e-2)


def test_accepted_cells_move_to_their_places(draw: torch.Generator) -> None:
    cells = torch.randn(4, 3, 2, 40, 12, generator=draw).bfloat16()
    was, rows = cells.clone(), tree([2, 1], [7, 30], TREES)
    path, accepted = whole([0, 2, 3, 4, -1], [0, -1, -1, -1, -1]), whole(3, 0)
    attention.move(cells, rows, path, accepted)
    expected = was.clone()
    expected[:, 2, :, 8:11] = was[:, 2, :, 9:12]
    assert torch.equal(cells, expected)


# Choice


def test_scores_and_noise_have_the_bits_of_the_core(draw: torch.Generator) -> None:
    vocab, seeds, positions = 2 * choice.BLOCK + 300, [5, -7, 2**62 + 5, *range(21)], [0, 1000, 77, *range(9, 30)]
    rows, count = chain([*range(24)], positions, 1), len(seeds)
    best, index = nothing(count, 3), nothing(count, 3, dtype=torch.int32)
    logits, temperatures = (
        torch.randn(count, vocab, generator=draw),
        torch.tensor([1.0, 0.7, 1.3, *[0.9, 0.7, 0.3] * 7]),
    )
    logits[0] = 0  # noise alone
    choice.choose(logits, best, index, rows, torch.tensor(seeds), temperatures)
    noise = Noise(seeds, [9] * count).gumbel(Stream.TOKEN, np.array(positions) + 1, vocab)
    scores = logits.cpu().numpy() / temperatures.cpu().numpy()[:, None] + noise
    for b in range(3):
        block = scores[:, b * choice.BLOCK : (b + 1) * choice.BLOCK]
        assert (best[:, b].cpu().numpy() == block.max(1)).all()
        assert index[:, b].tolist() == (block.argmax(1) + b * choice.BLOCK).tolist()


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_verdicts_are_those_of_match(kind: str, draw: torch.Generator) -> None:
    entries, nodes, vocab = 6, 5, choice.BLOCK + 77
    temperatures, seeds = (
        torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 0.5]),
        torch.tensor([1, 2**62 + 5, -7, 9, 123456789012, 0]),
    )
    starts, parents = [4, 100, 1000, 7, 9, 12], [*TREES, *TREES, *TREES] if kind == "tree" else [[-1, 0, 1, 2, 3]] * 6
    rows = tree([*range(6)], starts, parents) if kind == "tree" else chain([*range(6)], starts, nodes)
    logits = torch.randn(entries * nodes, vocab, generator=draw) * 2
    logits[10, 50], logits[15, 3] = float("nan"), float("inf")
    noise, host, warm = Noise(seeds.tolist(), [0] * entries), logits.cpu().numpy(), temperatures.cpu().numpy()

    class Target:
        def sample_row(self, row: int, node: int, key: tuple[int, int, int, int]) -> int:
            scores, (seed, stream, step, position) = host[row * nodes + node], key
            if warm[row] > 0:
                scores = scores / warm[row]
                scores = scores + Noise([seed], [step]).gumbel(Stream(stream), np.array([position]), vocab)[0]
            token = int(scores.argmax())
            return token if np.isfinite(scores[token]) else -1

        def probs(self, node: np.ndarray) -> np.ndarray:
            raise NotImplementedError

    keys = noise.keys(Stream.TOKEN, [start + 1 for start in starts])
    drawn = [
        [Target().sample_row(e, n, (*key[:3], key[3] + len(path_of(parents[e], n)) - 1)) for n in range(nodes)]
        for e, key in enumerate(keys)
    ]
    tokens = torch.randint(0, vocab, (entries, nodes), generator=draw)
    for e in range(entries):  # some nodes are what is drawn at their parents, and equal siblings are there
        for n in range(1, nodes):
            if (n + e) % 3:
                tokens[e, n] = drawn[e][parents[e][n]]
    rows.tokens = tokens.flatten().int()
    best, index = nothing(entries * nodes, 2), nothing(entries * nodes, 2, dtype=torch.int32)
    path, accepted = nothing(entries, nodes, dtype=torch.int32), nothing(entries, dtype=torch.int32)
    result = nothing(entries, nodes, dtype=torch.int32)
    choice.choose(logits, best, index, rows, seeds, temperatures)
    choice.walk(best, index, rows, path, accepted, result)
    assert result.tolist() == drawn
    verdict = batched.match(
        Target(), Draft(tokens.cpu().numpy(), np.array(parents)), noise, [start + 1 for start in starts]
    )
    assert sum(accepted.tolist()) > 4
    for e, (nodes_kept, token) in enumerate(verdict.host):
        assert path[e].tolist() == [*nodes_kept, *[-1] * (nodes - len(nodes_kept))]
        assert int(accepted[e]) == len(nodes_kept) - 1
        assert int(result[e, nodes_kept[-1]]) == token


def test_padding_is_not_walked() -> None:
    rows = chain([0], [4], 3, unused=(2,))
    rows.tokens = whole(9, 1, 1)
    logits = torch.zeros(3, 8)
    logits[:, 1] = 1
    best, index = torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    path, accepted, drawn = (
        nothing(1, 3, dtype=torch.int32),
        nothing(1, dtype=torch.int32),
        nothing(1, 3, dtype=torch.int32),
    )
    choice.choose(logits, best, index, rows, torch.tensor([3]), torch.zeros(1))
    choice.walk(best, index, rows, path, accepted, drawn)
    assert (path.tolist(), accepted.tolist(), drawn.tolist()) == ([[0, 1, -1]], [1], [[1, 1, -1]])


# Elementwise


def test_elementwise_kernels(draw: torch.Generator) -> None:
    x, y = torch.randn(2, 3, 70, generator=draw) * 4
    scale, shift = torch.randn(2, 70, generator=draw)
    functions = {
        "identity": lambda t: t,
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "relu2": lambda t: t.relu().square(),
        "sigmoid": torch.sigmoid,
        "softplus": torch.nn.functional.softplus,
        "exp": torch.exp,
    }
    for name, function in functions.items():
        out, mapped = nothing(3, 70), nothing(3, 70)
        elementwise.gate(x, y, name, out)
        elementwise.map_rows(x, name, mapped, scale=scale, shift=shift, factor=0.5)
        close(out, function(x.double()) * y, 1e-6)
        close(mapped, 0.5 * function(x.double() * scale + shift), 1e-6)
    table, out = torch.randn(9, 70, generator=draw).bfloat16(), nothing(3, 70)
    elementwise.embed(whole(8, 0, 3), table, out, 1.5)
    assert torch.equal(out, table[[8, 0, 3]].float() * 1.5)
    elementwise.take(x, whole(2, -1, 0), out)
    assert torch.equal(out, torch.stack([x[2], table[0].float() * 1.5, x[0]]))
    with pytest.raises(Exception, match="a function that no kernel has"):
        elementwise.gate(x, None, "erf", out)


def test_why_a_device_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gpu.why_not("cpu") is None  # the interpreter runs them
    monkeypatch.delenv("TRITON_INTERPRET")
    assert gpu.why_not("cpu") == "the device is cpu, and they need a GPU of NVIDIA"
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert gpu.why_not("cpu") == "triton is not installed"


def test_rows_advance_to_the_tokens_that_were_drawn() -> None:
    rows = chain([2, 0, 1], [4, 9, 0], 1, unused=(2,))
    rows.cells = rows.positions.clone()
    choice.advance(rows, whole(7, -1, 5)[:, None])
    assert rows.tokens.tolist() == [7, 0, 0]
    assert rows.positions.tolist() == rows.cells.tolist() == [5, 10, -1]
    assert rows.starts.tolist() == [5, 10, 0]


def test_the_best_tokens_of_an_entry_come_in_order_and_the_first_is_read_next(draw: torch.Generator) -> None:
    vocab, count = 2500, 8
    logits = torch.randn(4, vocab, generator=draw)
    logits[1, [7, 2000, 1200]] = 9.0  # the lowest of equals is the first
    logits[2, 5] = float("nan")
    temperatures, seeds = torch.tensor([0.8, 0.0, 1.0, 0.0]), torch.tensor([3, 4, 5, 6])
    rows = chain([0, 1, 2, 3], [10, 20, 30, 40], 1, unused=(3,))
    rows.cells, rows.last, rows.seeds, rows.temperatures = (
        rows.positions.clone(),
        whole(9, 20, 30, 40),
        seeds,
        temperatures,
    )  # type: ignore
    best, index = nothing(4, choice.blocks_of(vocab)), nothing(4, choice.blocks_of(vocab), dtype=torch.int32)
    ahead, out, keys = whole(100, 0, 0, 0), nothing(2, 4, count, dtype=torch.int32), nothing(2, 4, count)
    choice.choose(logits, best, index, rows, seeds, temperatures, ahead)
    choice.rank(logits, best, index, rows, ahead, out, keys)
    noise = torch.from_numpy(Noise([3], [0]).gumbel(Stream.TOKEN, np.array([111]), vocab)[0])
    for level, row, scores in ((1, 0, logits[0] / 0.8 + noise), (0, 1, logits[1])):
        wanted = torch.argsort(-scores, stable=True)[:count]
        assert out[level, row].tolist() == wanted.tolist()
        assert torch.equal(keys[level, row], scores[wanted])
    assert out[0, 2, 0] == -1
    assert (out[0, 0] < -1).all(), "the level follows from the position"
    assert rows.tokens.tolist() == [int(out[1, 0, 0]), 7, 0, 0]
    assert rows.positions.tolist() == rows.cells.tolist() == [11, 21, 31, -1]
