"""Rotary embeddings, and keys and values into the cache."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import RowTensors
from outrider.kernels.gpu.jit import jit, power_of_two, settings
from outrider.kernels.gpu.norms import row_step, summed


@jit
def _cell(slots, cells, row, head, nodes, slot_step, head_step, cell_step):
    """Where the cell of a row begins, in the keys or values of a layer."""
    slot, cell = tl.load(slots + row // nodes).to(tl.int64), tl.load(cells + row).to(tl.int64)
    return slot * slot_step + head * head_step + cell * cell_step


@jit(do_not_specialize=["rows", "nodes"])
def _rope_store(
    x, bias, v, v_bias, query, keys, values, positions, cells, slots, cosines, sines, q_norm, k_norm, rows, nodes, heads,
    kv_heads, dim, value_dim, half, offset, eps, x_step, v_step, query_step, k_slot, k_head, k_cell, v_slot, v_head, v_cell,
    D: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One head of a row. x has the parts of queries, then of keys; v those of values."""
    row, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    position = tl.load(positions + row)
    if position < 0:
        return
    if head < heads + kv_heads:
        here, inside, j = head * dim, at < dim, at - offset
        turned = (j >= 0) & (j < 2 * half)
        if INTERLEAVED:
            angle, lower = j // 2, j % 2 == 0
            other = tl.where(lower, at + 1, at - 1)
        else:
            lower = j < half
            angle, other = tl.where(lower, j, j - half), tl.where(lower, at + half, at - half)
        a = summed(x, row, here + at, inside, rows, x_step, PARTS)
        b = summed(x, row, here + other, turned, rows, x_step, PARTS)  # the other one of a pair
        if bias is not None:
            a += tl.load(bias + here + at, inside, 0.0)
            b += tl.load(bias + here + other, turned, 0.0)
        if q_norm is not None:
            root, weight = tl.rsqrt(tl.sum(a * a, 0) / dim + eps), q_norm
            if head >= heads:
                weight = k_norm
            a = a * root * tl.load(weight + at, inside, 0.0)
            b = b * root * tl.load(weight + other, turned, 0.0)
        cosine = tl.load(cosines + position * half + angle, turned, 1.0)
        sine = tl.load(sines + position * half + angle, turned, 0.0)
        a = tl.where(turned, a * cosine + tl.where(lower, -b, b) * sine, a)
        if head < heads:
            tl.debug_barrier()  # where it is in place, all numbers were read
            tl.store(query + row.to(tl.int64) * query_step + here + at, a, inside)
        elif keys is not None:
            to = _cell(slots, cells, row, head - heads, nodes, k_slot, k_head, k_cell)
            tl.store(keys + to + at, a.to(tl.bfloat16), inside)
    elif v is not None:
        head, inside = head - heads - kv_heads, at < value_dim
        a = summed(v, row, head * value_dim + at, inside, rows, v_step, PARTS)
        if v_bias is not None:
            a += tl.load(v_bias + head * value_dim + at, inside, 0.0)
        to = _cell(slots, cells, row, head, nodes, v_slot, v_head, v_cell)
        tl.store(values + to + at, a.to(tl.bfloat16), inside)


def _launch(
    x: Tensor, v: Tensor | None, query: Tensor, keys: Tensor | None, values: Tensor | None, positions: Tensor,
    rows: RowTensors | None, angles: tuple[Tensor, Tensor] | None, heads: int, dim: int,
    biases: tuple[Tensor, Tensor] | None = None, norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0,
    offset: int = 0, interleaved: bool = False,
) -> None:  # fmt: skip
    """x, v: parts [P, R, numbers]. What is None is not there."""
    kv_heads, value_dim = (0 if keys is None else keys.shape[1]), (0 if values is None else values.shape[3])
    k_steps, v_steps = ((0, 0, 0) if t is None else t.stride()[:3] for t in (keys, values))
    cells, slots, nodes = (None, None, 1) if rows is None else (rows.cells, rows.slots, x.shape[1] // len(rows.slots))
    cosines, sines = angles or (positions, positions)  # without angles none is read
    half, block = 0 if angles is None else cosines.shape[1], power_of_two(max(dim, value_dim))
    bias, v_bias = biases or (None, None)
    _rope_store[x.shape[1], heads + kv_heads * (1 if v is None else 2)](
        x, bias, v, v_bias, query, keys, values, positions, cells, slots, cosines, sines, *(norms or (None, None)), x.shape[1],
        nodes, heads, kv_heads, dim, value_dim, half, offset, eps, row_step(x), 0 if v is None else v.stride(1), query.stride(0),
        *k_steps, *v_steps, D=block, PARTS=len(x), INTERLEAVED=interleaved, **settings(max(1, block // 128)),
    )  # fmt: skip


def rope_store(
    parts: Tensor, bias: Tensor | None, query: Tensor, keys: Tensor, values: Tensor, rows: RowTensors, cosines: Tensor,
    sines: Tensor, *, heads: int, norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, offset: int = 0,
    interleaved: bool = False,
) -> None:  # fmt: skip
    """Parts of queries, keys and values are added, normed by head and rotated. Queries go to `query`, the others to their cells.

    Args:
        parts: float32 [P, R, n], one part after another: n numbers of all heads of queries, then keys, then values.
        bias: float32 [n].
        query: float32 or bfloat16 [R, heads * dim].
        keys: bfloat16 [slot, kv_head, cell, dim] of one layer.
        values: bfloat16 [slot, kv_head, cell, value_dim].
        cosines: float32 [length, half], so are the sines. Without numbers nothing is rotated.
        heads: of queries.
        norms: weights [dim] of the norms of a head of queries and of keys.
        eps: of these norms.
        offset: where the rotated numbers of a head begin.
        interleaved: the two numbers of a pair are neighbours.
    """
    border = (heads + keys.shape[1]) * keys.shape[3]
    biases = None if bias is None else (bias[:border], bias[border:])
    x, v, angles = parts[..., :border], parts[..., border:], (cosines, sines)
    kind = biases, norms, eps, offset, interleaved
    _launch(x, v, query, keys, values, rows.positions, rows, angles, heads, keys.shape[3], *kind)


def rope(
    x: Tensor, positions: Tensor, cosines: Tensor, sines: Tensor, *, dim: int, offset: int = 0, interleaved: bool = False
) -> None:  # fmt: skip
    """Rotate the heads of x in place: float32 [R, heads * dim]. The rest is as in `rope_store`."""
    kind = {"offset": offset, "interleaved": interleaved}
    _launch(x[None], None, x, None, None, positions, None, (cosines, sines), x.shape[1] // dim, dim, **kind)


def store(key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, rows: RowTensors) -> None:
    """Keys and values into their cells. key: float32 [R, kv_heads * dim]. value: None where the cache has keys alone."""
    v = None if value is None else value[None]
    _launch(key[None], v, key, keys, values, rows.positions, rows, None, 0, keys.shape[3])
