"""What reads pairs by the native step: EAGLE heads, and MTP layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.drafters.heads.features import HeadOutput, PairModel, last_nodes
from outrider.models.base import Chain, DrawnChain, Want
from outrider.models.cache import SlotCache
from outrider.models.native.program import Program
from outrider.models.native.step import NativeStep
from outrider.models.nodes import Nodes


class NativePairs(PairModel):
    """A program that is given features, or what it fed back: a forward is one call, and so are whole chains.

    Cell t of a slot holds the keys and values of the pair (x_{t+1}, g_t)."""

    has_draft_chains = True

    def __init__(
        self, program: Program, taps: tuple[int, ...], max_length: int, subset: TokenSubset | None = None
    ) -> None:
        self.taps, self.max_length, self.subset = taps, max_length, subset
        self.device, self.vocab_size = torch.device("cpu"), program.vocab_size
        self.weight_bytes = sum(m.bytes for m in program.matrices)
        self._step, self._width = NativeStep(program), program.fed_back

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, min(max_length, self.max_length))

    def forward(
        self, nodes: Nodes, features: Tensor | None = None, *, g: Tensor | None = None, want: Want | int = "all"
    ) -> HeadOutput:
        given = features if features is not None else g
        given = torch.zeros(*nodes.tokens.shape, self._width) if given is None else given.float().contiguous()
        shown: Want = "all" if isinstance(want, int) else want
        logits, _, fed_back = self._step.forward(nodes, (), shown, given, features is None)
        assert fed_back is not None
        if isinstance(want, int):
            own = last_nodes(nodes, want)
            return HeadOutput(logits[own], fed_back[own])
        return HeadOutput(logits, fed_back)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        """See `LanguageModel.draft_chains`. What is fed back stays in the call."""
        return self._step.draft_chains(cache, chains)
