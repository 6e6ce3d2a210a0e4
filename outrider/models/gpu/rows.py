"""The rows of a forward: all that kernels read of its nodes, in one buffer that one copy fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SHORT = 1024  # tokens; the first of the lengths of `reach`
_ALIGN = 4  # numbers: a field begins at 16 bytes, so kernels may read it in wide steps


class Rows:
    """Views of a buffer, int32 [number], for `entries` sequences of `nodes` nodes each, one entry after another.

    width: nodes of the longest path of a tree; 0: chains, whose cells are their positions, and which have no `paths`. length: no
    position reaches it; see `reach`.

    Attributes:
        seeds: int64 [entry], of the noise.
        temperatures: float32 [entry]; 0: greedy.
        slots, starts: int32 [entry]: of the cache, and the committed tokens there. Entries that are unused have 0.
        tokens, positions, cells: int32 [row]: a token, its place in the text, and the cell of the slot that it is written to. The
            position is -1 for rows that are unused: they write nothing and read nothing.
        last: int32 [entry]: the rows whose logits are wanted, where only the last ones are.
        parents: int32 [row]: the parent's node; -1: the root, -2: unused. Trees and chains have it.
        paths: int32 [row, width]: the scratch nodes from the root down to the row's own, then 0. Node n is in cell start + n.
    """

    def __init__(self, buffer: Tensor, entries: int, nodes: int, width: int = 0, length: int = 0) -> None:
        self.entries, self.nodes, self.width, self.count, self.length = entries, nodes, width, entries * nodes, length
        at = 0

        def field(kind: torch.dtype, *shape: int) -> Tensor:
            nonlocal at
            size = int(np.prod(shape)) * kind.itemsize // 4
            begin, at = at, at + -(-size // _ALIGN) * _ALIGN
            return buffer[begin : begin + size].view(kind).view(shape)

        self.seeds = field(torch.int64, entries)
        self.temperatures = field(torch.float32, entries)
        self.slots, self.starts, self.last = (field(torch.int32, entries) for _ in range(3))
        self.tokens, self.positions, self.cells = (field(torch.int32, self.count) for _ in range(3))
        self.parents: Tensor | None = field(torch.int32, self.count)
        self.paths: Tensor | None = field(torch.int32, self.count, width) if width else None
        self.size = at

    @staticmethod
    def room(rows: int, width: int) -> int:
        """Numbers of a buffer that holds any rows up to so many, with paths of this width."""
        return rows * (6 + 4 + width) + 10 * _ALIGN


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Of each node, the nodes from the root down to it."""
    out = list[list[int]]()
    for node, parent in enumerate(parents):
        out.append([*(out[parent] if parent >= 0 else ()), node])
    return out


def reach(length: int) -> int:
    """A length that texts of a forward share: 1,024, 4,096 and so on. It sets how many programs read a text, and no bit."""
    return next(bound for n in range(16) if (bound := _SHORT << 2 * n) >= length)


class RowBuffer:
    """The buffer of a device, and the one of the host that is copied to it."""

    def __init__(self, device: str, rows: int, width: int) -> None:
        """rows, width: the largest."""
        self.width, size = width, Rows.room(rows, width)
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=self.device.is_cuda)
        self._sent = torch.cuda.Event() if self.device.is_cuda else None
        self._views = dict[tuple[int, ...], tuple[Rows, dict[str, Any]]]()

    def views(
        self, entries: int, nodes: int, width: int, length: int, at: int = 0
    ) -> tuple[Rows, dict[str, np.ndarray]]:
        """The rows of the device, and the same fields of the host to fill before `send`. It waits for the copy of the last.

        at: the number of the buffer that they begin with, a multiple of 4."""
        if self._sent is not None:
            self._sent.synchronize()
        shape = entries, nodes, width, length
        key = *shape, at
        if key not in self._views:
            here = vars(Rows(self.host[at:], *shape))
            arrays = {name: field.numpy() for name, field in here.items() if isinstance(field, Tensor)}
            self._views[key] = Rows(self.device[at:], *shape), arrays
        return self._views[key]

    def send(self, size: int) -> None:
        """Copy so many numbers to the device."""
        self.device[:size].copy_(self.host[:size], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
