"""Attention over the slot cache under a tree mask.

What a node sees: the committed tokens of its row and its own ancestors, in the order of their positions. Three forms of
one definition: the reference takes one node at a time over exactly that list, so its arithmetic cannot depend on slots,
neighbours or chunking; the native kernel keeps the same promise for many nodes at once; the masked form is the one for
accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from outrider.core.tree import ancestor_mask, depth
from outrider.kernels import cpu as native
from outrider.models.cache import SlotCache


@dataclass(eq=False)
class Nodes:
    """The nodes of one forward and where they live. parents: int64 [batch, held + count], None for a full chain.

    The first `held` nodes of the trees stand in the scratch already, from an earlier forward of the same step; the new
    ones may have any of them as parents. What follows from them is made when first asked for, on the host, and moved to
    the device once per forward.
    """

    cache: SlotCache
    rows: list[int]
    count: int  # new nodes a row, padding included
    parents: Tensor | None
    device: torch.device
    _masks: dict[int | None, Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def held(self) -> int:
        """Nodes a row that stand in the scratch already."""
        return 0 if self.parents is None else self.parents.shape[1] - self.count

    @property
    def total(self) -> int:
        """Nodes a row, old and new."""
        return self.held + self.count

    @cached_property
    def lengths(self) -> list[int]:
        """Committed tokens of each batch entry."""
        return [self.cache.length[r] for r in self.rows]

    @cached_property
    def tree(self) -> Tensor:
        """int64 [batch, held + count] parents on the host, also for a chain."""
        if self.parents is not None:
            return self.parents.cpu()
        return torch.arange(-1, self.count - 1).repeat(len(self.rows), 1)

    @cached_property
    def _positions(self) -> Tensor:
        """Of all nodes, the held ones too."""
        level = torch.arange(self.count)[None] if self.parents is None else depth(self.tree)
        return torch.tensor(self.lengths)[:, None] + level

    @cached_property
    def positions(self) -> Tensor:
        """int64 [batch, count]: of the new nodes, on the model's device."""
        return self._positions[:, self.held :].to(self.device)

    @cached_property
    def last(self) -> list[int]:
        """The last real one of the new nodes of each batch entry; 0 where there is none."""
        if self.parents is None:
            return [self.count - 1] * len(self.rows)
        real = (self.tree[:, self.held :] >= -1) * torch.arange(1, self.count + 1)
        return (real.amax(1) - 1).clamp_min(0).tolist()

    @cached_property
    def span(self) -> int:
        """Slots beyond every row's scratch are left out of masks."""
        return max(self.lengths) + self.total

    @cached_property
    def plan(self) -> native.Plan:
        """The same for the native kernel."""
        return native.Plan(self.rows, self.lengths, self.count, None if self.parents is None else self.tree, self.held)

    @cached_property
    def index(self) -> slice | Tensor:
        """The rows, as an index into the cache that copies nothing where it can."""
        first = self.rows[0]
        if self.rows == list(range(first, first + len(self.rows))):
            return slice(first, first + len(self.rows))
        return torch.tensor(self.rows, device=self.device)

    @cached_property
    def _offset(self) -> Tensor:
        """int64 [batch, slot]: where a slot lies in its row's scratch; negative for committed ones."""
        return torch.arange(self.span)[None] - torch.tensor(self.lengths)[:, None]

    @cached_property
    def visible(self) -> Tensor:
        """bool [batch, node, slot]: committed slots and ancestors."""
        offset = self._offset[:, None].expand(-1, self.count, -1)
        own = ancestor_mask(self.tree)[:, self.held :].gather(2, offset.clamp(0, self.total - 1))
        return ((offset < 0) | (own & (offset < self.total))).to(self.device)

    @cached_property
    def distance(self) -> Tensor:
        """int64 [batch, node, slot]: how far back the token in a slot lies."""
        offset, here = self._offset, self._positions
        own = here.expand(len(self.rows), -1).gather(1, offset.clamp(0, self.total - 1))
        where = torch.where((offset >= 0) & (offset < self.total), own, torch.arange(self.span))
        return (here[:, self.held :, None] - where[:, None, :]).to(self.device)

    def mask(self, window: int | None) -> Tensor:
        """bool [batch, 1, node, slot]: what is visible and at most `window` tokens back, the node's own counted."""
        if window not in self._masks:
            seen = self.visible if window is None else self.visible & (self.distance < window)
            self._masks[window] = seen[:, None]
        return self._masks[window]

    @cached_property
    def slots(self) -> list[list[Tensor]]:
        """For each batch entry and new node: the slots it sees, in the order of their positions."""
        out = []
        for start, parents in zip(self.lengths, self.tree.tolist(), strict=True):
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append([*(paths[parent] if parent >= 0 else []), node])
            new = paths[self.held :]
            out.append([torch.cat([torch.arange(start), start + torch.tensor(p)]).to(self.device) for p in new])
        return out


