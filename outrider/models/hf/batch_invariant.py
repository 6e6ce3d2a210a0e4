"""Replaces torch operations whose result for a row depends on how many rows share the call.

The modelling code of transformers has two kinds of them. Some activations compute the last few elements of a tensor with a
scalar function and the others with a vector function. The two round differently, and the number of rows decides which
elements come last. Also, a matrix product with a bare parameter (the router of a mixture) sums in another order for one
row than for many. The mode below replaces these calls. It costs a little on every call, so a model runs under it only if
a first forward shows that it must (`needed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outrider.models.hf.linear import PackedLinear

_WIDE = 64  # elements; a multiple of what one pass of any vector loop takes
_EASY_POWERS = (-2, -1, -0.5, 0.5, 1, 2, 3)  # made of products, quotients and roots, which round alike everywhere


class BatchInvariantOps(TorchFunctionMode):
    """A context in which no row of the operations in `_SPECIAL` depends on its neighbours (on one thread).

    needed: calls so far that would have depended on them.
    sdpa: called in place of torch's scaled_dot_product_attention. None: torch's own.
    """

    def __init__(self, sdpa: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.needed = 0
        self.sdpa = sdpa
        self._packed: dict[int, tuple[Tensor, PackedLinear]] = {}  # by id; the weight is held, so the id stays its own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        if special is None:
            return func(*args, **(kwargs or {}))
        return special(self, func, *args, **(kwargs or {}))

    def packed(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        entry = self._packed.get(id(weight))
        if entry is None:
            entry = self._packed[id(weight)] = (weight, PackedLinear(weight.float(), bias, "float32"))
        return entry[1]


def _elementwise(mode: BatchInvariantOps, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("inplace") or "out" in kwargs or not x.is_floating_point() or not x.dim():
        return func(x, *args, **kwargs)
    if x.is_contiguous() and not x.numel() % _WIDE:
        return func(x, *args, **kwargs)
    mode.needed += 1
    n = x.numel()
    padded = F.pad(x.reshape(-1), (0, -n % _WIDE))
    return func(padded, *args, **kwargs)[:n].view(x.shape)


def _power(
    mode: BatchInvariantOps, func: Callable[..., Any], x: Any, exponent: Any, *args: Any, **kwargs: Any
) -> Tensor:
    if not isinstance(x, Tensor) or isinstance(exponent, Tensor) or exponent in _EASY_POWERS:
        return func(x, exponent, *args, **kwargs)
    return _elementwise(mode, func, x, exponent, *args, **kwargs)


def _reduce(mode: BatchInvariantOps, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if x.dim() > 1 and x.shape[-1] > 1 and not x.is_contiguous() and x.stride(-1) != 1:
        mode.needed += 1
        x = x.contiguous()
    return func(x, *args, **kwargs)


def _linear(
    mode: BatchInvariantOps, func: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    mode.needed += 1
    if isinstance(weight, nn.Parameter):  # it stays the same object from call to call
        return mode.packed(weight, bias)(x)
    flat = x.reshape(-1, x.shape[-1])
    return torch.cat([func(row, weight, bias) for row in flat.split(1)]).view(*x.shape[:-1], len(weight))


def _matmul(mode: BatchInvariantOps, func: Callable[..., Any], x: Any, other: Any, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(x, nn.Parameter) and x.dim() == 2 and isinstance(other, Tensor) and other.dim() == 3:
        mode.needed += 1
        return mode.packed(x, None)(other.transpose(1, 2)).transpose(1, 2)
    if not isinstance(other, Tensor) or other.dim() != 2 or other.shape[0] == 1 or args or kwargs or x.dim() < 2:
        return func(x, other, *args, **kwargs)
    mode.needed += 1
    flat = x.reshape(-1, x.shape[-1])
    return torch.cat([func(row, other) for row in flat.split(1)]).view(*x.shape[:-1], other.shape[1])


def _conv1d(
    mode: BatchInvariantOps, func: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """A depthwise convolution as a sum over the kernel, in the kernel's order."""
    wide = {**dict(zip(("stride", "padding", "dilation", "groups"), args, strict=False)), **kwargs}
    padding, groups = wide.pop("padding", 0), wide.pop("groups", 1)
    depthwise = weight.shape[1] == 1 and groups == len(weight) and x.dim() == 3 and isinstance(padding, int | tuple)
    if not depthwise or any(value not in (1, (1,)) for value in wide.values()):
        return func(x, weight, bias, *args, **kwargs)
    mode.needed += 1
    sides = padding if isinstance(padding, int) else padding[0]
    x = F.pad(x, (sides, sides)) if sides else x
    kernel, length = weight.shape[-1], x.shape[-1] - weight.shape[-1] + 1
    if length == 1:  # one token of many sequences: channels side by side
        last, weight = x.transpose(1, 2).contiguous(), weight[:, 0].T.contiguous()
        parts = [(last[:, k], weight[k]) for k in range(kernel)]
    else:
        parts = [(x[..., k : k + length], weight[:, :, k]) for k in range(kernel)]
    out = parts[0][0] * parts[0][1]
    product = torch.empty_like(out)
    for part, factor in parts[1:]:
        out += torch.mul(part, factor, out=product)
    out = out[..., None] if length == 1 else out
    return out if bias is None else out.add_(bias[:, None])


def _sdpa(mode: BatchInvariantOps, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    return func(*args, **kwargs) if mode.sdpa is None else mode.sdpa(*args, **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            torch.sigmoid, Tensor.sigmoid, torch.special.expit, torch.exp2, Tensor.exp2,
            F.silu, F.gelu, F.softplus, F.mish, F.elu, F.selu, F.celu, F.logsigmoid, torch.selu,
        ),
        _elementwise,
    ),
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _power),
    **dict.fromkeys((torch.sum, Tensor.sum, torch.mean, Tensor.mean), _reduce),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, torch.conv1d), _conv1d),
    F.scaled_dot_product_attention: _sdpa,
}  # fmt: skip
