"""The input of a model's forward: the nodes of a batch of draft trees, and the cache slots they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outrider.core.tree import ancestor_mask, depth
from outrider.kernels import cpu as native
from outrider.models.cache import SlotCache


@dataclass(frozen=True, eq=False)
class Nodes:
    """The new nodes of one forward. One line of `tokens` belongs to one slot of the cache.

    tokens: int64 [batch, node]. A chunk of a prompt, or the nodes of a draft tree; `Draft.tokens` as it is.
    slots: the cache slot of each line of the batch. A slot appears once.
    parents: int64 [batch, held + node], with -1 for the root and -2 for padding. None means a full chain.

    If `parents` is longer than `tokens`, an earlier forward of the same step has written the first `held` nodes to the
    scratch already. `tokens` are then the nodes after them, and any of the held nodes may be their parents. Drafters
    grow a tree in this way, level by level. Padding may then stand anywhere.

    Every property is derived on first use.
    """

    tokens: np.ndarray
    cache: SlotCache
    slots: list[int]
    parents: np.ndarray | None = None

    @property
    def count(self) -> int:
        """New nodes of each tree, padding included."""
        return self.tokens.shape[1]

    @cached_property
    def held(self) -> int:
        """Nodes of each tree that an earlier forward has written to the scratch."""
        return 0 if self.parents is None else self.parents.shape[1] - self.count

    @property
    def total(self) -> int:
        """Nodes of each tree, held and new."""
        return self.held + self.count

    @cached_property
    def lengths(self) -> list[int]:
        """Committed tokens of each slot."""
        return [self.cache.length[s] for s in self.slots]

    @cached_property
    def tree(self) -> np.ndarray:
        """int64 [batch, held + node]: parents, also for a chain."""
        if self.parents is not None:
            return self.parents
        return np.tile(np.arange(-1, self.count - 1), (len(self.slots), 1))

    @cached_property
    def parent_lists(self) -> list[list[int]]:
        """`tree` as lists."""
        return self.tree.tolist()

    @cached_property
    def _positions(self) -> np.ndarray:
        """int64 [batch, held + node]: token positions."""
        level = np.arange(self.count) if self.parents is None else depth(self.parents)
        return np.array(self.lengths)[:, None] + level

    @property
    def positions(self) -> np.ndarray:
        """int64 [batch, node]: token positions of the new nodes."""
        return self._positions[:, self.held :]

    @cached_property
    def last(self) -> list[int]:
        """The last new node of each tree that is not padding. 0 if all are padding."""
        if self.parents is None:
            return [self.count - 1] * len(self.slots)
        real = (self.tree[:, self.held :] >= -1) * np.arange(1, self.count + 1)
        return np.maximum(real.max(1) - 1, 0).tolist()

    @cached_property
    def span(self) -> int:
        """Number of cells that masks cover: up to the end of the longest scratch."""
        return max(self.lengths) + self.total

    @cached_property
    def plan(self) -> native.AttentionPlan:
        """The same nodes as the native attention kernel reads them."""
        return native.AttentionPlan(
            self.slots, self.lengths, self.count, None if self.parents is None else self.tree, self.held
        )

    def mask(self, window: int | None) -> np.ndarray:
        """bool [batch, node, cell]: the cells that a node attends to, committed ones and its ancestors, of the last `window`
        positions, its own included."""
        # number of each cell in its scratch; negative for committed cells
        offset, here = np.arange(self.span) - np.array(self.lengths)[:, None], self._positions
        node = offset.clip(0, self.total - 1)
        above = ancestor_mask(self.tree)[:, self.held :]
        inside = offset < self.total
        seen = np.take_along_axis(above, node[:, None].repeat(self.count, 1), 2) & inside[:, None]
        seen |= offset[:, None] < 0
        if window is None:
            return seen
        where = np.where((offset >= 0) & inside, np.take_along_axis(here, node, 1), np.arange(self.span))
        return seen & (here[:, self.held :, None] - where[:, None] < window)

    @cached_property
    def visible_cells(self) -> list[list[np.ndarray]]:
        """For each tree and each new node: the cells it attends to, by increasing position."""
        out = []
        for start, parents in zip(self.lengths, self.parent_lists, strict=True):
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append([*(paths[parent] if parent >= 0 else []), node])
            out.append([np.array([*range(start), *(start + p for p in path)]) for path in paths[self.held :]])
        return out
