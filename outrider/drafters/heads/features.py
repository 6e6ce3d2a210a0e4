"""Features of the target that a head has not read yet, and the drafters that read them into a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.core.types import Commit
from outrider.drafters.base import DraftContext, TargetPass
from outrider.drafters.heads.lattice import ParallelDrafter
from outrider.models.cache import SlotCache

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


class ContextDrafter(ParallelDrafter):
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
        super().__init__(vocab_size, device, subset)
        self.cache, self.taps, self._drafts = cache, taps, drafts
        self._queue = FeatureQueue(cache)

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

    def _depth(self, slot: int, tokens: Sequence[int]) -> int:
        if (
            self._queue.known(slot) != len(tokens) - 1
        ):  # the text is longer than the head, or the target has not read it
            return 0
        return min(self._drafts, self.cache.max_length - len(tokens))
