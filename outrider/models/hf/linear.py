"""Linears whose rows have the same bits for every number of rows, in place of a model's own.

Native: weights in panels at the precision they are kept in, activations and sums in float32. Without the native kernels:
oneDNN prepacked for 8 rows, float32, which was found to have the same property (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.kernels import cpu as native
from outrider.kernels import for_device
from outrider.models.dtypes import DTYPES, dtype_name


class PackedLinear(nn.Module):
    """y = x W^T + b. weights: float32, bfloat16, float16, int8 or int4; "auto" is the dtype `weight` has.

    weight: [out, in]. Takes and returns float32 (other dtypes are converted on the way), any leading dimensions.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, weights: str = "auto") -> None:
        super().__init__()
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        self.kind = dtype_name(weight.dtype) if weights == "auto" else weights
        pack = for_device(weight.device).linear
        if pack is not None:
            packed = pack([weight], self.kind, [None if bias is None else bias.detach()])
            self._run: Callable[[Tensor], Tensor] = packed.linear
            self.packed: native.Packed | None = packed
        else:
            self._run, self.packed = _onednn(weight, bias, self.kind), None

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self._run(x)
        return self._run(x.float()).to(x.dtype)

    @property
    def weight(self) -> Tensor:
        """float32 [out, in]: the matrix that the kernels multiply with. Made on request, for inspection only."""
        if self.packed is None:
            raise AttributeError("the weights are in oneDNN's own layout")
        return self.packed.dense()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.kind}"


def _onednn(weight: Tensor, bias: Tensor | None, kind: str) -> Callable[[Tensor], Tensor]:
    if kind not in DTYPES:
        raise ValueError(f"{kind} weights need the native kernels: {for_device(weight.device).missing}")
    # The prepacked weight of a 16-bit model is the float32 copy: exact, and twice the memory.
    b = None if bias is None else bias.detach().float()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(DTYPES[kind]).float().contiguous(), 8)

    def run(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, b, "none", [], "")

    return run


def pack_linears_(model: nn.Module, weights: str = "auto") -> int:
    """Replace every nn.Linear and Conv1D in place. Returns how many were replaced.

    A matrix shared with the embedding is packed as another copy, and the embedding stays. The other matrices are freed one by
    one, so only one extra matrix is in memory at a time.
    """
    names = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    for name in names:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        module = owner.get_submodule(child)
        if isinstance(module, Conv1D):
            new = PackedLinear(module.weight.detach().T, module.bias, weights)
        elif isinstance(module, nn.Linear):
            new = PackedLinear(module.weight, module.bias, weights)
        else:
            continue
        setattr(owner, child, new.train(module.training))
    return len(names)
