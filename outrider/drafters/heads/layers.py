"""What the packed heads are made of: linears for the target's device, norms, and the rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from outrider.models.dtypes import DTYPES, dtype_name
from outrider.models.hf.linear import PackedLinear

Linear = Callable[[Tensor], Tensor]
SMALL = 2**22  # weights; a smaller head costs more in calls than in bytes


class HeadOutput(NamedTuple):
    """Of the pairs that were wanted. logits: float32 [batch, node, draft_vocab]. g: float32 [batch, node, hidden], what a head
    reads in place of features at the children of each node."""

    logits: Tensor
    g: Tensor


class Linears:
    """Makes the linears of a head. On the CPU they are packed as `precision`; elsewhere they keep the weights' own.

    bytes: of the weights of all linears so far.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        self.device, self.precision, self.bytes = device, precision, 0

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = (None,)) -> Linear:
        """float32 [..., in] -> float32 [..., out] over matrices [out, in], one below the other."""
        weight = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
        given = [b.detach() for b in biases if b is not None]
        bias = torch.cat(given) if given else None
        if self.device.type == "cpu":
            made = PackedLinear(weight, bias, self.precision)
            self.bytes += made.packed.bytes if made.packed else 4 * weight.numel()
            return made
        moved, added = weight.to(self.device), None if bias is None else bias.to(self.device, weight.dtype)
        self.bytes += moved.numel() * moved.element_size()
        return lambda x: F.linear(x.to(moved.dtype), moved, added).float()


def precision_of(quantization: str, tensors: Sequence[Tensor]) -> str:
    """The precision of a head's linears. quantization: that of the configuration; "auto" rounds large heads to 8 bit."""
    stored = dtype_name(tensors[0].dtype)
    if quantization == "auto":
        large = sum(t.numel() for t in tensors if t.dim() == 2) >= SMALL
        return "int8" if large else stored if stored in DTYPES else "float32"
    return stored if quantization == "none" else quantization


class Norm:
    """x * weight / sqrt(mean(x^2) + eps), over the last dim."""

    def __init__(self, weight: Tensor, eps: float, device: torch.device) -> None:
        self.weight, self.eps = weight.detach().float().to(device), eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary:
    """Turns the halves of each head by its position, as Llama does. positions up to `length` are computed once."""

    def __init__(self, frequencies: Tensor, factor: float, length: int, device: torch.device) -> None:
        angles = torch.arange(length, device=device)[:, None].float() * frequencies.to(device)
        self._table = torch.cat([angles.cos() * factor, angles.sin() * factor], -1)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: float32 [..., head, dim]; positions: int64 [...]."""
        cosine, sine = self._table[positions][..., None, :].chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
