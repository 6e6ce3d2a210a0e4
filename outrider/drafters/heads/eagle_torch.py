"""A head of the EAGLE family in torch over packed weights: for other devices, and the reference of the native step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from outrider.drafters.heads.layers import HeadOutput, Linear, Linears, Norm, Rotary, precision_of
from outrider.drafters.heads.reader import EagleWeights
from outrider.kernels.attention import Scoring
from outrider.models.attention import attend, write
from outrider.models.base import Chain, DrawnChain, LanguageModel, Want
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.nodes import Nodes

_LAYER = "layers.0."


class TorchEagle:
    """weight_bytes: that a forward of one pair reads; fc is read only where features come from the target."""

    def __init__(self, head: EagleWeights, target: LanguageModel, max_length: int, quantization: str) -> None:
        config, tensors = head.config, head.tensors
        self.config, self.device, self._target = config, target.device, target
        self._embedding = None if head.own_embedding is None else head.own_embedding.to(self.device)
        linears = Linears(self.device, precision_of(quantization, [t for n, t in tensors.items() if "norm" not in n]))

        def linear(*names: str) -> Linear:
            return linears([tensors[f"{n}.weight"] for n in names], [tensors.get(f"{n}.bias") for n in names])

        def norm(name: str) -> Norm | None:
            weight = tensors.get(f"{name}.weight")
            return None if weight is None else Norm(weight, config.rms_norm_eps, self.device)

        self._fc = linear("fc")
        fused = 0 if config.eagle1 else linears.bytes
        attention, mlp = f"{_LAYER}self_attn.", f"{_LAYER}mlp."
        self._attention_in = linear(*(f"{attention}{n}_proj" for n in "qkv"))
        self._out = linear(f"{attention}o_proj")
        self._gate_up = linear(f"{mlp}gate_proj", f"{mlp}up_proj")
        self._down = linear(f"{mlp}down_proj")
        self._lm_head = linear("lm_head")
        self.weight_bytes = linears.bytes - fused
        self._input_norm = norm("input_norm")
        self._fc_norms = [norm(f"fc_norm.{i}") for i in range(len(config.taps))]
        self._token_norm, self._hidden_norm = norm(f"{_LAYER}input_layernorm"), norm(f"{_LAYER}hidden_norm")
        self._middle_norm, self._norm = norm(f"{_LAYER}post_attention_layernorm"), norm("norm")
        self._rotary = Rotary(*config.rotary(), max_length + SCRATCH, self.device)
        self._scoring = Scoring(config.head_dim**-0.5)

    def forward(self, nodes: Nodes, features: Tensor | None, g: Tensor | None, want: Want) -> HeadOutput:
        nodes = nodes.to(self.device)
        nodes.cache.reserve(nodes.slots, nodes.total)
        if g is None:
            assert features is not None
            g = self._fused(features)
        c = self.config
        x, residual = self._pairs(nodes.tokens, g)
        heads = self._attention_in(x).unflatten(-1, (-1, c.head_dim))
        turned = self._rotary(heads[..., : c.num_attention_heads + c.num_key_value_heads, :], nodes.positions)
        query, key = turned.split([c.num_attention_heads, c.num_key_value_heads], -2)
        value = heads[..., -c.num_key_value_heads :, :]
        write(nodes, 0, key.transpose(1, 2), value.transpose(1, 2))
        batch = len(nodes.slots)
        if want == "none":
            return HeadOutput(x.new_empty(batch, 0, c.draft_vocab_size), x.new_empty(batch, 0, c.hidden_size))
        attended = attend(nodes, 0, query.transpose(1, 2), self._scoring).flatten(2)
        if want == "last":
            own = torch.arange(batch), torch.tensor(nodes.last)
            attended, residual = attended[own][:, None], residual[own][:, None]
        y = residual + self._out(attended)
        assert self._middle_norm is not None
        gate, up = self._gate_up(self._middle_norm(y)).chunk(2, -1)
        y = y + self._down(F.silu(gate) * up)
        z = y if self._norm is None else self._norm(y)
        return HeadOutput(self._lm_head(z), z if c.norm_output else y)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        raise NotImplementedError("a head in torch drafts no chains in one call; check has_draft_chains first")

    def _fused(self, features: Tensor) -> Tensor:
        """float32 [..., hidden]: g of features [..., taps * target_hidden]."""
        features = features.float()
        if self.config.eagle1:
            return features
        if self._input_norm is not None:
            features = self._input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self._fc_norms), -1)
            features = torch.cat([n(p) for n, p in zip(self._fc_norms, parts, strict=True) if n is not None], -1)
        return self._fc(features)

    def _pairs(self, tokens: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(x, residual): what the attention reads, and what its output is added to."""
        table = self._embedding
        embedded = self._target.embedding_rows(tokens) if table is None else table[tokens].float()
        if self._token_norm is None or self._hidden_norm is None:  # EAGLE-1
            joined = self._fc(torch.cat([embedded, g], -1))
            return joined, joined
        normed = self._hidden_norm(g)
        x = torch.cat([self._token_norm(embedded), normed], -1)
        return x, normed if self.config.norm_before_residual else g
