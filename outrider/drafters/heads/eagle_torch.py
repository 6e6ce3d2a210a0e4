"""A head of the EAGLE family in torch over packed weights: for other devices, and the reference of the native step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.heads.config import HeadConfig
from outrider.drafters.heads.layers import HeadOutput, Linears, PackedLayer, Rotary, precision_of
from outrider.drafters.heads.reader import HeadWeights
from outrider.kernels.attention import Scoring
from outrider.models.attention import attend, write
from outrider.models.base import Chain, DrawnChain, LanguageModel, Want
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.nodes import Nodes


class TorchEagle:
    """weight_bytes: that a forward of one pair reads; fc is read only where features come from the target."""

    def __init__(
        self, head: HeadWeights[HeadConfig], target: LanguageModel, max_length: int, quantization: str
    ) -> None:
        config, tensors = head.config, head.tensors
        self.config, self.device, self._target = config, target.device, target
        self._embedding = None if head.own_embedding is None else head.own_embedding.to(self.device)
        precision = precision_of(quantization, [t for n, t in tensors.items() if "norm" not in n])
        made = Linears(self.device, precision, tensors, config.rms_norm_eps)
        self._fc = made.named("fc")
        fused = 0 if config.eagle1 else made.bytes
        self._layers = [PackedLayer(made, i, "qkv") for i in range(config.num_layers)]
        self._lm_head = made.named("lm_head")
        self.weight_bytes = made.bytes - fused
        self._input_norm, self._norm = made.norm("input_norm"), made.norm("norm")
        self._fc_norms = [made.norm(f"fc_norm.{i}") for i in range(len(config.taps))]
        self._hidden_norm = made.norm("layers.0.hidden_norm")
        self._rotary = Rotary(config, max_length + SCRATCH, self.device)
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
            y = layer.after(residual, attended)
        z = self._norm(y)
        return HeadOutput(self._lm_head(z), z if c.norm_output else y)

    def _written(self, nodes: Nodes, i: int, layer: PackedLayer, x: Tensor) -> Tensor:
        """Write the keys and values of a layer. Returns the rotated queries, [batch, node, head, head_dim]."""
        c = self.config
        heads = layer.reads[0](x).unflatten(-1, (-1, c.head_dim))
        query, key, value = heads.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads], -2)
        both = self._rotary(torch.cat([layer.q_norm(query), layer.k_norm(key)], -2), nodes.positions)
        query, key = both.split([c.num_attention_heads, c.num_key_value_heads], -2)
        write(nodes, i, key.transpose(1, 2), value.transpose(1, 2))
        return query

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        raise NotImplementedError("a head in torch drafts no chains in one call; check has_draft_chains first")

    def _fused(self, features: Tensor) -> Tensor:
        """float32 [..., hidden]: g of features [..., taps * target_hidden]."""
        features = features.float()
        if self.config.eagle1:
            return features
        parts = self._input_norm(features).chunk(len(self._fc_norms), -1)
        return self._fc(torch.cat([norm(part) for norm, part in zip(self._fc_norms, parts, strict=True)], -1))

    def _pairs(self, tokens: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(x, residual): what the attention reads, and what its output is added to."""
        table = self._embedding
        embedded = self._target.embedding_rows(tokens) if table is None else table[tokens].float()
        if self.config.eagle1:
            joined = self._fc(torch.cat([embedded, g], -1))
            return joined, joined
        normed = self._hidden_norm(g)
        x = torch.cat([self._layers[0].input_norm(embedded), normed], -1)
        return x, normed if self.config.norm_before_residual else g
