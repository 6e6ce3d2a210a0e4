"""The slot cache of the GPU path: made whole at once, so that addresses never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.gpu import attention
from outrider.models.cache import SlotCache
from outrider.models.checkpoint import free_memory


class GpuCache(SlotCache):
    """Keys and values in bfloat16. They never grow.

    Args:
        num_slots: of the cache.
        max_length: tokens that a slot may commit. The scratch of a step comes on top.
        capacity: cells of a slot.
        cells: (heads, numbers of a key, numbers of a value) of each layer.
        angles: (cosines, sines) of each table, float32 [position, half].
        workspace: of attention, float32 [numbers].

    `groups` are the tensors [layer and part, slot, head, cell, dim] that `layers` are views of: one, unless layers differ in
    shape. `placed`: of slots, the path that a step has already moved to its cells on the device.

    Raises MemoryError if it does not fit.
    """

    def __init__(
        self,
        num_slots: int,
        max_length: int,
        capacity: int,
        cells: Mapping[int, tuple[int, int, int]],
        angles: Sequence[tuple[Tensor, Tensor]],
        workspace: Tensor,
    ) -> None:
        super().__init__(num_slots, max_length, "bfloat16")
        self.angles, self.workspace, self.capacity = angles, workspace, capacity
        device = self.device = str(workspace.device)
        shapes = [(heads, dim) for i in range(max(cells) + 1) for heads, *dims in [cells.get(i, (0, 0, 0))] for dim in dims]
        size = 2 * num_slots * self.capacity * sum(heads * dim for heads, dim in shapes)
        free = 0 if device == "cpu" else free_memory(device)
        if free and size > free:
            raise MemoryError(
                f"a cache of {num_slots} slots of {max_length} tokens needs {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are "
                f"free on {device}; about {max_length * free // size} tokens would fit: lower max_model_len or max_num_seqs"
            )
        kinds = dict.fromkeys(shapes)
        tensors = {
            (heads, dim): torch.zeros(
                shapes.count((heads, dim)), num_slots, heads, self.capacity, dim, dtype=torch.bfloat16, device=device
            )
            for heads, dim in kinds
        }
        self.groups, each = list(tensors.values()), {shape: iter(tensor) for shape, tensor in tensors.items()}
        parts = [next(each[shape]) for shape in shapes]
        self.layers = list(zip(parts[::2], parts[1::2], strict=True))
        self.placed = dict[int, list[int]]()

    def reserve(self, slots: Sequence[int], nodes: int) -> None:
        """Raise ValueError if there is no room for so many nodes: this cache never grows."""
        need = max(self.length[s] for s in slots) + nodes
        if need > self.capacity:
            raise ValueError(
                f"{nodes} nodes need {need} cells, and a slot of this cache has {self.capacity}; lower num_speculative_tokens, or "
                "raise max_model_len"
            )

    def block(self, slot: int, start: int, end: int) -> list[tuple[Any, Any]]:
        return [(keys[slot, :, start:end].clone(), values[slot, :, start:end].clone()) for keys, values in self.layers]

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """As `SlotCache.commit`. All cells of all slots move in one launch for each group; those of a chain stay where they are."""
        moved = list[tuple[int, int, list[int]]]()
        for slot, path in zip(slots, paths, strict=True):
            placed, path = self.placed.pop(slot, None), [*path]
            if placed is None and path != [*range(len(path))]:
                moved.append((slot, self.length[slot], path))
            elif placed is not None and placed[: len(path)] != path:
                raise RuntimeError(f"a step has moved the path {placed} of slot {slot} already, and {path} is gone")
        if moved:
            width, count = max(len(path) for *_, path in moved), len(moved)
            flat = [*(s for s, *_ in moved), *(n for _, n, _ in moved), *(len(path) - 1 for *_, path in moved)]
            flat += [n for *_, path in moved for n in (*path, *[0] * (width - len(path)))]
            every = torch.tensor(flat, dtype=torch.int32).to(self.device)
            at, starts, accepted, nodes = every.split([count, count, count, width * count])
            for cells in self.groups:
                attention.move(cells, SimpleNamespace(slots=at, starts=starts), nodes.view(count, width), accepted)
        super().commit(slots, paths)

    def _move(self, slot: int, cell: int, to: int) -> None:
        """`commit` has moved all cells in one launch."""
