"""What heads are made of: linears, norms and a rotary embedding for the target's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from outrider.drafters.heads.config import HeadShape
from outrider.kernels import cpu as native
from outrider.models.dtypes import DTYPES, dtype_name
from outrider.models.hf.linear import PackedLinear

Linear = Callable[[Tensor], Tensor]
SMALL = 2**22  # weights; a smaller head costs more in calls than in bytes


class Linears:
    """Makes the linears of a head. On the CPU they are packed as `precision`; elsewhere they keep the weights' own.

    tensors: for those that are made by name. eps: of its norms. bytes: of the weights of all linears so far.
    """

    def __init__(
        self, device: torch.device, precision: str, tensors: Mapping[str, Tensor] | None = None, eps: float = 0.0
    ) -> None:
        self.device, self.precision, self.bytes = device, precision, 0
        self._tensors, self._eps = tensors or {}, eps

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = (None,)) -> Linear:
        """float32 [..., in] -> float32 [..., out] over matrices [out, in], one below the other."""
        weight = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
        some = [b.detach() for b in biases if b is not None]
        bias = torch.cat(some) if some else None
        if self.device.type == "cpu":
            packed = PackedLinear(weight, bias, self.precision)
            self.bytes += packed.bytes
            return packed
        moved, added = weight.to(self.device), None if bias is None else bias.to(self.device, weight.dtype)
        self.bytes += moved.numel() * moved.element_size()
        return lambda x: F.linear(x.to(moved.dtype), moved, added).float()

    def named(self, *names: str) -> Linear:
        """The linear over the matrices of these names, with their biases."""
        return self([self._tensors[f"{n}.weight"] for n in names], [self._tensors.get(f"{n}.bias") for n in names])

    def norm(self, name: str) -> Linear:
        """x * weight / sqrt(mean(x^2) + eps), over the last dim. Without such a weight: x."""
        stored = self._tensors.get(f"{name}.weight")
        if stored is None:
            return lambda x: x
        weight = stored.detach().float().to(self.device)
        return lambda x: F.rms_norm(x, weight.shape, weight, self._eps)


class PackedLayer:
    """A layer of a head. queries, keys and values are read by one linear for each of `groups`, such as "qkv"."""

    def __init__(self, made: Linears, i: int, *groups: str) -> None:
        layer, attention = f"layers.{i}.", f"layers.{i}.self_attn."
        self.reads = [made.named(*(f"{attention}{n}_proj" for n in group)) for group in groups]
        self.out = made.named(f"{attention}o_proj")
        self.gate_up = made.named(f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj")
        self.down = made.named(f"{layer}mlp.down_proj")
        self.input_layernorm, self.hidden_norm = made.norm(f"{layer}input_layernorm"), made.norm(f"{layer}hidden_norm")
        self.post_attention_layernorm = made.norm(f"{layer}post_attention_layernorm")
        self.q_norm, self.k_norm = made.norm(f"{attention}q_norm"), made.norm(f"{attention}k_norm")

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output. attended: what its attention read, [..., head * head_dim]."""
        y = residual + self.out(attended)
        return y + self.mlp(self.post_attention_layernorm(y))

    def mlp(self, x: Tensor) -> Tensor:
        """[..., hidden] of a normed state of that shape."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def precision_of(quantization: str, tensors: Sequence[Tensor]) -> str:
    """The precision of a head's linears. quantization: that of the configuration; "auto" rounds large heads to 8 bit, if
    the native kernels are at hand."""
    stored = dtype_name(tensors[0].dtype)
    if quantization == "auto":
        large = native.available() and sum(t.numel() for t in tensors if t.dim() == 2) >= SMALL
        return "int8" if large else stored if stored in DTYPES else "float32"
    return stored if quantization == "none" else quantization


def turns(frequencies: Tensor, factor: float, positions: Tensor) -> Tensor:
    """float32 [..., dim]: the cosines and then the sines of a rotary embedding at positions [...]. frequencies: [dim / 2]."""
    angle = positions[..., None].float() * frequencies
    return torch.cat([angle.cos(), angle.sin()], -1) * factor


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """x [..., dim], its halves turned as in Llama. turn: of `turns`, broadcast to x."""
    cosine, sine = turn.to(x.dtype).chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class Rotary:
    """A rotary embedding whose positions up to `length` are computed once."""

    def __init__(self, config: HeadShape, length: int, device: torch.device) -> None:
        frequencies, factor = config.rotary()
        self._table = turns(frequencies.to(device), factor, torch.arange(length, device=device))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: float32 [..., head, dim]; positions: int64 [...]."""
        return turned(x, self._table[positions][..., None, :])
