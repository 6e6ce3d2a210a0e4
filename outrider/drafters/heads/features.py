"""Features of the target that a head has not read yet, and the drafters that read them into a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.core.types import Commit
from outrider.drafters.base import BaseDrafter, DraftContext, TargetPass
from outrider.drafters.heads.lattice import ParallelDrafter
from outrider.drafters.heads.layers import HeadOutput
from outrider.drafters.model.confidence import LogitError
from outrider.drafters.model.tree_drafter import ChainModel
from outrider.models.base import Want
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes


class PairModel(ChainModel, Protocol):
    """What reads pairs of a token and a state: an `EagleModel`, or an MTP layer. The members are those of `EagleModel`."""

    taps: tuple[int, ...]
    subset: TokenSubset | None

    def forward(
        self, nodes: Nodes, features: Tensor | None = None, *, g: Tensor | None = None, want: Want = "all"
    ) -> HeadOutput: ...


READ = 64  # features that wait before they are read: a sequence that drafts nothing costs little


class FeatureQueue:
    """Features that follow those in a cache, by slot. `waiting` holds them: float32 [position, feature]."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.waiting: dict[int, Tensor] = {}

    def known(self, slot: int) -> int:
        """Positions that are in the cache or wait."""
        return self.cache.length[slot] + len(self.waiting.get(slot, ()))

    def add(self, slot: int, features: Tensor, first: int) -> None:
        """Keep features of the positions from `first` on. Without those before them, or beyond the cache, nothing is kept: the
        sequence goes on without drafts."""
        known = self.known(slot)
        if first != known or known + len(features) > self.cache.max_length:
            self.waiting.pop(slot, None)
            return
        held = self.waiting.get(slot)
        new = features.to(torch.float32, copy=held is None)
        self.waiting[slot] = new.contiguous() if held is None else torch.cat([held, new])

    def added(self, slot: int, tokens: Sequence[int], commit: Commit) -> bool:
        """Keep those of a step. tokens: the committed ones. Returns whether so many wait that they should be read."""
        if commit.features is not None and len(commit.features):
            self.add(slot, commit.features, len(tokens) - 1 - len(commit.features))
            return len(self.waiting.get(slot, ())) > READ
        return False


class FeatureReader(BaseDrafter):
    """A drafter with a cache over the committed text, which reads features of the target. Write `_read`.

    error: how far its logits are from the target's.
    """

    cache: SlotCache
    error: LogitError
    _queue: FeatureQueue

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        if first == 0:
            self.release(slot)
        self._queue.add(slot, features, first)
        self._read(slot, tokens)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        self.error.learn(context.slots, commits)
        for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
            if self._queue.added(slot, tokens, commit):
                self._read(slot, tokens)

    def release(self, slot: int) -> None:
        self.error.release(slot)
        self.cache.release(slot)
        self._queue.waiting.pop(slot, None)

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        """Commit what waits. tokens: the committed ones of the sequence."""
        raise NotImplementedError

    def _left(self, slot: int, tokens: Sequence[int]) -> int:
        """Tokens that the cache still has room for. 0 if the target has not read the text, or it is longer than the head."""
        return self.cache.max_length - len(tokens) if self._queue.known(slot) == len(tokens) - 1 else 0


class PairReader(FeatureReader):
    """Reads pairs of a token and a feature. The last pair that waits is that of the root, which is not committed."""

    model: PairModel

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        waiting = self._queue.waiting.get(slot)
        if waiting is None or len(waiting) < 2:
            return
        count = len(waiting) - 1
        nodes = Nodes(torch.tensor([self._unread(slot, tokens)[:count]]), self.cache, [slot])
        self.model.forward(nodes, waiting[None, :-1], want="none")
        self._ingested(slot, count + 1)

    def _unread(self, slot: int, tokens: Sequence[int]) -> list[int]:
        """The tokens of the waiting pairs, and those after them."""
        return [*tokens[self.cache.length[slot] + 1 :]]

    def _ingested(self, slot: int, count: int) -> None:
        """Commit the first pairs of the scratch, all but the root's. It is read again with the next draft."""
        self.cache.commit([slot], [range(count - 1)])
        self._queue.waiting[slot] = self._queue.waiting[slot][-1:].clone()

    def _left(self, slot: int, tokens: Sequence[int]) -> int:
        # a prompt of one token has no pair yet
        return super()._left(slot, tokens) if slot in self._queue.waiting else 0


class ContextDrafter(FeatureReader, ParallelDrafter):
    """A parallel drafter with a cache over the committed text. Write `_read`, and what `ParallelDrafter` asks for.

    drafts: draft tokens that one forward gives.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        subset: TokenSubset | None,
        cache: SlotCache,
        taps: tuple[int, ...],
        drafts: int,
    ) -> None:
        ParallelDrafter.__init__(self, vocab_size, device, subset)
        self.cache, self.taps, self._drafts = cache, taps, drafts
        self._queue = FeatureQueue(cache)

    def _depth(self, slot: int, tokens: Sequence[int]) -> int:
        return min(self._drafts, self._left(slot, tokens))
