"""Drafts with a trained head of the EAGLE family: EAGLE-1, EAGLE-3 and EAGLE-3.1, as chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.tree import chain
from outrider.core.types import Commit
from outrider.drafters.base import DraftContext, TargetPass
from outrider.drafters.heads.checks import say_length
from outrider.drafters.heads.eagle_model import EagleModel
from outrider.drafters.heads.features import FeatureQueue, PairModel, PairReader
from outrider.drafters.heads.reader import read_eagle
from outrider.drafters.heads.selftest import examine
from outrider.drafters.heads.shipped import head_of
from outrider.drafters.method import DrafterSetup
from outrider.drafters.model.confidence import FOR_HEADS, LogitError
from outrider.drafters.model.self_speculation import SAMPLE
from outrider.drafters.model.tree_drafter import GrowthSettings, TreeDrafter
from outrider.models.nodes import Nodes


class EagleDrafter(PairReader, TreeDrafter):
    """Drafts from the target's features (Li et al. 2025, arXiv 2503.01840; the equations: docs/guides/heads.md).

    The cache holds pairs of the target's features only. What the head feeds back to itself while it drafts is in the scratch,
    which is never committed: the same positions are read again from true features. Pairs wait until they are needed, and all
    but the last one cost only their keys and values.
    """

    def __init__(self, model: PairModel, num_slots: int, max_length: int, **settings: Unpack[GrowthSettings]) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each. settings: see `GrowthSettings`."""
        TreeDrafter.__init__(self, model, num_slots, max_length, subset=model.subset, **settings)
        self.error = LogitError(FOR_HEADS)
        self.model, self.taps = model, model.taps
        self._queue = FeatureQueue(self.cache)
        # slot -> g of the children of each node in the scratch, [place, hidden]
        self._fed_back: dict[int, Tensor] = {}

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        for slot in context.slots:
            self._fed_back.pop(slot, None)
            if self._places.pop(slot, None) is not None:
                self.cache.commit([slot], [[0]])  # the root's pair was read, and from the target's features
                self._queue.waiting.pop(slot, None)
        super().update(context, commits, target)

    def release(self, slot: int) -> None:
        super().release(slot)
        self._places.pop(slot, None)
        self._fed_back.pop(slot, None)

    def _room(self, slot: int, tokens: list[int]) -> int:
        return self._left(slot, tokens)

    def _before_chain(self, slot: int, tokens: list[int]) -> tuple[list[int], Tensor | None]:
        return self._unread(slot, tokens), self._queue.waiting[slot]

    def _ingest(self, context: DraftContext, some: list[int]) -> Tensor:
        slots = [context.slots[b] for b in some]
        feeds = [self._unread(slot, context.tokens[b]) for slot, b in zip(slots, some, strict=True)]
        tokens, parents = chain(feeds)
        features = pad_sequence([self._queue.waiting[slot] for slot in slots], batch_first=True)
        logits, g = self.model.forward(Nodes(tokens, self.cache, slots, parents), features, want="last")
        for slot, feed, own in zip(slots, feeds, g, strict=True):
            self._ingested(slot, len(feed))
            self._fed_back[slot] = own
        return logits[:, 0]

    def _forward(self, nodes: Nodes, lines: list[int], columns: list[int]) -> Tensor:
        assert nodes.parents is not None
        above = nodes.parents[:, nodes.held :].clamp_min(0).to(self.device)
        known = [self._fed_back[slot] for slot in nodes.slots]
        logits, g = self.model.forward(nodes, g=torch.stack([k[up] for k, up in zip(known, above, strict=True)]))
        for slot, before, new in zip(nodes.slots, known, g, strict=True):
            self._fed_back[slot] = torch.cat([before, new])
        return logits[lines, columns]


def from_setup(setup: DrafterSetup) -> EagleDrafter:
    """Read the head of a configuration, and try it on a known text."""
    target, head = setup.target, head_of(setup)
    read = read_eagle(head, target)
    say_length(head, read.config.max_position_embeddings, setup.max_length)
    model = EagleModel(read, target.model, setup.max_length, setup.config.quantization)
    if target.tokenizer is not None:
        examine(model, target, target.tokenizer(SAMPLE)["input_ids"], head)
    return EagleDrafter(model, setup.rows, setup.max_length)
