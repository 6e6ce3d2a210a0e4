"""Drafts with a trained head of the EAGLE family: EAGLE-1, EAGLE-3 and EAGLE-3.1, as chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.sampling import TokenSubset
from outrider.core.tree import chain
from outrider.core.types import Commit
from outrider.drafters.base import DraftContext, TargetPass
from outrider.drafters.heads.checks import say_length
from outrider.drafters.heads.eagle_model import EagleModel
from outrider.drafters.heads.features import FeatureQueue
from outrider.drafters.heads.layers import HeadOutput
from outrider.drafters.heads.reader import read_eagle
from outrider.drafters.heads.selftest import examine
from outrider.drafters.heads.shipped import head_of
from outrider.drafters.method import DrafterSetup
from outrider.drafters.model.confidence import FOR_HEADS, LogitError
from outrider.drafters.model.self_speculation import SAMPLE
from outrider.drafters.model.tree_drafter import ChainModel, GrowthSettings, TreeDrafter
from outrider.models.base import Want
from outrider.models.nodes import Nodes


class PairModel(ChainModel, Protocol):
    """What reads pairs of a token and a state: an `EagleModel`, or an MTP layer. The members are those of `EagleModel`."""

    taps: tuple[int, ...]
    subset: TokenSubset | None

    def forward(
        self, nodes: Nodes, features: Tensor | None = None, *, g: Tensor | None = None, want: Want = "all"
    ) -> HeadOutput: ...


class EagleDrafter(TreeDrafter):
    """Drafts from the target's features (Li et al. 2025, arXiv 2503.01840; the equations: docs/guides/heads.md).

    The cache holds pairs of the target's features only. What the head feeds back to itself while it drafts is in the scratch,
    which is never committed: the same positions are read again from true features. Pairs wait until they are needed, and all
    but the last one cost only their keys and values.
    """

    def __init__(self, model: PairModel, num_slots: int, max_length: int, **settings: Unpack[GrowthSettings]) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each. settings: see `GrowthSettings`."""
        super().__init__(model, num_slots, max_length, subset=model.subset, **settings)
        self.error = LogitError(FOR_HEADS)
        self.model, self.taps = model, model.taps
        self._queue = FeatureQueue(self.cache)  # the last feature that waits is that of the root's pair
        # slot -> g of the children of each node in the scratch, [place, hidden]
        self._fed_back: dict[int, Tensor] = {}

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        if first == 0:
            self.release(slot)
        self._queue.add(slot, features, first)
        self._read(slot, tokens)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        self.error.learn(context.slots, commits)
        for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
            self._fed_back.pop(slot, None)
            if self._places.pop(slot, None) is not None:
                self.cache.commit([slot], [[0]])  # the root's pair was read, and from the target's features
                self._queue.waiting.pop(slot, None)
            if self._queue.added(slot, tokens, commit):
                self._read(slot, tokens)

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.error.release(slot)
        for held in (self._places, self._fed_back, self._queue.waiting):
            held.pop(slot, None)

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        """Commit the waiting pairs of a slot, all but the last. tokens: the committed ones of the sequence."""
        waiting = self._queue.waiting.get(slot)
        if waiting is None:
            return
        count = len(waiting) - 1
        if count:
            nodes = Nodes(torch.tensor([self._unread(slot, tokens)[:count]]), self.cache, [slot])
            self.model.forward(nodes, waiting[None, :-1], want="none")
            self.cache.commit([slot], [range(count)])
        self._queue.waiting[slot] = waiting[-1:].clone()

    def _unread(self, slot: int, tokens: Sequence[int]) -> list[int]:
        """The tokens of the waiting pairs, and those after them."""
        return [*tokens[self.cache.length[slot] + 1 :]]

    def _room(self, slot: int, tokens: list[int]) -> int:
        waiting = self._queue.waiting.get(slot)
        if waiting is None or self._queue.known(slot) != len(tokens) - 1:
            return 0  # the target has not read enough: the first step of a prompt of one token
        return self.cache.max_length - len(tokens)

    def _before_chain(self, slot: int, tokens: list[int]) -> tuple[list[int], Tensor | None]:
        return self._unread(slot, tokens), self._queue.waiting[slot]

    def _ingested(self, slot: int, count: int) -> None:
        """Commit the first pairs of the scratch, all but the root's."""
        self.cache.commit([slot], [range(count - 1)])
        self._queue.waiting[slot] = self._queue.waiting[slot][-1:]

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
