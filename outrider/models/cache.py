"""The slot cache. A slot holds the keys and values of one sequence: its committed tokens, then the scratch of one step.

Recurrent layers have a state in place of them (`outrider.models.hf.states`).

cells of a slot:  [0, length) committed | [length, length + nodes) scratch of this step | rest free

A step writes its draft tree to the scratch. `commit` keeps one path of it. No step is rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from outrider.core.suggest import did_you_mean
from outrider.kernels import cpu as native
from outrider.kernels.vectors import packed_width

# How keys and values may be kept. None: as the model computes them, which is float32 on the CPU.
KV_CACHE_DTYPES: dict[str, np.dtype | None] = {
    "auto": None,
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
}
# Cells of a slot at first. The capacity then doubles as needed.
_BLOCK = 256
# Cells past `max_length` that the doubling may add. A larger tree takes what it needs.
SCRATCH = 64
_LINE = 64  # bytes: a tensor begins at a multiple


class SlotStates(Protocol):
    """The committed states of each slot in recurrent layers, and the scratch of a step."""

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the state after the last node of a path from the root. Raises ValueError for nodes that are no such path."""
        ...

    def reset(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        ...

    def snapshot(self, slot: int) -> list[np.ndarray]:
        """A copy of the committed state of a slot."""
        ...

    def restore(self, slot: int, state: Sequence[np.ndarray]) -> None:
        """Give a slot the committed state that `snapshot` returned."""
        ...

    @property
    def bytes(self) -> int:
        """Of the committed states of all slots, and of the others that are in memory now."""
        ...

    @property
    def most_bytes(self) -> int:
        """The most that one slot takes: the committed state, and those of a step."""
        ...


class SlotCache:
    """Keys and values of every layer, and the states of recurrent layers.

    Args:
        layers: (keys, values) of each layer, both [slot, kv_head, cell, head_dim]. They are made on first use; a layer without
            keys has no kv_head. With another dtype than "auto" the last dim is that of `outrider.kernels.vectors`.
        states: of recurrent layers, by a key that the model chooses. Empty without such layers.
        dtype: how keys and values are kept, a name of KV_CACHE_DTYPES.
        length: committed tokens of each slot. A committed token at position n is in cell n.
        max_length: tokens that a slot may commit. The scratch of a step comes on top.
        capacity: cells that each slot has now.
    """

    def __init__(
        self,
        num_slots: int,
        max_length: int,
        dtype: str = "auto",
        states: Mapping[Hashable, SlotStates] | None = None,
    ) -> None:
        """Raises ValueError for fewer than one slot or cell, and for an unknown dtype."""
        if num_slots < 1 or max_length < 1:
            raise ValueError(f"a cache needs at least one slot and one cell, got {num_slots=}, {max_length=}")
        check_kv_cache_dtype(dtype)
        self.num_slots, self.max_length, self.dtype = num_slots, max_length, dtype
        self.length = [0] * num_slots
        self.capacity = min(max_length, _BLOCK)
        self.layers: list[tuple[Any, Any]] = []  # arrays, or tensors on a device
        self.states = dict(states or {})
        self.kept: dict[object, Any] = {}  # what a program of native code keeps of it, by program

    def layer(
        self, index: int, key: tuple[int, int], value: tuple[int, int], dtype: DTypeLike = np.float32
    ) -> tuple[Any, Any]:
        """The keys and values of a layer; made on first use, see `make`."""
        self.make({index: (key, value)}, dtype)
        return self.layers[index]

    def make(
        self, shapes: Mapping[int, tuple[tuple[int, int], tuple[int, int]]], dtype: DTypeLike = np.float32
    ) -> None:
        """Make the layers that are missing, all of them in one piece of memory.

        shapes: (kv_heads, head_dim) of the keys and of the values of each layer. dtype: if the cache's is "auto".
        """
        kept = np.dtype(KV_CACHE_DTYPES[self.dtype] or dtype)
        while len(self.layers) <= max(shapes, default=-1):
            nothing = self._zeros([(self.num_slots, 0, self.capacity, 0)] * 2, kept)
            self.layers.append((nothing[0], nothing[1]))
        new = [i for i in shapes if not self.layers[i][0].shape[1]]
        wanted = [(self.num_slots, h, self.capacity, packed_width(d, kept)) for i in new for h, d in shapes[i]]
        arrays = self._zeros(wanted, kept)
        for i, keys, values in zip(new, arrays[::2], arrays[1::2], strict=True):
            self.layers[i] = keys, values

    def shorten(self, max_length: int) -> None:
        """Let a slot commit so many tokens at most."""
        self.max_length = min(self.max_length, max_length)

    def reserve(self, slots: Sequence[int], nodes: int) -> None:
        """Make room for `nodes` cells of scratch after the committed tokens of each of these slots."""
        need = max([self.length[s] for s in slots]) + nodes
        if need <= self.capacity:
            return
        capacity = self.capacity
        while capacity < need:
            capacity *= 2
        capacity = max(min(capacity, self.max_length + SCRATCH), need)
        old = [t for pair in self.layers for t in pair]
        if old:
            new = self._zeros([(*t.shape[:2], capacity, t.shape[3]) for t in old], old[0].dtype)
            for to, t in zip(new, old, strict=True):
                to[:, :, : self.capacity] = t
            self.layers = list(zip(new[::2], new[1::2], strict=True))
        self.capacity = capacity

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Append one path of scratch nodes to the committed tokens of each slot. A path is increasing node numbers.

        Raises ValueError if a slot would hold more than `max_length` tokens.
        """
        for slot, path in zip(slots, paths, strict=True):
            start = self.length[slot]
            if start + len(path) > self.max_length:
                raise ValueError(
                    f"{start + len(path)} tokens do not fit: this cache holds {self.max_length} per slot; raise "
                    "max_model_len or shorten the prompt"
                )
            for states in self.states.values():
                states.commit(slot, path)
            for to, node in enumerate(path):
                if to != node:
                    self._move(slot, start + node, start + to)
            self.length[slot] = start + len(path)

    def _move(self, slot: int, cell: int, to: int) -> None:
        """Copy a cell of every layer to an earlier one."""
        for keys, values in self.layers:
            keys[slot, :, to] = keys[slot, :, cell]
            values[slot, :, to] = values[slot, :, cell]

    def keep(self, slot: int, length: int) -> int:
        """Truncate a slot to its first `length` tokens. Only drafters call this, for their own cache.

        Returns how many tokens the slot holds then. A state cannot be truncated, so a cache with states forgets them all.
        Raises ValueError if the slot holds fewer tokens.
        """
        if length > self.length[slot]:
            raise ValueError(f"slot {slot} holds {self.length[slot]} tokens and cannot keep {length}")
        if self.states and length < self.length[slot]:
            self.release(slot)
        else:
            self.length[slot] = length
        return self.length[slot]

    def release(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        self.length[slot] = 0
        for states in self.states.values():
            states.reset(slot)

    def block(self, slot: int, start: int, end: int) -> list[tuple[Any, Any]]:
        """A copy of some committed cells of a slot: of each layer the keys and the values, [kv_head, token, head_dim]."""
        return [(keys[slot, :, start:end].copy(), values[slot, :, start:end].copy()) for keys, values in self.layers]

    def snapshot(self, slot: int) -> list[list[np.ndarray]]:
        """A copy of the states after the committed tokens of a slot."""
        return [states.snapshot(slot) for states in self.states.values()]

    def restore(
        self,
        slot: int,
        length: int,
        snapshot: Sequence[Sequence[np.ndarray]],
        blocks: Sequence[Sequence[tuple[Any, Any]]] = (),
    ) -> None:
        """Commit `length` tokens to an empty slot.

        snapshot: the states after them. blocks: what `block` gave of its tokens, in order; none if they are in place.
        """
        if blocks:
            self.reserve([slot], length)
        for layer, pair in enumerate(self.layers):
            for part, cells in enumerate(pair):
                end = 0
                for block in blocks:
                    start, end = end, end + block[layer][part].shape[1]
                    cells[slot, :, start:end] = block[layer][part]
        for states, old in zip(self.states.values(), snapshot, strict=True):
            states.restore(slot, old)
        self.length[slot] = length

    def _zeros(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> list[Any]:
        """Arrays of zeros, one after another in memory. That lies in large pages, where the system has them: short texts keep
        little for a layer, and attention reads as fast as it finds the addresses."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE for shape in shapes]
        memory = (native.zeros_in_large_pages if native.available() else partial(np.zeros, dtype=np.uint8))(sum(sizes))
        starts = accumulate(sizes, initial=0)
        return [np.ndarray(shape, dtype, memory, start) for shape, start in zip(shapes, starts, strict=False)]

    @property
    def bytes(self) -> int:
        """Taken now: keys, values and states."""
        return sum(states.bytes for states in self.states.values()) + sum(
            t.nbytes for pair in self.layers for t in pair
        )

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in one slot."""
        return sum(t.nbytes for pair in self.layers for t in pair) // (self.num_slots * self.capacity)

    @property
    def bytes_per_slot(self) -> int:
        """The most that the states of one slot take, however long its text: the committed ones and those of a step."""
        return sum(states.most_bytes for states in self.states.values())


def check_kv_cache_dtype(given: str) -> None:
    """Raise ValueError, with the nearest known name, unless `given` is a name of KV_CACHE_DTYPES."""
    if given not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype must be {', '.join(KV_CACHE_DTYPES)}; got {given!r}{did_you_mean(str(given), KV_CACHE_DTYPES)}"
        )
