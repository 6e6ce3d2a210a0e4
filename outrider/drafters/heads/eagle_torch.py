"""A head of the EAGLE family in torch over packed weights: for other devices, and the reference of the native step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class _TorchLayer:
    """input_norm: of the layer's input; that of the first layer is of the tokens alone (EAGLE-1 has none)."""

    def __init__(self, prefix: str, linear: Callable[..., Linear], norm: Callable[[str], Norm | None]) -> None:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self.attention_in = linear(*(f"{attention}{n}_proj" for n in "qkv"))
        self.out = linear(f"{attention}o_proj")
        self.gate_up, self.down = linear(f"{mlp}gate_proj", f"{mlp}up_proj"), linear(f"{mlp}down_proj")
        self.input_norm, middle = norm(f"{prefix}input_layernorm"), norm(f"{prefix}post_attention_layernorm")
        assert middle is not None
        self.middle_norm = middle
        self.q_norm, self.k_norm = norm(f"{attention}q_norm"), norm(f"{attention}k_norm")


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
        self._layers = [_TorchLayer(f"layers.{i}.", linear, norm) for i in range(config.num_layers)]
        self._lm_head = linear("lm_head")
        self.weight_bytes = linears.bytes - fused
        self._input_norm = norm("input_norm")
        self._fc_norms = [norm(f"fc_norm.{i}") for i in range(len(config.taps))]
        self._token_norm, self._hidden_norm = norm("layers.0.input_layernorm"), norm("layers.0.hidden_norm")
        self._norm = norm("norm")
        self._rotary = Rotary(*config.rotary(), max_length + SCRATCH, self.device)
        self._scoring = Scoring(config.head_dim**-0.5)

    def forward(self, nodes: Nodes, features: Tensor | None, g: Tensor | None, want: Want | int) -> HeadOutput:
        """want: as for `LanguageModel.forward`, or a number: so many of each sequence's last nodes."""
        nodes = nodes.to(self.device)
        nodes.cache.reserve(nodes.slots, nodes.total)
        if g is None:
            assert features is not None
            g = self._fused(features)
        c, batch = self.config, len(nodes.slots)
        x, residual = self._pairs(nodes.tokens, g)
        y = residual
        for i, layer in enumerate(self._layers):
            if i:
                assert layer.input_norm is not None
                x, residual = layer.input_norm(y), y
            query = self._written(nodes, i, layer, x)
            last = i == len(self._layers) - 1
            if last and want == "none":
                return HeadOutput(x.new_empty(batch, 0, c.draft_vocab_size), x.new_empty(batch, 0, c.hidden_size))
            attended = attend(nodes, i, query.transpose(1, 2), self._scoring).flatten(2)
            if last and want != "all":
                count = 1 if want == "last" else want
                assert isinstance(count, int)
                at = torch.tensor(nodes.last)[:, None] + torch.arange(1 - count, 1)
                own = torch.arange(batch)[:, None], at
                attended, residual = attended[own], residual[own]
            y = residual + layer.out(attended)
            gate, up = layer.gate_up(layer.middle_norm(y)).chunk(2, -1)
            y = y + layer.down(F.silu(gate) * up)
        z = y if self._norm is None else self._norm(y)
        return HeadOutput(self._lm_head(z), z if c.norm_output else y)

    def _written(self, nodes: Nodes, i: int, layer: _TorchLayer, x: Tensor) -> Tensor:
        """Write the keys and values of a layer. Returns the rotated queries, [batch, node, head, head_dim]."""
        c = self.config
        heads = layer.attention_in(x).unflatten(-1, (-1, c.head_dim))
        query, key, value = heads.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads], -2)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = layer.q_norm(query), layer.k_norm(key)
        turned = self._rotary(torch.cat([query, key], -2), nodes.positions)
        query, key = turned.split([c.num_attention_heads, c.num_key_value_heads], -2)
        write(nodes, i, key.transpose(1, 2), value.transpose(1, 2))
        return query

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
