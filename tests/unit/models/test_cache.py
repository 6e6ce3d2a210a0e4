"""The slot cache against a plain list: what a slot has committed is there, whatever was written, moved, grown or forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.kernels.vectors import packed_width
from outrider.models.cache import KV_CACHE_DTYPES, SCRATCH, SlotCache

SLOTS, MOST, HEADS, DIM, VALUE_DIM = 3, 300, 2, 20, 12
slots = st.integers(0, SLOTS - 1)


class ListedStates:
    """The states of a recurrent layer as plain lists: the tokens that each has read."""

    bytes, most_bytes = 0, 7

    def __init__(self) -> None:
        self.read: list[list[int]] = [[] for _ in range(SLOTS)]
        self.scratch: dict[int, list[int]] = {}

    def commit(self, slot: int, path: Sequence[int]) -> None:
        self.read[slot] += [self.scratch[slot][node] for node in path]

    def reset(self, slot: int) -> None:
        self.read[slot] = []

    def snapshot(self, slot: int) -> list[np.ndarray]:
        return [np.array(self.read[slot])]

    def restore(self, slot: int, state: Sequence[np.ndarray]) -> None:
        self.read[slot] = state[0].tolist()


class Cached(RuleBasedStateMachine):
    """Each token is a number that all its cells hold. `texts` is the model: the committed tokens of each slot."""

    @initialize(dtype=st.sampled_from(list(KV_CACHE_DTYPES)), recurrent=st.booleans())
    def begin(self, dtype: str, recurrent: bool) -> None:
        self.states = ListedStates()
        self.cache = SlotCache(SLOTS, MOST, dtype, {"a": self.states} if recurrent else {})
        self.recurrent, self.texts, self.next = recurrent, [list[int]() for _ in range(SLOTS)], 0
        self.kept: list[tuple[list[int], Any, Any]] = []  # tokens, states, cells
        self.add_layer(0)

    def cells(self) -> list[np.ndarray]:
        return [t for pair in self.cache.layers for t in pair]

    @rule(layer=st.integers(0, 3))
    def add_layer(self, layer: int) -> None:
        """Layers may be made out of order, also when slots hold tokens."""
        new = layer >= len(self.cache.layers) or not self.cache.layers[layer][0].shape[1]
        pair = self.cache.layer(layer, (HEADS, DIM), (1, VALUE_DIM))
        for t, heads, dim in zip(pair, (HEADS, 1), (DIM, VALUE_DIM), strict=True):
            assert t.shape == (SLOTS, heads, self.cache.capacity, packed_width(dim, t.dtype))
            for slot, text in enumerate(self.texts if new else ()):
                t[slot, :, : len(text)] = np.array(text)[:, None]

    @rule(slot=slots, count=st.integers(1, 60), data=st.data())
    def step(self, slot: int, count: int, data: st.DataObject) -> None:
        """Write a scratch and commit a path of it: any increasing nodes."""
        text = self.texts[slot]
        path = sorted(data.draw(st.sets(st.integers(0, count - 1))))[: MOST - len(text)]
        self.cache.reserve([slot], count)
        tokens = [(self.next + i) % 100 for i in range(count)]
        self.next += count
        self.states.scratch[slot] = tokens
        for t in self.cells():
            for i, token in enumerate(tokens):
                t[slot, :, len(text) + i] = token
        self.cache.commit([slot], [path])
        text += [tokens[node] for node in path]

    @precondition(lambda self: self.cache.capacity < MOST)
    @rule(slot=slots)
    def grow(self, slot: int) -> None:
        """A tree that needs more cells than there are."""
        need = self.cache.capacity + 1
        doubled = min(2 * self.cache.capacity, MOST + SCRATCH)
        self.cache.reserve([slot], need - len(self.texts[slot]))
        assert self.cache.capacity == max(need, doubled)

    @rule(slot=slots, share=st.floats(0, 1))
    def keep(self, slot: int, share: float) -> None:
        length = int(share * len(self.texts[slot]))
        left = 0 if self.recurrent and length < len(self.texts[slot]) else length
        assert self.cache.keep(slot, length) == left
        del self.texts[slot][left:]

    @rule(slot=slots)
    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.texts[slot].clear()

    @rule(slot=slots)
    def snapshot(self, slot: int) -> None:
        cells = [tuple(t[slot, :, : len(self.texts[slot])].copy() for t in pair) for pair in self.cache.layers]
        self.kept.append((list(self.texts[slot]), self.cache.snapshot(slot), cells))

    @precondition(lambda self: self.kept)
    @rule(slot=slots, data=st.data())
    def restore(self, slot: int, data: st.DataObject) -> None:
        text, states, cells = data.draw(st.sampled_from(self.kept))
        if [k.shape[0] for k, _ in cells] != [k.shape[1] for k, _ in self.cache.layers]:
            return  # of a time when a layer was still missing
        cut = len(text) // 2
        self.cache.release(slot)
        blocks = [[(k[:, a:b], v[:, a:b]) for k, v in cells] for a, b in ((0, cut), (cut, len(text)))]
        self.cache.restore(slot, len(text), states, blocks)
        self.texts[slot] = list(text)

    @invariant()
    def holds_its_texts(self) -> None:
        assert self.cache.length == [len(text) for text in self.texts]
        for slot, text in enumerate(self.texts):
            for t in self.cells():
                assert (t[slot, :, : len(text)] == np.array(text).astype(t.dtype)[:, None]).all()
            assert not self.recurrent or self.states.read[slot] == text
        assert len({id(t.base) for t in self.cells() if t.size}) <= len(self.cache.layers)
        each = sum(t.nbytes for t in self.cells())
        assert self.cache.bytes == each
        assert self.cache.bytes_per_token == each // (SLOTS * self.cache.capacity)
        assert self.cache.bytes_per_slot == 7 * self.recurrent


Cached.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
test_the_cache = Cached.TestCase
