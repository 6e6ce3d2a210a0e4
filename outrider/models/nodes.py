"""The input of a model's forward: the nodes of a batch of draft trees, and the cache slots they belong to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

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

    Every property is derived on first use, on the host, and moved to the device of `tokens` once per forward.
    """

    tokens: Tensor
    cache: SlotCache
    slots: list[int]
    parents: Tensor | None = None

    def __post_init__(self) -> None:
        """The loop holds numpy arrays. Temporary, until the nodes do so too."""
        object.__setattr__(self, "tokens", torch.as_tensor(self.tokens))
        if self.parents is not None:
            object.__setattr__(self, "parents", torch.as_tensor(self.parents))

    def to(self, device: torch.device) -> Nodes:
        """The same nodes with `tokens` on a device. `parents` stay where they are."""
        return self if self.tokens.device == device else replace(self, tokens=self.tokens.to(device))

    @property
    def device(self) -> torch.device:
        return self.tokens.device

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
    def tree(self) -> Tensor:
        """int64 [batch, held + node]: parents on the host, also for a chain."""
        if self.parents is not None:
            return self.parents.cpu()
        return torch.arange(-1, self.count - 1).repeat(len(self.slots), 1)

    @cached_property
    def parent_lists(self) -> list[list[int]]:
        """`tree` as lists."""
        return self.tree.tolist()

    @cached_property
    def _positions(self) -> Tensor:
        """int64 [batch, held + node]: token positions on the host. [1, node] + lengths for a chain."""
        level = torch.arange(self.count)[None] if self.parents is None else torch.as_tensor(depth(self.tree.numpy()))
        return torch.tensor(self.lengths)[:, None] + level

    @cached_property
    def positions(self) -> Tensor:
        """int64 [batch, node]: token positions of the new nodes, on the device."""
        return self._positions[:, self.held :].to(self.device)

    @cached_property
    def last(self) -> list[int]:
        """The last new node of each tree that is not padding. 0 if all are padding."""
        if self.parents is None:
            return [self.count - 1] * len(self.slots)
        real = (self.tree[:, self.held :] >= -1) * torch.arange(1, self.count + 1)
        return (real.amax(1) - 1).clamp_min(0).tolist()

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

    @cached_property
    def index(self) -> slice | Tensor:
        """The slots as an index into the cache. A slice if possible, because a slice copies nothing."""
        first = self.slots[0]
        if self.slots == list(range(first, first + len(self.slots))):
            return slice(first, first + len(self.slots))
        return torch.tensor(self.slots, device=self.device)

    @cached_property
    def _offset(self) -> Tensor:
        """int64 [batch, cell]: number of a cell in its scratch. Negative for committed cells."""
        return torch.arange(self.span)[None] - torch.tensor(self.lengths)[:, None]

    @cached_property
    def visible(self) -> Tensor:
        """bool [batch, node, cell]: what a node attends to, committed cells and its ancestors."""
        offset = self._offset[:, None].expand(-1, self.count, -1)
        ancestor = torch.as_tensor(ancestor_mask(self.tree.numpy()))[:, self.held :].gather(
            2, offset.clamp(0, self.total - 1)
        )
        return ((offset < 0) | (ancestor & (offset < self.total))).to(self.device)

    @cached_property
    def distance(self) -> Tensor:
        """int64 [batch, node, cell]: how many positions back the token of a cell is."""
        offset, here = self._offset, self._positions
        scratch = here.expand(len(self.slots), -1).gather(1, offset.clamp(0, self.total - 1))
        where = torch.where((offset >= 0) & (offset < self.total), scratch, torch.arange(self.span))
        return (here[:, self.held :, None] - where[:, None, :]).to(self.device)

    @cached_property
    def _masks(self) -> dict[int | None, Tensor]:
        return {}

    def mask(self, window: int | None) -> Tensor:
        """bool [batch, 1, node, cell]: visible cells of the last `window` positions, the node's own included."""
        if window not in self._masks:
            seen = self.visible if window is None else self.visible & (self.distance < window)
            self._masks[window] = seen[:, None]
        return self._masks[window]

    @cached_property
    def visible_cells(self) -> list[list[Tensor]]:
        """For each tree and each new node: the cells it attends to, by increasing position."""
        out = []
        for start, parents in zip(self.lengths, self.parent_lists, strict=True):
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append([*(paths[parent] if parent >= 0 else []), node])
            new = paths[self.held :]
            out.append([torch.cat([torch.arange(start), start + torch.tensor(p)]).to(self.device) for p in new])
        return out
