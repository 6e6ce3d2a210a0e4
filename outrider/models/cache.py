"""The slot cache. A slot holds the keys and values of one sequence: its committed tokens, then the scratch of one step.

Recurrent layers have a state in place of them (`outrider.models.states`).

cells of a slot:  [0, length) committed | [length, length + nodes) scratch of this step | rest free

A step writes its draft tree to the scratch. `commit` keeps one path of it. No step is rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.suggest import did_you_mean
from outrider.kernels import cpu as native
from outrider.kernels.vectors import packed_width
from outrider.models.states import SlotStates

# How keys and values may be kept. None: as the model computes them, which is float32 on the CPU.
KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
# Cells of a slot at first. The capacity then doubles as needed.
_BLOCK = 256
# Cells past `max_length` that the doubling may add. A larger tree takes what it needs.
SCRATCH = 64
_LINE = 64  # bytes: a tensor begins at a multiple


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
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._cells: list[Any] = []  # the same tensors, as what moves a cell with the least overhead
        self.states = dict(states or {})

    def layer(self, index: int, key: tuple[int, int], value: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a layer; made on first use, see `make`."""
        self.make({index: (key, value)}, like)
        return self.layers[index]

    def make(self, shapes: Mapping[int, tuple[tuple[int, int], tuple[int, int]]], like: Tensor) -> None:
        """Make the layers that are missing, all of them in one piece of memory.

        shapes: (kv_heads, head_dim) of the keys and of the values of each layer. like: a tensor on the device, and of the dtype
        if the cache's is "auto".
        """
        dtype = KV_CACHE_DTYPES[self.dtype] or like.dtype
        while len(self.layers) <= max(shapes, default=-1):
            nothing = like.new_zeros(self.num_slots, 0, self.capacity, 0, dtype=dtype)
            self.layers.append((nothing, nothing))
        new = [i for i in shapes if not self.layers[i][0].shape[1]]
        wanted = [(self.num_slots, h, self.capacity, packed_width(d, dtype)) for i in new for h, d in shapes[i]]
        tensors = _zeros(wanted, dtype, like.device)
        for i, keys, values in zip(new, tensors[::2], tensors[1::2], strict=True):
            self.layers[i] = keys, values
        if new:
            self._cells.clear()

    def shorten(self, max_length: int) -> None:
        """Let a slot commit so many tokens at most."""
        self.max_length = min(self.max_length, max_length)

    def reserve(self, slots: Sequence[int], nodes: int) -> None:
        """Make room for `nodes` cells of scratch after the committed tokens of each of these slots."""
        need = max(self.length[s] for s in slots) + nodes
        if need <= self.capacity:
            return
        capacity = self.capacity
        while capacity < need:
            capacity *= 2
        capacity = max(min(capacity, self.max_length + SCRATCH), need)
        old = [t for pair in self.layers for t in pair]
        if old:
            new = _zeros([(*t.shape[:2], capacity, t.shape[3]) for t in old], old[0].dtype, old[0].device)
            for to, t in zip(new, old, strict=True):
                to[:, :, : self.capacity] = t
            self.layers = list(zip(new[::2], new[1::2], strict=True))
            self._cells.clear()
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
        if not self._cells:
            every = [t for pair in self.layers for t in pair]
            self._cells = [t.view(torch.uint8).numpy() if t.device.type == "cpu" else t for t in every]
        for cells in self._cells:
            cells[slot, :, to] = cells[slot, :, cell]

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

    def snapshot(self, slot: int) -> list[list[Tensor]]:
        """A copy of the states after the committed tokens of a slot."""
        return [states.snapshot(slot) for states in self.states.values()]

    def restore(
        self,
        slot: int,
        length: int,
        snapshot: Sequence[Sequence[Tensor]],
        blocks: Sequence[Sequence[tuple[Tensor, Tensor]]] = (),
    ) -> None:
        """Commit `length` tokens to an empty slot.

        snapshot: the states after them. blocks: of each block of tokens the keys and values of all layers, [kv_head, token,
        head_dim] each; none if they are in place.
        """
        if blocks:
            self.reserve([slot], length)
            for layer, (keys, values) in enumerate(self.layers):
                keys[slot, :, :length] = torch.cat([block[layer][0] for block in blocks], 1)
                values[slot, :, :length] = torch.cat([block[layer][1] for block in blocks], 1)
        for states, old in zip(self.states.values(), snapshot, strict=True):
            states.restore(slot, old)
        self.length[slot] = length

    @property
    def bytes(self) -> int:
        """Taken now: keys, values and states."""
        return sum(states.bytes for states in self.states.values()) + sum(
            t.numel() * t.element_size() for pair in self.layers for t in pair
        )

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in one slot."""
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair) // (
            self.num_slots * self.capacity
        )

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


def _zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors of zeros, one after another in memory. On the CPU that lies in large pages, where the system has them: short
    texts keep little for a layer, and attention reads as fast as it finds the addresses."""
    sizes = [-(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE for shape in shapes]
    if device.type == "cpu" and native.available():
        memory = torch.from_numpy(native.zeros_in_large_pages(sum(sizes)))
    else:
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    parts = (part[: math.prod(shape) * dtype.itemsize] for part, shape in zip(memory.split(sizes), shapes, strict=True))
    return [part.view(dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]
