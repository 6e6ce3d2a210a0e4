"""The slot cache of the GPU path, made whole at once: its addresses stay, so graphs can hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from outrider.kernels.gpu import attention
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.checkpoint import free_memory


class GpuCache(SlotCache):
    """Keys and values in bfloat16.

    Args:
        num_slots: of the cache.
        max_length: tokens that a slot may commit. The scratch of a step comes on top.
        capacity: cells that a slot has for both.
        shapes: (heads, numbers of a key, numbers of a value) of the layers that have keys.
        angles: (cosines, sines) of each table, float32 [position, half].
        workspace: of attention, float32, on the device where the cache is made.

    Attributes:
        groups: tensors [part, slot, head, cell, dim], of which `layers` are views: one, unless layers differ in shape.
        placed: of a slot, the path that a step has moved to its committed places already.

    Raises MemoryError if it does not fit.
    """

    def __init__(
        self,
        num_slots: int,
        max_length: int,
        capacity: int,
        shapes: Mapping[int, tuple[int, int, int]],
        angles: Sequence[tuple[Tensor, Tensor]],
        workspace: Tensor,
    ) -> None:
        super().__init__(num_slots, max_length, "bfloat16")
        self.capacity, self.shapes, self.angles, self.workspace = capacity, shapes, angles, workspace
        self.device, self.placed = str(workspace.device), dict[int, list[int]]()
        each = [shapes.get(i, (0, 0, 0)) for i in range(max(shapes) + 1)]
        parts = [(heads, dim) for heads, *dims in each for dim in dims]
        size = 2 * num_slots * capacity * sum(heads * dim for heads, dim in parts)
        free = free_memory(self.device)
        if size > free:
            fitting = max(capacity * free // size - SCRATCH, 0)
            raise MemoryError(
                f"a cache of {num_slots} slots of {max_length} tokens needs {size / 2**30:.1f} GiB, and {self.device} has "
                f"{free / 2**30:.1f} GiB free; {fitting} tokens would fit: lower max_model_len or max_num_seqs"
            )
        made = {
            (heads, dim): torch.zeros(
                parts.count((heads, dim)), num_slots, heads, capacity, dim, dtype=torch.bfloat16, device=self.device
            )
            for heads, dim in parts
        }
        self.groups = [cells for cells in made.values() if cells.numel()]
        views = {shape: iter(cells) for shape, cells in made.items()}
        both = [next(views[shape]) for shape in parts]
        self.layers = list(zip(both[::2], both[1::2], strict=True))

    def reserve(self, slots: Sequence[int], nodes: int) -> None:
        """Raises ValueError if there is no room for so many nodes: this cache never grows."""
        need = max(self.length[slot] for slot in slots) + nodes
        if need > self.capacity:
            raise ValueError(
                f"{nodes} nodes end at cell {need}, and a slot of this cache has {self.capacity}; draft fewer tokens, or raise "
                "max_model_len"
            )

    def block(self, slot: int, start: int, end: int) -> list[tuple[Any, Any]]:
        return [(keys[slot, :, start:end].clone(), values[slot, :, start:end].clone()) for keys, values in self.layers]

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """As `SlotCache.commit`. The cells of a chain stay where they are; those of trees move in one launch."""
        moved = list[tuple[int, list[int]]]()
        for slot, path in zip(slots, paths, strict=True):
            placed, path = self.placed.pop(slot, None), [*path]
            if placed is None and path != [*range(len(path))]:
                moved.append((slot, path))
            elif placed is not None and placed[: len(path)] != path:
                raise RuntimeError(
                    f"a step has moved the path {placed} of slot {slot} already, so {path} is not there any more"
                )
        if moved:
            count, width = len(moved), max(len(path) for _, path in moved)
            flat = (
                [slot for slot, _ in moved]
                + [self.length[slot] for slot, _ in moved]
                + [len(path) - 1 for _, path in moved]
            )
            flat += [n for _, path in moved for n in (*path, *[0] * (width - len(path)))]
            sizes = [count, count, count, count * width]
            at, starts, accepted, nodes = torch.tensor(flat, dtype=torch.int32).to(self.device).split(sizes)
            rows = cast("Any", SimpleNamespace(slots=at, starts=starts))
            for cells in self.groups:
                attention.move(cells, rows, nodes.view(count, width), accepted)
        super().commit(slots, paths)

    def _move(self, slot: int, cell: int, to: int) -> None:
        """`commit` has moved the cells already."""
