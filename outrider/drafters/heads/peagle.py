"""P-EAGLE: an EAGLE-3 head of several layers that drafts all tokens of a step in one forward.

The slots after the root's pair hold a mask token and a learnt feature in place of the target's. Each slot attends to the text
and to the slots before it, so the distributions of later tokens do not depend on the tokens that are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.tree import chain
from outrider.drafters.heads.checks import say_length
from outrider.drafters.heads.config import HeadConfig
from outrider.drafters.heads.eagle_model import EagleModel
from outrider.drafters.heads.features import ContextDrafter
from outrider.drafters.heads.lattice import chains_only
from outrider.drafters.heads.reader import EagleWeights, read_eagle
from outrider.drafters.heads.selftest import examine_parallel, misread
from outrider.drafters.heads.shipped import head_of
from outrider.drafters.method import DrafterSetup
from outrider.models.base import LanguageModel
from outrider.models.nodes import Nodes


class PEagleDrafter(ContextDrafter):
    """Drafts from the target's features and masks. Its cache holds pairs of committed tokens only, as `EagleDrafter`'s does.

    num_slots, max_length: slots of the cache, and tokens of each.
    """

    def __init__(
        self, head: EagleWeights, target: LanguageModel, num_slots: int, max_length: int, quantization: str = "auto"
    ) -> None:
        self.model = EagleModel(head, target, max_length, quantization)
        cache, config = self.model.new_cache(num_slots, max_length), head.config
        super().__init__(
            config.vocab_size, target.device, self.model.subset, cache, config.taps, config.parallel_drafts
        )
        assert config.mask_token_id is not None
        self._mask = config.mask_token_id
        self._mask_features = head.tensors["mask_hidden"].float().flatten().to(self.device)

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        """All pairs but the last, whose token is the root when a draft begins."""
        waiting = self._queue.waiting.get(slot)
        if waiting is None or len(waiting) < 2:
            return
        count, start = len(waiting) - 1, self.cache.length[slot] + 1
        nodes = Nodes(torch.tensor([[*tokens[start : start + count]]]), self.cache, [slot])
        self.model.forward(nodes, waiting[None, :-1], want="none")
        self._keep_root(slot, count)

    def _depth(self, slot: int, tokens: Sequence[int]) -> int:
        return (
            super()._depth(slot, tokens) if slot in self._queue.waiting else 0
        )  # a prompt of one token has no pair yet

    def _keep_root(self, slot: int, count: int) -> None:
        """Commit the first pairs of the scratch. The root's pair waits: it is read again with the next draft."""
        self.cache.commit([slot], [range(count)])
        self._queue.waiting[slot] = self._queue.waiting[slot][-1:].clone()

    def _logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Tensor:
        waiting = [self._queue.waiting[slot] for slot in slots]
        masked = [self._mask] * (depth - 1)
        feeds = [[*t[self.cache.length[slot] + 1 :], *masked] for slot, t in zip(slots, texts, strict=True)]
        tokens, parents = chain(feeds)
        masks = self._mask_features.expand(depth - 1, -1)
        features = pad_sequence([torch.cat([own, masks]) for own in waiting], batch_first=True)
        logits = self.model.slots(Nodes(tokens, self.cache, [*slots], parents), features, depth)
        for slot, own in zip(slots, waiting, strict=True):
            self._keep_root(slot, len(own) - 1)
        return logits


def from_setup(setup: DrafterSetup) -> PEagleDrafter:
    """Raises ValueError for trees that heads of several positions do not draw."""
    chains_only(setup)
    target, head = setup.target, head_of(setup)
    read = read_eagle(head, target)
    say_length(head, read.config.max_position_embeddings, setup.max_length)

    def made(config: HeadConfig) -> PEagleDrafter:
        given = EagleWeights(config, read.tensors, read.token_ids)
        return PEagleDrafter(given, target.model, setup.rows, setup.max_length, setup.config.quantization)

    drafter = made(read.config)
    others = misread(read.config, target.model.num_layers, {"norm_before_residual": "norm_before_residual"})
    tries = [(what, config.taps, partial(made, config)) for what, config in others]
    examine_parallel(drafter, tries, drafter.model.max_length, target, head)
    return drafter
