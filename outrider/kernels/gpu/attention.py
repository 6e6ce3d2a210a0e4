"""Attention of rows over the slot cache, and the cells of a tree that a step keeps.

Positions form splits of SPLIT, and these form blocks of BLOCK, both from position 0 on. Within a split the softmax is online over
blocks; splits are then added in their order. With few rows a program has one split, and a second kernel adds them. With many it
has all of them. The bits are the same.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import RowTensors
from outrider.kernels.gpu.elementwise import tanh
from outrider.kernels.gpu.jit import blocks, jit, power_of_two, settings

BLOCK = 32  # positions that are read at a time
SPLIT = 256  # positions that one program adds up
_LOG2E = 1.4426950408889634
_TAILS = 2  # splits that a path of at most SPLIT nodes reaches


def splits_of(length: int) -> int:
    """Splits of so many positions."""
    return blocks(length, SPLIT)


def workspace_size(rows: int, heads: int, value_dim: int, splits: int) -> int:
    """Numbers of float32 that `attend` needs to have splits apart."""
    return rows * heads * splits * (value_dim + 2)


@jit
def _fold(best, mass, total, top, more, acc):
    """Adds a split to those before it. One that a row does not see changes nothing."""
    new = tl.maximum(best, top)
    safe = tl.where(new == float("-inf"), 0.0, new)
    before, now, seen = tl.exp2(best - safe), tl.exp2(top - safe), top > float("-inf")
    mass = tl.where(seen, mass * before + more * now, mass)
    total = tl.where(seen[:, None], total * before[:, None] + acc * now[:, None], total)
    return new, mass, total


@jit
def _result(best, mass, total, sinks, head, there, LOG2E: tl.constexpr):
    """The weighted mean of the values. sinks: one more score of each head, without a value; or None."""
    if sinks is not None:
        sink = tl.load(sinks + head, there, 0.0) * LOG2E
        new = tl.maximum(best, sink)
        shrink = tl.exp2(best - new)
        mass = mass * shrink + tl.exp2(sink - new)
        total = total * shrink[:, None]
    return total / mass[:, None]


@jit(do_not_specialize=["nodes", "splits", "path_step"])
def _attend(
    query, keys, values, accs, tops, masses, out, slots, starts, positions, paths, sinks, scale, softcap, nodes, heads,
    kv_heads, dim, value_dim, splits, window, query_step, out_step, path_step, k_slot, k_head, k_cell, v_slot, v_head, v_cell,
    ROWS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    TAILS: tl.constexpr, TREE: tl.constexpr, LOOP: tl.constexpr, SOFTCAP: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one entry, and the query heads of one head of keys; M counts them. One split, or with LOOP all of them.

    TREE: splits below the root are read by all rows of a program. Those that reach into the scratch have programs of their own,
    at the end of the grid: a row and a split each, with the cells gathered along the path of the row."""
    groups, each = tl.cdiv(nodes, ROWS), heads // kv_heads
    entry, first = tl.program_id(0) // groups, tl.program_id(0) % groups * ROWS
    h, s, many = tl.program_id(1), tl.program_id(2), ROWS
    slot, start = tl.load(slots + entry).to(tl.int64), tl.load(starts + entry)
    above = 2147483647  # splits from here on are others' task
    if TREE and not LOOP:
        tail = s >= splits
        first += tl.where(tail, (s - splits) // TAILS, 0)
        many = tl.where(tail, 1, ROWS)
        above = tl.where(tail, above, start // SPLIT)
        s = tl.where(tail, start // SPLIT + (s - splits) % TAILS, s)
    m = tl.arange(0, M)
    node, head = first + m // each, h * each + m % each
    row = entry * nodes + node
    position = tl.load(positions + row, (m < many * each) & (node < nodes), -1)
    there = position >= 0
    end = tl.max(position, 0) + 1
    lowest = tl.maximum(tl.min(tl.where(there, position, 2147483647), 0) + 1 - window, 0)  # that a row sees
    s = lowest // SPLIT if LOOP else s
    last = tl.minimum(tl.cdiv(end, SPLIT), above)
    last = last if LOOP else tl.minimum(last, s + 1)
    if (s >= last) | ((s + 1) * SPLIT <= lowest):
        return
    at, of = tl.arange(0, D), tl.arange(0, V)
    q = query + row[:, None].to(tl.int64) * query_step + head[:, None] * dim + at[None, :]
    q = tl.load(q, there[:, None] & (at < dim)[None, :], 0.0).to(tl.bfloat16)
    k_base = keys + slot * k_slot + h.to(tl.int64) * k_head + at[None, :]
    v_base = values + slot * v_slot + h.to(tl.int64) * v_head + of[None, :]
    ones = tl.full((BLOCK, 16), 1.0, tl.float32).to(tl.bfloat16)
    best, mass = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    total = tl.zeros((M, V), tl.float32)
    for part in range(s, last):
        top, acc = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M, V), tl.float32)
        more = tl.zeros((M, 16), tl.float32)  # all columns are alike
        begin = tl.maximum(part * SPLIT, lowest // BLOCK * BLOCK)
        for i in range(begin, tl.minimum(part * SPLIT + SPLIT, end), BLOCK):
            j = i + tl.arange(0, BLOCK)
            cell, read = j, j < end
            if TREE:  # the last of a path is the row's own position
                scratch = read & (j >= start)
                path = paths + (entry * nodes + first) * path_step + j - start
                cell = tl.where(scratch, start + tl.load(path, scratch, 0), j)
            cell = cell.to(tl.int64)[:, None]
            k = tl.load(k_base + cell * k_cell, read[:, None] & (at < dim)[None, :], 0.0)
            v = tl.load(v_base + cell * v_cell, read[:, None] & (of < value_dim)[None, :], 0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            if SOFTCAP:
                scores = tanh(scores) * softcap
            visible = (j[None, :] <= position[:, None]) & (j[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            shrink = tl.exp2(top - safe)[:, None]
            p = tl.exp2(scores - safe[:, None]).to(tl.bfloat16)
            more, acc, top = tl.dot(p, ones, more * shrink), tl.dot(p, v, acc * shrink), new
        best, mass, total = _fold(best, mass, total, top, tl.max(more, 1), acc)
    inside = there[:, None] & (of < value_dim)[None, :]
    if LOOP:
        to = out + row[:, None].to(tl.int64) * out_step + head[:, None] * value_dim + of[None, :]
        tl.store(to, _result(best, mass, total, sinks, head, there, LOG2E), inside)
    else:
        to = (row.to(tl.int64) * heads + head) * splits + s
        tl.store(tops + to, best, there)
        tl.store(masses + to, mass, there)
        tl.store(accs + to[:, None] * value_dim + of[None, :], total, inside)


@jit(do_not_specialize=["splits"])
def _combine(
    accs, tops, masses, out, positions, sinks, heads, value_dim, splits, window, out_step, V: tl.constexpr, SPLIT: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """The splits of a row and a head, in order."""
    row, head, of = tl.program_id(0), tl.program_id(1) + tl.arange(0, 1), tl.arange(0, V)
    position, inside = tl.load(positions + row), (of < value_dim)[None, :]
    if position < 0:
        return
    here = (row.to(tl.int64) * heads + head) * splits
    best, mass = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    total = tl.zeros((1, V), tl.float32)
    for s in tl.range(tl.maximum(position + 1 - window, 0) // SPLIT, position // SPLIT + 1, num_stages=4):
        acc = tl.load(accs + (here + s)[:, None] * value_dim + of[None, :], inside, 0.0)
        best, mass, total = _fold(best, mass, total, tl.load(tops + here + s), tl.load(masses + here + s), acc)
    to = out + row.to(tl.int64) * out_step + head[:, None] * value_dim + of[None, :]
    tl.store(to, _result(best, mass, total, sinks, head, head >= 0, LOG2E), inside)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, rows: RowTensors, out: Tensor, workspace: Tensor | None, *, heads: int,
    scale: float, splits: int, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """out = softmax(scale * query @ keys) @ values, of the positions that a row sees.

    Two kernels with a workspace, for few rows; one without it, for many, of whose programs each reads all splits.

    Args:
        query: float32 or bfloat16 [R, heads * dim].
        keys: bfloat16 [slot, kv_head, cell, dim] of one layer, which has the rows' own.
        values: bfloat16 [slot, kv_head, cell, value_dim]; where keys are values, a view of them.
        out: [R, heads * value_dim].
        workspace: float32 of `workspace_size`; None: splits are added in a loop.
        splits: of the longest text that the grid has programs for, `splits_of`. No bit depends on it.
        window: positions that a row sees, its own is the last one; 0: all.
        softcap: of the scores; 0: none.
        sinks: float32 [heads].
    """
    (count, kv_heads, dim), value_dim, entries = (
        (len(query), keys.shape[1], keys.shape[3]),
        values.shape[3],
        len(rows.slots),
    )
    nodes, each, tree, loop = count // entries, heads // kv_heads, rows.paths is not None, workspace is None
    d, v, window = max(16, power_of_two(dim)), max(16, power_of_two(value_dim)), window or 1 << 30
    most = max(1, max(16, min(64, (4096 if loop else 8192) // max(d, v))) // each)  # rows of a program: a power of two,
    together = 1 if tree and loop else min(power_of_two(nodes), 1 << most.bit_length() - 1)  # so that few are compiled
    m, size, path_step = max(16, power_of_two(together * each)), count * heads * splits, 0
    accs = tops = masses = None
    if workspace is not None:
        accs, tops, masses = workspace[: size * (value_dim + 2)].split([size * value_dim, size, size])
    if rows.paths is not None:
        path_step = rows.paths.stride(0)
    _attend[entries * blocks(nodes, together), kv_heads, 1 if loop else splits + _TAILS * together * tree](
        query, keys, values, accs, tops, masses, out, rows.slots, rows.starts, rows.positions, rows.paths, sinks,
        scale / softcap if softcap else scale * _LOG2E, softcap * _LOG2E, nodes, heads, kv_heads, dim, value_dim, splits, window,
        query.stride(0), out.stride(0), path_step, *keys.stride()[:3], *values.stride()[:3], ROWS=together, M=m, D=d, V=v,
        BLOCK=BLOCK, SPLIT=SPLIT, TAILS=_TAILS, TREE=tree, LOOP=loop, SOFTCAP=softcap > 0, LOG2E=_LOG2E,
        **settings(8 if m * v >= 8192 else 4, 3 if d <= 256 else 2),
    )  # fmt: skip
    if not loop:
        _combine[count, heads](
            accs, tops, masses, out, rows.positions, sinks, heads, value_dim, splits, window, out.stride(0), V=v, SPLIT=SPLIT,
            LOG2E=_LOG2E, **settings(max(1, v // 128)),
        )  # fmt: skip


@jit
def _move(
    cells, slots, starts, path, accepted, nodes, dim, layer_step, slot_step, head_step, cell_step, D: tl.constexpr
):
    entry, head, layer, at = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.arange(0, D)
    slot, start = tl.load(slots + entry).to(tl.int64), tl.load(starts + entry).to(tl.int64)
    base = (
        cells
        + layer.to(tl.int64) * layer_step
        + slot * slot_step
        + head.to(tl.int64) * head_step
        + start * cell_step
        + at
    )
    for i in range(1, tl.load(accepted + entry) + 1):  # no cell is read after it was written: a path only rises
        node = tl.load(path + entry * nodes + i)
        if node != i:
            tl.store(base + i * cell_step, tl.load(base + node * cell_step, at < dim, 0.0), at < dim)


def move(cells: Tensor, rows: RowTensors, path: Tensor, accepted: Tensor) -> None:
    """Copy the cells of accepted nodes to their committed places. path, accepted: of `choice.walk`. cells: bfloat16 [layer, slot,
    kv_head, cell, dim], of keys, of values or of both."""
    dim, grid = cells.shape[4], (len(rows.slots), cells.shape[2], cells.shape[0])
    _move[grid](
        cells, rows.slots, rows.starts, path, accepted, path.shape[1], dim, *cells.stride()[:4], D=power_of_two(dim),
        **settings(1),
    )  # fmt: skip
