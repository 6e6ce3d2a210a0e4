"""Products with a matrix of weights, whose order of sums follows from the matrix alone."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.coded import Coded
from outrider.kernels.gpu.elementwise import function_of, tanh
from outrider.kernels.gpu.jit import blocks, jit, settings

_PROGRAMS = 396  # that few rows may have: three on each of 132 multiprocessors


def split(n: int, k: int) -> tuple[int, int]:
    """(parts, numbers of a part) of the sums of a matrix [n, k]: as many parts as keep the multiprocessors busy with few rows."""
    size = blocks(blocks(k, max(1, min(8, _PROGRAMS // blocks(n, 32), k // 512))), 128) * 128
    return blocks(k, size), size


@jit
def _weights(at, pairs, i, inside, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """bfloat16 [BN, BK] of these addresses, from place i on: as stored, or made of codes and pairs as `Coded` says."""
    FEW: tl.constexpr = 2 if at.dtype.element_ty == tl.uint8 else 1  # pyright: ignore[reportAssignmentType] # numbers of a stored one
    if pairs is None:
        values = tl.load(at + i, inside, 0.0)
    else:  # rows are filled up
        values = tl.load(at + i // FEW)
        if FEW == 2:
            values = tl.interleave(values & 15, values >> 4)
        pair = tl.load(pairs + i // GROUP)[:, :, None]
        scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        values = tl.fma(tl.reshape(values, (BN, BK // GROUP, GROUP)).to(tl.float32), scale, minimum)  # an exact product
        values = tl.reshape(values.to(tl.bfloat16), (BN, BK))
    return values


@jit(do_not_specialize=["rows"])
def _linear(
    x, weight, pairs, bias, out, rows, n, k, size, x_step, w_step, p_step, out_step, part_step, factor, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, LOOP: tl.constexpr, GATE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """BM rows times BN rows of the weights: one part, or with LOOP all of them in order. GATE: half of these are of the gate,
    half of up, which lie n rows below, and a program has BN / 2 columns of `out`."""
    OUT: tl.constexpr = BN if GATE == "" else BN // 2
    FEW: tl.constexpr = 2 if weight.dtype.element_ty == tl.uint8 else 1  # pyright: ignore[reportAssignmentType]
    row, at, of = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BN)
    column = tl.program_id(1) * OUT + of % OUT
    line, there = (
        tl.minimum(column, n - 1) + of // OUT * n,
        (row < rows)[:, None],
    )  # past n they are read, and not written
    xs = x + row[:, None] * x_step + at[None, :]
    ws = weight + line[:, None].to(tl.int64) * w_step + tl.arange(0, BK // FEW)[None, :]
    ps = pairs
    if pairs is not None:
        ps = pairs + line[:, None] * p_step + tl.arange(0, BK // GROUP)[None, :]
    first = 0 if LOOP else tl.program_id(2)
    last = tl.cdiv(k, size) if LOOP else first + 1
    total = tl.zeros((BM, BN), tl.float32)
    for part in range(first, last):
        acc = tl.zeros((BM, BN), tl.float32)
        for i in range(part * size, tl.minimum(part * size + size, k), BK):
            inside = (at < k - i)[None, :]
            a = tl.load(xs + i, there & inside, 0.0).to(tl.bfloat16)
            acc = tl.dot(a, tl.trans(_weights(ws, ps, i, inside, BN, BK, GROUP)), acc)
        total = tl.where(part == first, acc, total + acc)
    if bias is not None:
        total += tl.load(bias + line)[None, :]
    if GATE != "":
        gate, up = tl.split(tl.permute(tl.reshape(total, (BM, 2, OUT)), (0, 2, 1)))
        total = function_of(gate, GATE) * up
        column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    total *= factor
    if SOFTCAP:
        total = softcap * tanh(total / softcap)
    if not LOOP:
        out += tl.program_id(2).to(tl.int64) * part_step
    tl.store(out + row[:, None].to(tl.int64) * out_step + column[None, :], total, there & (column < n)[None, :])


def linear(
    x: Tensor, weight: Tensor | Coded, out: Tensor, bias: Tensor | None = None, *, factor: float = 1.0, softcap: float = 0.0,
    gate: str = "",
) -> None:  # fmt: skip
    """The parts of x @ weight.T, to be added in order; with one part all of it: softcap(factor * (sum + bias)).

    Args:
        x: float32 or bfloat16 [R, k]; it is rounded to bfloat16.
        weight: [n, k], bfloat16 or coded.
        out: float32 [P, R, n], where P is the first of `split`, or 1.
        bias: float32 [n]; like all that follow, only where P is 1.
        gate: as in `gated`, which is this with another shape of weight and bias.
    """
    (rows, k), (parts, size), n, loop = x.shape, split(*weight.shape), out.shape[2], len(out) == 1
    if not loop and (len(out) != parts or bias is not None or factor != 1 or softcap):
        raise ValueError(f"{len(out)} parts, where {parts} are to be added before anything else, or one")
    bm, bk, warps, stages = (16, 128, 4, 5) if rows <= 16 else (32, 128, 4, 4) if rows <= 32 else (64, 64, 8, 4)
    bn = 64 if gate or rows > 16 else 32  # so that the rows of x are not more bytes than those of the weights
    stored, pairs, group = (*weight[:2], weight.group) if isinstance(weight, Coded) else (weight, None, 1)
    steps = x.stride(0), stored.stride(0), 0 if pairs is None else pairs.stride(0), out.stride(1), out.stride(0)
    _linear[blocks(rows, bm), blocks(n, bn // 2 if gate else bn), len(out)](
        x, stored, pairs, bias, out, rows, n, k, size, *steps, factor, softcap, BM=bm, BN=bn, BK=bk, GROUP=group, LOOP=loop,
        GATE=gate, SOFTCAP=softcap > 0, **settings(warps, stages - (gate != "")),
    )  # fmt: skip


def gated(x: Tensor, weight: Tensor | Coded, bias: Tensor | None, out: Tensor, function: str) -> None:
    """out = function(gate) * up. weight: [2 * m, k], gate before up. bias: float32 [2 * m]. out: float32 [R, m].

    The bits are those of `linear`, its parts added in order, and `elementwise.gate`."""
    linear(x, weight, out[None], bias, gate=function)
