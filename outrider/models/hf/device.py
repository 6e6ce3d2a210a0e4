"""The slot cache in a device's memory, and attention over it in torch: all nodes at once under a mask.

The rounding depends on the batch. On the CPU `outrider.models.attention` is used.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.cpu import Scoring
from outrider.kernels.vectors import pack_vectors, unpack_vectors
from outrider.models.cache import SlotCache, SlotStates
from outrider.models.dtypes import dtype_name
from outrider.models.nodes import Nodes


class DeviceCache(SlotCache):
    """A slot cache whose layers are tensors on a device."""

    def __init__(
        self,
        num_slots: int,
        max_length: int,
        dtype: str,
        states: Mapping[Hashable, SlotStates],
        device: str,
    ) -> None:
        super().__init__(num_slots, max_length, dtype, states)
        self.device = device
        self._masks: tuple[Nodes | None, dict[int | None, Tensor]] = None, {}

    def block(self, slot: int, start: int, end: int) -> list[tuple[Any, Any]]:
        return [(keys[slot, :, start:end].clone(), values[slot, :, start:end].clone()) for keys, values in self.layers]

    def mask(self, nodes: Nodes, window: int | None) -> Tensor:
        """bool [batch, 1, node, cell]: see `Nodes.mask`. It is moved to the device once in a forward."""
        if self._masks[0] is not nodes:
            self._masks = nodes, {}
        masks = self._masks[1]
        if window not in masks:
            masks[window] = torch.from_numpy(nodes.mask(window)).to(self.device)[:, None]
        return masks[window]

    def _zeros(self, shapes: Sequence[tuple[int, ...]], dtype: Any) -> list[Any]:
        dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, np.dtype(dtype).name)
        return [torch.zeros(shape, dtype=dtype, device=self.device) for shape in shapes]


def write(nodes: Nodes, layer: int, key: Tensor, value: Tensor) -> None:
    """Write keys and values [batch, kv_head, node, head_dim] to the scratch."""
    shapes = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
    stored = nodes.cache.layer(layer, *shapes, dtype_name(key.dtype))
    for cells, new in zip(stored, (key, value), strict=True):
        packed = pack_vectors(new, cells.dtype, torch)
        for b, (slot, length) in enumerate(zip(nodes.slots, nodes.lengths, strict=True)):
            cells[slot, :, length + nodes.held : length + nodes.total] = packed[b]


def attend(nodes: Nodes, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
    """query: [batch, head, node, head_dim] -> [batch, node, head, head_dim]. The cache holds the nodes' own keys and values."""
    cache, first = cast("DeviceCache", nodes.cache), nodes.slots[0]
    together = nodes.slots == list(range(first, first + len(nodes.slots)))
    index = slice(first, first + len(nodes.slots)) if together else nodes.slots  # a slice copies nothing
    k, v = (unpack_vectors(t[index, :, : nodes.span], torch).to(query.dtype) for t in cache.layers[layer])
    batch, heads, count, _ = query.shape
    q = query.reshape(batch, k.shape[1], -1, count, query.shape[-1])
    scores = torch.matmul(q, k[:, :, None].transpose(-1, -2)) * scoring.scaling  # [batch, kv_head, group, node, cell]
    probs = _softmax(scores.view(batch, heads, count, nodes.span), scoring, cache.mask(nodes, scoring.window))
    out = torch.matmul(probs.view(batch, k.shape[1], -1, count, nodes.span), v[:, :, None])
    return out.reshape(batch, heads, count, -1).transpose(1, 2)


def _softmax(scores: Tensor, scoring: Scoring, mask: Tensor) -> Tensor:
    """Softmax of [..., head, node, cell] over the last dim, computed in float32, with the softcap and the sinks."""
    dtype, scores = scores.dtype, scores.float()
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        return scores.softmax(-1)[..., :-1].to(dtype)
    return scores.softmax(-1).to(dtype)
