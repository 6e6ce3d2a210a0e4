"""Linears and other operations whose rows have the same bits for every number of rows, in place of a model's own.

Native linears: weights in panels at the precision they are kept in, activations and sums in float32. Without the native kernels:
oneDNN prepacked for 8 rows, float32, which was found to have the same property (docs/log.md).

The modelling code of transformers has two more kinds of operations that depend on the number of rows. Some activations compute
the last few elements of a tensor with a scalar function and the others with a vector function, which round differently. And a
matrix product with a bare parameter (the router of a mixture) sums in another order for one row than for many.
`BatchInvariantOps` replaces these calls. That costs a little on every call, so a model runs under it only if it must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from outrider.kernels import cpu as native
from outrider.kernels import why_no_kernels
from outrider.models.dtypes import DTYPES, dtype_name
from outrider.models.hf.arrays import as_array

_WIDE = 64  # elements; a multiple of what one pass of any vector loop takes
_EASY_POWERS = (-2, -1, -0.5, 0.5, 1, 2, 3)  # made of products, quotients and roots, which round alike everywhere


class PackedLinear(nn.Module):
    """y = x W^T + b. weights: float32, bfloat16, float16, int8 or int4; "auto" is what `weight` has.

    weight: [out, in]. Takes and returns float32 (other dtypes are converted on the way), any leading dimensions.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, weights: str = "auto") -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind = dtype_name(weight.dtype) if weights == "auto" else weights
        if why_no_kernels(weight.device):
            self._run, self.matrix = _onednn(weight.detach(), bias, self.kind), None
        else:
            self.matrix: native.Packed | None = native.Packed(
                [as_array(weight)], self.kind, [None if bias is None else as_array(bias)]
            )
            self._run: Callable[[Tensor], Tensor] = partial(_product, self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self._run(x)
        return self._run(x.float()).to(x.dtype)

    @property
    def bytes(self) -> int:
        """What a product reads."""
        return 4 * self.out_features * self.in_features if self.matrix is None else self.matrix.bytes

    @property
    def rounds_inputs(self) -> bool:
        """Whether the kernels round the inputs to integers, as they do for quantised weights."""
        return self.matrix is not None and any(name not in DTYPES for name in self.matrix.formats)

    @property
    def weight(self) -> Tensor:
        """float32 [out, in]: the matrix that the kernels multiply with. Each use of its values unpacks them."""
        if self.matrix is None:
            raise AttributeError("the weights are in oneDNN's own layout")
        return _OnRequest(self.matrix)


def _product(matrix: native.Packed, x: Tensor) -> Tensor:
    return torch.from_numpy(matrix.linear(x.detach().numpy()))


class _OnRequest(Tensor):
    """A packed matrix as a tensor without memory. Some modelling code asks a matrix for its dtype in every forward."""

    @staticmethod
    def __new__(cls, packed: native.Packed) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, (packed.n, packed.k), dtype=torch.float32)  # pyright: ignore

    def __init__(self, packed: native.Packed) -> None:
        self.packed = packed

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: torch.from_numpy(t.packed.dense()), (args, kwargs or {}))
        return func(*args, **kwargs)


def _onednn(weight: Tensor, bias: Tensor | None, kind: str) -> Callable[[Tensor], Tensor]:
    if kind not in DTYPES:
        raise ValueError(f"{kind} weights need the native kernels: {why_no_kernels(weight.device)}")
    # The prepacked weight of a 16-bit model is the float32 copy: exact, and twice the memory.
    b = None if bias is None else bias.detach().float()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(getattr(torch, kind)).float().contiguous(), 8)

    def run(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, b, "none", [], "")

    return run


def linears(model: nn.Module) -> dict[str, Any]:
    """The linears of a model that can be packed, by name.

    Not one that inherits and changes its product (the router of Phi-MoE), nor that of which Mamba reads the weight."""
    plain = nn.Linear.forward, Conv1D.forward
    named = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and type(m).forward in plain}
    return {n: m for n, m in named.items() if not n.endswith(".dt_proj")}


def pack_linears_(model: nn.Module, weights: str = "auto") -> None:
    """Replace every linear in place.

    A matrix shared with the embedding is packed as another copy, and the embedding stays. The others are freed one by one, so
    only one extra matrix is in memory at a time.
    """
    # The largest first: while a matrix is packed, it is in memory twice.
    left = sorted(linears(model).items(), key=lambda linear: -linear[1].weight.numel())
    while left:
        name, module = left.pop(0)
        weight = module.weight.detach()
        new = PackedLinear(weight.T if isinstance(module, Conv1D) else weight, module.bias, weights)
        model.set_submodule(name, new.train(module.training))


@contextmanager
def one_thread(device: str) -> Iterator[None]:
    """Give torch one thread on the CPU, where the native kernels do the heavy work.

    More threads would split elementwise work at points that depend on its size, and round some elements differently.
    OpenMP's threads also spin for milliseconds after their work, on the cores that the kernels need next.
    """
    threads = torch.get_num_threads()
    if device == "cpu" and native.available():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class BatchInvariantOps(TorchFunctionMode):
    """A context in which no row of the operations in `_SPECIAL` depends on its neighbours (on one thread).

    needed: calls so far that would have depended on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = 0
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


def _conv1d(mode: BatchInvariantOps, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    mode.needed += 1
    return torch.cat([func(row, *args, **kwargs) for row in x.split(1)])


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
}  # fmt: skip
