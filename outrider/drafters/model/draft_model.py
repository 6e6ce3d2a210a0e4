"""A second, smaller model drafts chains and trees. Its cache holds committed tokens only, so it needs no rollback."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from outrider.drafters.model.tree_drafter import GrowthSettings, TreeDrafter
from outrider.models.base import LanguageModel, Want
from outrider.models.nodes import Nodes

_CHUNK = 256  # prompt tokens read per forward


class ModelDrafter(TreeDrafter):
    """Drafts from an independent model with the target's vocabulary (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    The cache takes in committed tokens only: the accepted nodes of the scratch, and what the next proposal reads because it is
    missing. So full acceptance, rejection, steps without a draft and reuse of a slot are one case.

    reduction: what was left out of the model to make it cheaper, in words; None if nothing was.
    """

    def __init__(
        self, model: LanguageModel, num_slots: int, max_length: int, **settings: Unpack[GrowthSettings]
    ) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each. settings: see `GrowthSettings`."""
        super().__init__(model, num_slots, max_length, **settings)
        self.model = model
        self.reduction: str | None = None

    def missing(self, slot: int, tokens: list[int]) -> int:
        """How many tokens the model must read before it can draft for a sequence, the root not counted.

        Counted in the model's own tokens. 0 if the text is too long for the model: then it does not draft.
        tokens: the committed tokens of the sequence.
        """
        return len(self._context(slot, tokens)) - 1 - self.cache.length[slot] if self._room(slot, tokens) > 0 else 0

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        """Read the next `count` missing tokens, in one forward."""
        have = self.cache.length[slot]
        part = self._context(slot, tokens)[have : have + count]
        self.model.forward(Nodes(torch.tensor([part]), self.cache, [slot]), want="none")
        self._ingested(slot, len(part) + 1)

    def _context(self, slot: int, tokens: list[int]) -> list[int]:
        """The committed tokens of a sequence as the model reads them, the root last."""
        return tokens

    def _room(self, slot: int, tokens: list[int]) -> int:
        return self.model.max_length - len(self._context(slot, tokens))

    def _unread(self, slot: int, tokens: list[int]) -> tuple[list[int], None]:
        """Reads missing tokens in chunks until less than a chunk is left."""
        while self.missing(slot, tokens) >= _CHUNK:
            self.read(slot, tokens, _CHUNK)
        return self._context(slot, tokens)[self.cache.length[slot] :], None

    def _forward(self, nodes: Nodes, features: Tensor | None, want: Want) -> Tensor:
        return self.model.forward(nodes, want=want).logits
