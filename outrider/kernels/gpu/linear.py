"""Products with a matrix of weights, whose order of sums follows from the matrix alone."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.elementwise import function_of, tanh
from outrider.kernels.gpu.jit import blocks, jit, settings

_PROGRAMS = 396  # that few rows may have: three on each of 132 multiprocessors


def split(n: int, k: int) -> tuple[int, int]:
    """(parts, numbers of a part) of the sums of a matrix [n, k]: as many parts as keep the multiprocessors busy with few rows."""
    size = blocks(blocks(k, max(1, min(8, _PROGRAMS // blocks(n, 32), k // 512))), 128) * 128
    return blocks(k, size), size


@jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows, n, k, size, x_step, out_step, part_step, factor, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LOOP: tl.constexpr, GATE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """BM rows times BN rows of the weights: one part, or with LOOP all of them in order. GATE: of gate and up, n columns each."""
    row, column, at = (
        tl.program_id(0) * BM + tl.arange(0, BM),
        tl.program_id(1) * BN + tl.arange(0, BN),
        tl.arange(0, BK),
    )
    there, wide = (row < rows)[:, None], (column < n)[:, None]
    xs = x + row[:, None] * x_step + at[None, :]
    ws = weight + column[:, None].to(tl.int64) * k + at[None, :]
    ups = ws + tl.cast(n, tl.int64) * k
    first = 0 if LOOP else tl.program_id(2)
    last = tl.cdiv(k, size) if LOOP else first + 1
    total = tl.zeros((BM, BN), tl.float32)
    up_total = total
    for part in range(first, last):
        acc = tl.zeros((BM, BN), tl.float32)
        up = acc
        for i in range(part * size, tl.minimum(part * size + size, k), BK):
            inside = (at < k - i)[None, :]
            a = tl.load(xs + i, there & inside, 0.0).to(tl.bfloat16)
            acc = tl.dot(a, tl.trans(tl.load(ws + i, wide & inside, 0.0)), acc)
            if GATE != "":
                up = tl.dot(a, tl.trans(tl.load(ups + i, wide & inside, 0.0)), up)
        total = tl.where(part == first, acc, total + acc)
        if GATE != "":
            up_total = tl.where(part == first, up, up_total + up)
    if bias is not None:
        total += tl.load(bias + column, column < n, 0.0)[None, :]
        if GATE != "":
            up_total += tl.load(bias + n + column, column < n, 0.0)[None, :]
    if GATE != "":
        total = function_of(total, GATE) * up_total
    total *= factor
    if SOFTCAP:
        total = softcap * tanh(total / softcap)
    if not LOOP:
        out += tl.program_id(2).to(tl.int64) * part_step
    tl.store(out + row[:, None].to(tl.int64) * out_step + column[None, :], total, there & (column < n)[None, :])


def linear(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, factor: float = 1.0, softcap: float = 0.0,
    gate: str = "",
) -> None:  # fmt: skip
    """The parts of x @ weight.T, to be added in order; with one part all of it: softcap(factor * (sum + bias)).

    Args:
        x: float32 or bfloat16 [R, k]; it is rounded to bfloat16.
        weight: bfloat16 [n, k].
        out: float32 [P, R, n], where P is the first of `split`, or 1.
        bias: float32 [n]; like all that follow, only where P is 1.
        gate: as in `gated`, which is this with another shape of weight and bias.
    """
    (rows, k), (parts, size), n, loop = x.shape, split(*weight.shape), out.shape[2], len(out) == 1
    if not loop and (len(out) != parts or bias is not None or factor != 1 or softcap):
        raise ValueError(f"{len(out)} parts, where {parts} are to be added before anything else, or one")
    bm, bk, warps, stages = (16, 128, 4, 5) if rows <= 16 else (32, 128, 4, 4) if rows <= 32 else (64, 64, 8, 4)
    bn = 32 if gate or rows <= 16 else 64  # so that the rows of x are not more bytes than those of the weights
    if gate:  # two products of 32 columns: more warps would compute some of them twice, and longer steps would spill
        bk, warps = {16: (128, 4), 32: (128, 2), 64: (32, 4)}[bm]
    _linear[blocks(rows, bm), blocks(n, bn), len(out)](
        x, weight, bias, out, rows, n, k, size, x.stride(0), out.stride(1), out.stride(0), factor, softcap, BM=bm, BN=bn, BK=bk,
        LOOP=loop, GATE=gate, SOFTCAP=softcap > 0, **settings(warps, stages - (gate != "")),
    )  # fmt: skip


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, function: str) -> None:
    """out = function(gate) * up. weight: bfloat16 [2 * m, k], gate before up. bias: float32 [2 * m]. out: float32 [R, m].

    The bits are those of `linear`, its parts added in order, and `elementwise.gate`."""
    linear(x, weight, out[None], bias, gate=function)
