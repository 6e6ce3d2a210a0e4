"""Batch-invariant mixtures of experts.

transformers runs the experts of a layer through a registered function and keeps their matrices as one three-dimensional
parameter. Our function packs each expert's matrices as linears are packed, and gives each expert its tokens. The results of a
token are added up in the order in which the router named its experts. So they do not depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from outrider.models.hf.linear import PackedLinear, linears

NAME = "outrider"
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")  # how many a token has, in transformers' configurations


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: [token, hidden], [token, k], [token, k] -> [token, hidden]."""
    tokens, k = top_k_index.shape
    of = top_k_index.reshape(-1)
    order = of.argsort(stable=True)
    counts = torch.bincount(of, minlength=len(module.packed_up)).tolist()
    parts, start = [], 0
    for up, down, count in zip(module.packed_up, module.packed_down, counts, strict=True):
        if count:
            x = up(hidden_states[order[start : start + count] // k])
            parts.append(down(module._apply_gate(x) if module.has_gate else module.act_fn(x)))
            start += count
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    each = torch.cat(parts)[back].view(tokens, k, -1) * top_k_weights[..., None]
    out = each[:, 0]
    for i in range(1, k):
        out = out + each[:, i]
    return out.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def mixtures(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold the experts of a layer in one parameter."""
    return (m for m in model.modules() if is_mixture(m))


def is_mixture(module: nn.Module) -> bool:
    """Whether transformers runs a module through the experts interface."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def pack_experts_(model: nn.Module, weights: str = "auto") -> None:
    """Give every mixture its packed matrices as `packed_up` and `packed_down`, one `PackedLinear` for each expert.

    up: the up projection, joined with the gate if there is one. down: back to the hidden size.
    The parameters are freed layer by layer. Raises ValueError for experts with another layout than the interface's.
    """
    for module in mixtures(model):
        module.packed_up = _packed(module, "gate_up_proj" if module.has_gate else "up_proj", weights)
        module.packed_down = _packed(module, "down_proj", weights)
        up, down = len(module.packed_up), len(module.packed_down)  # pyright: ignore[reportArgumentType]
        if up != down:
            raise ValueError(f"{type(module).__name__} has {up} up and {down} down projections")
        module.config._experts_implementation = NAME  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def _packed(module: nn.Module, name: str, weights: str) -> nn.ModuleList:
    """One packed linear per expert, from [expert, out, in], or [expert, in, out] if the module is transposed."""
    matrices, biases = getattr(module, name, None), getattr(module, f"{name}_bias", None)
    if not isinstance(matrices, Tensor) or matrices.dim() != 3:
        raise ValueError(f"{type(module).__name__} has no {name} of shape [expert, out, in]; its layout is unknown")
    out = nn.ModuleList()
    for i, values in enumerate(matrices.detach()):
        bias = biases[i].detach() if biases is not None and module.has_bias else None
        out.append(PackedLinear(values.T if module.is_transposed else values, bias, weights))
    for used in (name, f"{name}_bias"):
        if used in module._parameters:
            module._parameters[used] = None
    return out


def multiplied(model: nn.Module) -> int:
    """Numbers in the matrices that a forward of one token multiplies with, all experts counted."""
    return sum(p.numel() for m in (*mixtures(model), *linears(model).values()) for p in m.parameters() if p.dim() > 1)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that a forward of one token reads: all matrices but the embedding, of which one row is read. Of a mixture,
    the experts that a token has."""
    if is_mixture(model):
        linears: list[Any] = [*getattr(model, "packed_up", ()), *getattr(model, "packed_down", ())]
        whole = sum(p.nbytes for p in model.parameters()) + sum(linear.bytes for linear in linears)
        experts = len(linears) // 2 or next((len(p) for p in model.parameters() if p.dim() == 3), 1)
        chosen = next((n for name in _CHOSEN if isinstance(n := getattr(model.config, name, None), int)), experts)
        return whole * min(chosen, experts) // experts  # all are of one size
    if isinstance(packed := getattr(model, "bytes", None), int):  # of a `PackedLinear`
        return packed
    parameters = () if isinstance(model, nn.Embedding) else model._parameters.values()
    return sum(p.nbytes for p in parameters if p is not None) + sum(map(weight_bytes, model.children()))
