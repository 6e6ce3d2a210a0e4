"""Kernels without sums: embedding, activations, maps, and rows that are gathered. Numbers are float32 [R, width]."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.jit import blocks, jit, settings

BLOCK = 1024  # numbers of a program


@jit
def tanh(x):
    """Within 1e-7, of any float32."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0)


@jit
def function_of(x, FUNCTION: tl.constexpr):
    """An activation or a map, by its name."""
    if FUNCTION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif FUNCTION == "gelu_tanh":
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif FUNCTION == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif FUNCTION == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif FUNCTION == "softplus":
        x = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    elif FUNCTION == "exp":
        x = tl.exp(x)
    else:
        tl.static_assert(FUNCTION == "identity", "a function that no kernel has")
    return x


@jit
def _take(x, index, out, width, x_step, out_step, factor, W: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W)
    source = tl.load(index + row).to(tl.int64)
    inside = (at < width) & (source >= 0)
    tl.store(out + row * out_step + at, tl.load(x + source * x_step + at, inside, 0.0).to(tl.float32) * factor, inside)


def take(x: Tensor, index: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """out = factor * x[index]. index: int32 [R]; where it is -1 nothing is written. x: float32 or bfloat16 [any, width]."""
    grid = len(index), blocks(x.shape[1], BLOCK)
    _take[grid](x, index, out, x.shape[1], x.stride(0), out.stride(0), factor, W=BLOCK, **settings())


def embed(tokens: Tensor, table: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """out = factor * table[tokens]. tokens: int32 [R]. table: float32 or bfloat16 [vocab, width]."""
    take(table, tokens, out, factor)


@jit
def _map(x, other, scale, shift, out, width, x_step, y_step, out_step, factor, W: tl.constexpr, FUNCTION: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W)
    inside = at < width
    value = tl.load(x + row * x_step + at, inside, 0.0)
    if scale is not None:
        value = value * tl.load(scale + at, inside, 0.0)
    if shift is not None:
        value = value + tl.load(shift + at, inside, 0.0)
    value = function_of(value, FUNCTION)
    if other is not None:
        value = value * tl.load(other + row * y_step + at, inside, 0.0)
    tl.store(out + row * out_step + at, value * factor, inside)


def map_rows(
    x: Tensor, function: str, out: Tensor, *, scale: Tensor | None = None, shift: Tensor | None = None,
    factor: float = 1.0, other: Tensor | None = None,
) -> None:  # fmt: skip
    """out = factor * function(x * scale + shift) * other. scale, shift: float32 [width]. out may be x or other."""
    grid, width, y_step = (len(x), blocks(x.shape[1], BLOCK)), x.shape[1], 0 if other is None else other.stride(0)
    steps = x.stride(0), y_step, out.stride(0)
    _map[grid](x, other, scale, shift, out, width, *steps, factor, W=BLOCK, FUNCTION=function, **settings())


def gate(a: Tensor, b: Tensor | None, function: str, out: Tensor) -> None:
    """out = function(a) * b. out may be one of them."""
    map_rows(a, function, out, other=b)
