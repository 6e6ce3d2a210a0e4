"""Bytes of weights that a forward of one token reads, for any model of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from outrider.models.hf.experts import is_mixture
from outrider.models.hf.linear import PackedEmbedding, PackedLinear

_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")  # names of transformers' configurations


def weight_bytes(model: nn.Module) -> int:
    """All matrices but the embedding, of which one row is read. Of a mixture, the experts that a token has."""
    skipped = (nn.Embedding, PackedEmbedding)
    total, modules = 0, [model]
    while modules:
        module = modules.pop()
        if is_mixture(module):
            total += _mixture(module)
            continue
        total += 0 if isinstance(module, skipped) else _own(module)
        modules += module.children()
    return total


def _own(module: nn.Module) -> int:
    if isinstance(module, PackedLinear):
        return module.bytes
    return sum(p.nbytes for p in module._parameters.values() if p is not None)


def _mixture(module: nn.Module) -> int:
    """The share of the experts, as all are of one size."""
    linears: list[Any] = [*getattr(module, "packed_up", ()), *getattr(module, "packed_down", ())]
    whole = sum(p.nbytes for p in module.parameters()) + sum(linear.bytes for linear in linears)
    experts = len(linears) // 2 or next((len(p) for p in module.parameters() if p.dim() == 3), 1)
    config: Any = getattr(module, "config", None)  # Llama 4's has none: it reads all experts
    chosen = next((n for name in _CHOSEN if isinstance(n := getattr(config, name, None), int)), experts)
    return whole * min(chosen, experts) // experts


__all__ = ["weight_bytes"]
