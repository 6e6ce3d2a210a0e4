"""A head of the EAGLE family over the slot cache and at draft trees: one forward, by the native step or in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.drafters.heads.config import HeadConfig
from outrider.drafters.heads.eagle_native import NativeEagle, runs_natively
from outrider.drafters.heads.eagle_torch import TorchEagle
from outrider.drafters.heads.layers import HeadOutput
from outrider.drafters.heads.reader import HeadWeights
from outrider.models.base import Chain, DrawnChain, LanguageModel, Want
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes


class EagleModel:
    """The layer of a head. Cell t of a slot holds the key and value of the pair (x_{t+1}, g_t).

    target: gives the embedding, unless the head has its own. quantization: "auto", "none", "int8" or "int4".
    max_length: tokens of the longest text. plain: in torch also where the native step could run it; the reference.
    weight_bytes: that a forward of one pair reads; in P-EAGLE the share of each draft token.
    has_draft_chains: whether `draft_chains` can be called.
    """

    def __init__(
        self,
        head: HeadWeights[HeadConfig],
        target: LanguageModel,
        max_length: int,
        quantization: str = "auto",
        *,
        plain: bool = False,
    ) -> None:
        config = head.config
        self.config, self.taps, self.device, self.vocab_size = config, config.taps, target.device, config.vocab_size
        self.max_length = min(max_length, config.max_position_embeddings)
        self.subset: TokenSubset | None = None
        if len(head.token_ids) < config.vocab_size:
            self.subset = TokenSubset(head.token_ids.to(self.device), config.vocab_size)
        self._read = head, target, max_length, quantization, plain
        made = NativeEagle if not plain and runs_natively(head, target) else TorchEagle
        self._layer = made(head, target, self.max_length, quantization)
        self.weight_bytes = self._layer.weight_bytes // max(config.parallel_drafts, 1)
        self.has_draft_chains = isinstance(self._layer, NativeEagle)

    def read_as(self, config: HeadConfig) -> EagleModel:
        """The same weights with other settings: flags, taps and the rotary embedding."""
        head, target, max_length, quantization, plain = self._read
        return EagleModel(replace(head, config=config), target, max_length, quantization, plain=plain)

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, min(max_length, self.max_length))

    def forward(
        self, nodes: Nodes, features: Tensor | None = None, *, g: Tensor | None = None, want: Want = "all"
    ) -> HeadOutput:
        """Read pairs. Each node's token comes with the target's features, or with what its parent fed back.

        features: float [batch, node, taps * target_hidden]. g: float32 [batch, node, hidden]. Neither: 0, to see what a cache
        takes. want: as for `LanguageModel.forward`; of pairs without logits only keys and values are computed.
        """
        if features is None and g is None:
            g = torch.zeros(*nodes.tokens.shape, self.config.hidden_size, device=self.device)
        return self._layer.forward(nodes, features, g, want)

    def slots(self, nodes: Nodes, features: Tensor, count: int) -> Tensor:
        """float32 [batch, count, draft_vocab]: the logits of each sequence's last `count` nodes, for a head of P-EAGLE."""
        assert isinstance(self._layer, TorchEagle)
        return self._layer.forward(nodes, features, None, count).logits

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        """See `LanguageModel.draft_chains`. What the head feeds back stays in the call."""
        return self._layer.draft_chains(cache, chains)
