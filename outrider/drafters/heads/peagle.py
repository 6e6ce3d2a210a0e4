"""P-EAGLE: an EAGLE-3 head of several layers that drafts all tokens of a step in one forward.

The slots after the root's pair hold a mask token and a learnt feature in place of the target's. Each slot attends to the text
and to the slots before it, so the distributions of later tokens do not depend on the tokens that are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.tree import chain
from outrider.drafters.heads.config import HeadConfig
from outrider.drafters.heads.eagle_model import EagleModel
from outrider.drafters.heads.features import ContextDrafter, PairReader
from outrider.drafters.heads.reader import HeadWeights, read_eagle
from outrider.drafters.heads.selftest import parallel_drafter
from outrider.drafters.method import DrafterSetup
from outrider.models.base import LanguageModel
from outrider.models.nodes import Nodes


class PEagleDrafter(PairReader, ContextDrafter):
    """Drafts from the target's features and masks. Its cache holds pairs of committed tokens only, as `EagleDrafter`'s does.

    num_slots, max_length: slots of the cache, and tokens of each.
    """

    def __init__(
        self,
        head: HeadWeights[HeadConfig],
        target: LanguageModel,
        num_slots: int,
        max_length: int,
        quantization: str = "auto",
    ) -> None:
        self.model = self._eagle = EagleModel(head, target, max_length, quantization)
        cache, config = self._eagle.new_cache(num_slots, max_length), head.config
        ContextDrafter.__init__(
            self, config.vocab_size, target.device, self._eagle.subset, cache, config.taps, config.parallel_drafts
        )
        assert config.mask_token_id is not None
        self._mask = config.mask_token_id
        self._mask_features = head.tensors["mask_hidden"].float().flatten().to(self.device)

    def _logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Tensor:
        waiting = [self._queue.waiting[slot] for slot in slots]
        masked = [self._mask] * (depth - 1)
        feeds = [[*self._unread(slot, t), *masked] for slot, t in zip(slots, texts, strict=True)]
        tokens, parents = chain(feeds)
        masks = self._mask_features.expand(depth - 1, -1)
        features = pad_sequence([torch.cat([own, masks]) for own in waiting], batch_first=True)
        logits = self._eagle.slots(Nodes(tokens, self.cache, [*slots], parents), features, depth)
        for slot, own in zip(slots, waiting, strict=True):
            self._ingested(slot, len(own))
        return logits


def from_setup(setup: DrafterSetup) -> PEagleDrafter:
    """Raises ValueError for trees that heads of several positions do not draw."""
    return parallel_drafter(setup, read_eagle, PEagleDrafter, {"norm_before_residual": "norm_before_residual"})
