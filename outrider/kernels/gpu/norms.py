"""Norms, and the sums of parts and residuals before them. One program has a row, or a group of its numbers."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.jit import jit, power_of_two, settings


@jit
def summed(parts, row, at, inside, rows, row_step, PARTS: tl.constexpr):
    """The parts that a `linear` left of a row, added in order: float32 like `at`. Parts of `rows` rows lie one after another.

    So what triton knows of addresses, which sets how a sum lies in the threads, follows from the width alone."""
    total = tl.load(parts + row.to(tl.int64) * row_step + at, inside, 0.0)
    for p in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.load(parts + (row + tl.cast(rows, tl.int64) * p) * row_step + at, inside, 0.0)
    return total


def row_step(parts: Tensor) -> int:
    """Numbers from one row to the next. Raises ValueError unless parts [P, R, width] lie one after another."""
    if len(parts) > 1 and parts.stride(0) != parts.shape[1] * parts.stride(1):
        raise ValueError(f"parts {[*parts.shape]} with the strides {parts.stride()} do not lie one after another")
    return parts.stride(1)


@jit
def _normed(x, weight, shift, at, inside, width, eps, LAYER: tl.constexpr):
    """norm(x) * weight + shift of one vector, with zeros where it is not inside. LAYER: a layer norm, else root mean square."""
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if weight is not None:
        x = x * tl.load(weight + at, inside, 0.0)
    if shift is not None:
        x = x + tl.load(shift + at, inside, 0.0)
    return x


@jit(do_not_specialize=["rows"])
def _sum_norm(
    parts, bias, stream, out, weight, shift, post_weight, post_shift, rows, width, parts_step, stream_step, out_step, factor,
    eps, post_eps, W: tl.constexpr, PARTS: tl.constexpr, POST: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr,
    PER_GROUP: tl.constexpr,
):  # fmt: skip
    """One group of `width` numbers of a row."""
    row, inside = tl.program_id(0).to(tl.int64), tl.arange(0, W) < width
    at = tl.program_id(1) * width + tl.arange(0, W)
    own = at if PER_GROUP else tl.arange(0, W)
    if PARTS:
        total = summed(parts, row, at, inside, rows, parts_step, PARTS)
        if bias is not None:
            total += tl.load(bias + at, inside, 0.0)
        total *= factor
        if POST:
            total = _normed(total, post_weight, post_shift, own, inside, width, post_eps, LAYER)
        if ADD:
            total = tl.load(stream + row * stream_step + at, inside, 0.0) + total
        if stream is not None:
            tl.store(stream + row * stream_step + at, total, inside)
    else:
        total = tl.load(stream + row * stream_step + at, inside, 0.0)
    if out is not None:
        tl.store(out + row * out_step + at, _normed(total, weight, shift, own, inside, width, eps, LAYER), inside)


def sum_norm(
    parts: Tensor | None, bias: Tensor | None, stream: Tensor | None, out: Tensor | None, *, weight: Tensor | None = None,
    shift: Tensor | None = None, eps: float = 0.0, layer_norm: bool = False, factor: float = 1.0,
    post: tuple[Tensor | None, Tensor | None, float] | None = None, add: bool = True, group: int = 0, per_group: bool = False,
) -> None:  # fmt: skip
    """s = factor * (parts in order + bias); stream += s; out = norm(stream) * weight + shift.

    Args:
        parts: float32 [P, R, width], one part after another; None: the stream is only read.
        bias: float32 [width].
        stream: float32 [R, width]; None: out is of s.
        out: [R, width]; None: there is no norm.
        weight: float32 [width], so is shift.
        post: weight, shift and eps of another norm, of s before it is added.
        add: to the stream; else the stream is set to s.
        group: numbers that are normed together; 0: all. Weights are [group], or with `per_group` [width].
    """
    like = stream if parts is None else parts[0]
    assert like is not None
    post_weight, post_shift, post_eps = post or (None, None, 0.0)
    group = group or like.shape[1]
    block, count = power_of_two(group), 0 if parts is None else len(parts)
    steps = (0 if parts is None else row_step(parts)), *(0 if t is None else t.stride(0) for t in (stream, out))
    _sum_norm[len(like), like.shape[1] // group](
        parts, bias, stream, out, weight, shift, post_weight, post_shift, len(like), group, *steps, factor, eps, post_eps,
        W=block, PARTS=count, POST=post is not None, ADD=add and stream is not None, LAYER=layer_norm, PER_GROUP=per_group,
        **settings(max(1, min(16, block // 512))),  # by the width alone: it sets the order of a sum
    )  # fmt: skip


def group_norm(
    x: Tensor, out: Tensor, weight: Tensor | None = None, shift: Tensor | None = None, *, group: int, eps: float,
    layer_norm: bool = False, per_group: bool = False, add: bool = False,
) -> None:  # fmt: skip
    """out = norm(x) * weight + shift of each group of numbers, or is more by it. x, out: float32 [R, width]; may be the same."""
    kind = {"layer_norm": layer_norm, "group": group, "per_group": per_group}
    if add:
        sum_norm(x[None], None, out, None, post=(weight, shift, eps), **kind)
    else:
        sum_norm(x[None], None, None, out, weight=weight, shift=shift, eps=eps, **kind)
