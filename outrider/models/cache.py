"""The slot cache: a committed prefix and the scratch of one step per row. It is committed to, never rolled back.

slots of a row:  [0, length) committed | [length, length + nodes) scratch of this step | rest free
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 256  # the capacity grows by doubling, in blocks of this many slots
SCRATCH = 64  # slots beyond the longest text that the doubling may take; a larger tree takes what it needs


class SlotCache:
    """Keys and values of every layer.

    layers: a pair of tensors [row, kv_head, slot, head_dim] per layer (keys, values), made on first use.
    length: committed tokens of each row; position and slot of a committed token are the same number.
    max_length: tokens a row may commit; the scratch of a step comes on top.
    """

    def __init__(self, rows: int, max_length: int) -> None:
        if rows < 1 or max_length < 1:
            raise ValueError(f"a cache needs at least one row and one slot, got rows={rows}, max_length={max_length}")
        self.rows, self.max_length = rows, max_length
        self.length = [0] * rows
        self.capacity = min(max_length, _BLOCK)
        self.layers: list[tuple[Tensor, Tensor]] = []

    def layer(self, index: int, key: tuple[int, int], value: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a layer; made on first use from (kv_heads, head_dim) of keys and of values."""
        while len(self.layers) <= index:
            self.layers.append(
                tuple(like.new_zeros(self.rows, heads, self.capacity, dim) for heads, dim in (key, value))  # pyright: ignore[reportArgumentType]
            )
        return self.layers[index]

    def reserve(self, rows: Sequence[int], nodes: int) -> None:
        """Make room for `nodes` of scratch behind each of these rows."""
        need = max(self.length[r] for r in rows) + nodes
        if need <= self.capacity:
            return
        capacity = self.capacity
        while capacity < need:
            capacity *= 2
        capacity = max(min(capacity, self.max_length + SCRATCH), need)
        self.layers = [tuple(_grown(t, capacity) for t in pair) for pair in self.layers]  # pyright: ignore[reportAttributeAccessIssue]
        self.capacity = capacity

    def commit(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep these scratch nodes, in this order, behind each row's prefix. A path is increasing node numbers.

        Raises ValueError past the cache's limit.
        """
        for row, path in zip(rows, paths, strict=True):
            start = self.length[row]
            if start + len(path) > self.max_length:
                raise ValueError(
                    f"{start + len(path)} tokens do not fit: this cache holds {self.max_length} per row; raise "
                    "max_model_len or shorten the prompt"
                )
            first = next((i for i, node in enumerate(path) if i != node), len(path))  # nodes in place already
            if first < len(path):
                for tensors in self.layers:
                    for t in tensors:
                        source = torch.as_tensor(path[first:], device=t.device) + start
                        t[row, :, start + first : start + len(path)] = t[row, :, source]
            self.length[row] = start + len(path)

    def keep(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row: what a drafter says of its own guesses once they are judged."""
        if length > self.length[row]:
            raise ValueError(f"row {row} holds {self.length[row]} tokens and cannot keep {length}")
        self.length[row] = length

    def release(self, row: int) -> None:
        """Forget a row."""
        self.length[row] = 0

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair)


def _grown(t: Tensor, capacity: int) -> Tensor:
    out = t.new_zeros(*t.shape[:2], capacity, t.shape[3])
    out[:, :, : t.shape[2]] = t
    return out
