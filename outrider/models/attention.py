"""Attention over the slot cache under a tree mask.

What a node sees: the committed tokens of its row and its own ancestors, in the order of their positions. The reference
takes one node at a time over exactly that list, so its arithmetic cannot depend on slots, neighbours or chunking. The
native kernel keeps the same promise for many nodes at once; the masked form is the one for accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.tree import ancestor_mask, depth


@dataclass(eq=False)
class Nodes:
    """The nodes of one forward and where they live. parents: int64 [batch, node], None for a full chain."""

    cache: SlotCache
    rows: list[int]
    count: int  # nodes a row, padding included
    parents: Tensor | None
    device: torch.device

    @cached_property
    def lengths(self) -> list[int]:
        """Committed tokens of each batch entry."""
        return [self.cache.length[r] for r in self.rows]

    @cached_property
    def tree(self) -> Tensor:
        """int64 [batch, node] parents, also for a chain."""
        if self.parents is not None:
            return self.parents
        return torch.arange(-1, self.count - 1).repeat(len(self.rows), 1)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [batch, node] on the model's device."""
        level = torch.arange(self.count)[None] if self.parents is None else depth(self.parents.cpu())
        return (torch.tensor(self.lengths)[:, None] + level).to(self.device)

    @cached_property
    def visible(self) -> Tensor:
        """bool [batch, node, slot]: committed slots and ancestors; slots beyond every row's scratch are left out."""
        slots = max(self.lengths) + self.count
        mask = torch.arange(slots)[None, None, :] < torch.tensor(self.lengths)[:, None, None]
        mask = mask.expand(len(self.rows), self.count, slots).clone()
        own = ancestor_mask(self.tree.cpu())
        for b, start in enumerate(self.lengths):
            mask[b, :, start : start + self.count] |= own[b]
        return mask.to(self.device)

    @cached_property
    def distance(self) -> Tensor:
        """int64 [batch, node, slot]: how far back the token in a slot lies."""
        slots = max(self.lengths) + self.count
        where = torch.arange(slots, device=self.device).repeat(len(self.rows), 1)
        for b, start in enumerate(self.lengths):
            where[b, start : start + self.count] = self.positions[b]
        return self.positions[:, :, None] - where[:, None, :]

    @cached_property
    def slots(self) -> list[list[Tensor]]:
        """For each batch entry and node: the slots it sees, in the order of their positions."""
        out = []
        for start, parents in zip(self.lengths, self.tree.tolist(), strict=True):
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append([*(paths[parent] if parent >= 0 else []), node])
            out.append([torch.cat([torch.arange(start), start + torch.tensor(p)]).to(self.device) for p in paths])
        return out


def write(nodes: Nodes, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Put keys and values [batch, kv_head, node, head_dim] into the scratch; returns the layer's tensors."""
    keys, values = nodes.cache.layer(layer, key.shape[1::2], value.shape[1::2], key)  # pyright: ignore[reportArgumentType]
    for b, (row, start) in enumerate(zip(nodes.rows, nodes.lengths, strict=True)):
        keys[row, :, start : start + nodes.count] = key[b]
        values[row, :, start : start + nodes.count] = value[b]
    return keys, values


def attend_reference(
    nodes: Nodes,
    layer: int,
    query: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, one node at a time. query: [batch, head, node, head_dim] -> [batch, node, head, head_dim]."""
    keys, values = nodes.cache.layers[layer]
    heads, kv_heads = query.shape[1], keys.shape[1]
    out = query.new_empty(query.shape[0], query.shape[2], heads, values.shape[-1])
    for b, row in enumerate(nodes.rows):
        for n, slots in enumerate(nodes.slots[b]):
            seen = slots if window is None else slots[-window:]
            k, v = keys[row, :, seen], values[row, :, seen]  # [kv_head, token, head_dim]
            q = query[b, :, n].view(kv_heads, heads // kv_heads, -1)
            scores = torch.matmul(q, k.transpose(1, 2)) * scaling
            out[b, n] = torch.matmul(_softmax(scores.view(heads, -1), softcap, sinks).view(kv_heads, -1, len(seen)), v).view(
                heads, -1
            )
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
    """The same for all nodes at once under a mask. Same shapes as `attend_reference`; rounding depends on the batch."""
    keys, values = nodes.cache.layers[layer]
    index = torch.tensor(nodes.rows, device=keys.device)
    slots = nodes.visible.shape[-1]
    k, v = keys[index, :, :slots], values[index, :, :slots]
    mask = nodes.visible if window is None else nodes.visible & (nodes.distance < window)
    batch, heads, count, _ = query.shape
    q = query.view(batch, k.shape[1], -1, count, query.shape[-1])
    scores = torch.matmul(q, k[:, :, None].transpose(-1, -2)) * scaling  # [batch, kv_head, group, node, slot]
    scores = _softmax(scores.view(batch, heads, count, slots), softcap, sinks, mask[:, None])
    out = torch.matmul(scores.view(batch, k.shape[1], -1, count, slots), v[:, :, None])
    return out.reshape(batch, heads, count, -1).transpose(1, 2)


def _softmax(scores: Tensor, softcap: float | None, sinks: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """float32 softmax over the last dim, with a cap on the logits and a sink per head (dim -3 of four, -2 of two)."""
    dtype, scores = scores.dtype, scores.float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        shape = (-1, 1, 1) if scores.dim() == 4 else (-1, 1)
        scores = torch.cat([scores, sinks.float().view(shape).expand(*scores.shape[:-1], 1)], dim=-1)
        return scores.softmax(-1)[..., :-1].to(dtype)
    return scores.softmax(-1).to(dtype)
