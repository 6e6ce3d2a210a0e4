"""What reads pairs of a token and a feature of the target, and what a head holds of the features of each text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider.core.sampling import TokenSubset
from outrider.core.types import Array
from outrider.models.base import Chain, DrawnChain, Want
from outrider.models.cache import SlotCache
from outrider.models.native.program import Program
from outrider.models.native.step import NativeStep
from outrider.models.nodes import Nodes

HELD = 512  # positions of a text that a head holds, at most: heads are trained on short texts
NEWEST = 16  # features that wait for a draft, at most, and with which a head starts over
"""Behind nine prompts of 1,500 or 5,838 tokens the head of SmolLM2 had 2.19 of four draft tokens right when it had read the
newest 16 features, 2.17 with none, 2.17 with 256, 1.87 with 512 and 1.11 with all. Features hold what the target knows of the
text before them. To read 16 takes a third of a plain step."""


class HeadOutput(NamedTuple):
    """Of the pairs that were wanted."""

    logits: Array  # float32 [batch, node, draft_vocab]
    g: Array  # float32 [batch, node, hidden], what a head reads in place of features at the children of each node


class PairModel:
    """Reads pairs of a token and a state: a head of the EAGLE family, or an MTP layer. Cell t of a slot holds the keys and values
    of the pair (x_{t+1}, g_t).

    Its program is given features, or what it fed back: a forward is one call, and so are whole chains.

    Attributes:
        taps: Layers of the target whose states are read.
        vocab_size: Tokens of the target.
        max_length: Tokens of the longest text.
        weight_bytes: Bytes of weights that a forward of one pair reads.
        subset: Tokens of the logits; None for all.
    """

    has_draft_chains = True

    def __init__(
        self, program: Program, taps: tuple[int, ...], max_length: int, subset: TokenSubset | None = None
    ) -> None:
        self.taps, self.max_length, self.subset = taps, max_length, subset
        self.vocab_size = program.vocab_size
        self.weight_bytes = sum(m.bytes for m in program.matrices)
        self._step, self._width = NativeStep(program), program.fed_back

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, min(max_length, self.max_length))

    def forward(
        self, nodes: Nodes, features: Array | None = None, *, g: Array | None = None, want: Want = "all"
    ) -> HeadOutput:
        """Read pairs. Each node's token comes with the target's features, or with what its parent fed back.

        Of pairs without logits only keys and values are computed.

        Args:
            nodes: Their tokens.
            features: float [batch, node, taps * target_hidden]; with neither these nor g, zeros.
            g: float32 [batch, node, hidden].
            want: As for `LanguageModel.forward`.
        """
        states = features if features is not None else g
        states = np.zeros((*nodes.tokens.shape, self._width), np.float32) if states is None else states
        logits, _, fed_back = self._step.forward(nodes, (), want, states, features is None)
        assert fed_back is not None
        return HeadOutput(logits, fed_back)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        """See `LanguageModel.draft_chains`. What is fed back stays in the call."""
        return self._step.draft_chains(cache, chains)


def last_nodes(nodes: Nodes, count: int) -> tuple[Array, Array]:
    """(sequence, node) of the last `count` nodes of each sequence, for indexing [batch, node, ...]."""
    return np.arange(len(nodes.slots))[:, None], np.array(nodes.last)[:, None] + np.arange(1 - count, 1)


class FeatureCache:
    """The end of each committed text, in a cache over features of the target.

    Only a draft reads. Of the features that wait for it the newest stay, so neither a long prompt nor a long stretch without
    drafts delays anything. When the cache is full, or features are missing, the head starts over with the newest. Only distances
    count in its attention, so the first cell may hold any position.

    Attributes:
        cache: of what the head has read.
        pairs: it reads pairs of a feature and the token after it. The last pair that waits is that of the root, which is not
            committed.
        waiting: by slot, float [feature] of each position that follows those in the cache.
    """

    def __init__(self, cache: SlotCache, pairs: bool) -> None:
        self.cache, self.pairs, self.waiting = cache, pairs, dict[int, deque[Array]]()
        self._next = dict[int, int]()  # slot -> the position after the last one that is in the cache or waits

    def add(self, slot: int, features: Array, first: int) -> None:
        """Keep features of the positions from `first` on."""
        if first != self._next.get(slot, 0):
            self.release(slot)
        few, most = min(NEWEST, self.cache.max_length // 2), self.cache.max_length
        waiting = self.waiting.setdefault(slot, deque(maxlen=few))
        count = len(waiting) + len(features)
        if count > few or self.cache.length[slot] + count > most - most // 8:
            self.cache.release(slot)
        # rows of a step are views of its features; those of a long prompt would hold all of it
        waiting.extend(features if len(features) <= few else features[-few:].copy())
        self._next[slot] = first + len(features)

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.waiting.pop(slot, None)
        self._next.pop(slot, None)

    def room(self, slot: int, tokens: Sequence[int]) -> int:
        """Tokens that the cache still has room for. 0 if the features of the text have not come, as for a pair after a prompt of
        one token."""
        if self._next.get(slot, 0) != len(tokens) - 1 or (self.pairs and slot not in self.waiting):
            return 0
        return self.cache.max_length - self.cache.length[slot] - len(self.waiting.get(slot, ())) - 1

    def newest(self, slot: int) -> Array:
        """What waits: float32 [position, feature], contiguous."""
        return np.array([*self.waiting[slot]], np.float32)

    def pair_tokens(self, slot: int, tokens: Sequence[int]) -> list[int]:
        """The tokens of the waiting pairs, which are the last ones of the text."""
        return [*tokens[-len(self.waiting[slot]) :]]

    def ingested(self, slot: int, count: int) -> None:
        """Commit the first pairs of the scratch, all but the root's. It is read again with the next draft."""
        if count > 1:
            self.cache.commit([slot], [range(count - 1)])
            self.keep(slot, 1)

    def keep(self, slot: int, count: int) -> None:
        """Let so many of the newest features wait; the others are in the cache."""
        while len(self.waiting[slot]) > count:
            self.waiting[slot].popleft()