def write(nodes: Nodes, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Put keys and values [batch, kv_head, node, head_dim] into the scratch; returns the layer's tensors."""
    keys, values = nodes.cache.layer(layer, (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]), key)
    for b, (row, length) in enumerate(zip(nodes.rows, nodes.lengths, strict=True)):
        new = slice(length + nodes.held, length + nodes.total)
        keys[row, :, new], values[row, :, new] = key[b], value[b]
    return keys, values


def attend(
    nodes: Nodes,
    layer: int,
    query: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The form for this machine. query: [batch, head, node, head_dim] -> [batch, node, head, head_dim].

    The nodes' own keys and values are in the cache already. window: tokens a node sees, itself counted. softcap: the
    scores are cap * tanh(score / cap). sinks: [head], one more score in each softmax, with no value.
    """
    if query.device.type != "cpu":
        form = attend_masked
    elif native.available() and query.dtype == torch.float32:
        form = attend_native
    else:
        form = attend_reference
    return form(nodes, layer, query, scaling, window, softcap, sinks)


def attend_native(
    nodes: Nodes,
    layer: int,
    query: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """All nodes at once, each bit for bit what it is alone. Padding gives zeros."""
    keys, values = nodes.cache.layers[layer]
    return native.attention(
        nodes.plan, query.transpose(1, 2), keys, values, scaling=scaling, window=window, softcap=softcap, sinks=sinks
    )


def attend_reference(
    nodes: Nodes,
    layer: int,
    query: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, one node at a time."""
    keys, values = nodes.cache.layers[layer]
    heads, kv_heads = query.shape[1], keys.shape[1]
    out = query.new_empty(query.shape[0], query.shape[2], heads, values.shape[-1])
    for b, row in enumerate(nodes.rows):
        for n, slots in enumerate(nodes.slots[b]):
            seen = slots if window is None else slots[-window:]
            k, v = keys[row, :, seen], values[row, :, seen]  # [kv_head, token, head_dim]
            q = query[b, :, n].reshape(kv_heads, heads // kv_heads, -1)
            scores = torch.matmul(q, k.transpose(1, 2)) * scaling
            law = _softmax(scores.view(heads, 1, -1), softcap, sinks).view(kv_heads, -1, len(seen))
            out[b, n] = torch.matmul(law, v).view(heads, -1)
    return out


def attend_masked(
    nodes: Nodes,
    layer: int,
    query: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """All nodes at once under a mask; the rounding depends on the batch."""
    keys, values = nodes.cache.layers[layer]
    k, v = keys[nodes.index, :, : nodes.span], values[nodes.index, :, : nodes.span]
    batch, heads, count, _ = query.shape
    q = query.reshape(batch, k.shape[1], -1, count, query.shape[-1])
    scores = torch.matmul(q, k[:, :, None].transpose(-1, -2)) * scaling  # [batch, kv_head, group, node, slot]
    law = _softmax(scores.view(batch, heads, count, nodes.span), softcap, sinks, nodes.mask(window))
    out = torch.matmul(law.view(batch, k.shape[1], -1, count, nodes.span), v[:, :, None])
    return out.reshape(batch, heads, count, -1).transpose(1, 2)


def _softmax(scores: Tensor, softcap: float | None, sinks: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """float32 softmax of [..., head, node, slot] over the last dim, with a cap on the scores and a sink per head."""
    dtype, scores = scores.dtype, scores.float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        return scores.softmax(-1)[..., :-1].to(dtype)
    return scores.softmax(-1).to(dtype)
