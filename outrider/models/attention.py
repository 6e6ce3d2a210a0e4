"""Attention over the slot cache under a tree mask.

A node attends to the committed tokens of its slot and to its own ancestors, in the order of their positions. There are
three forms of this definition. The reference takes one node at a time over exactly that list, so its arithmetic cannot
depend on cells, neighbours or chunking. The native kernel keeps the same promise for many nodes at once. The masked form
is for accelerators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels import why_no_kernels
from outrider.kernels.border import as_tensor
from outrider.kernels.cpu import Scoring
from outrider.kernels.vectors import pack_vectors, unpack_vectors, vector_dim
from outrider.models.nodes import Nodes


def write(nodes: Nodes, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Write keys and values [batch, kv_head, node, head_dim] to the scratch. Returns the tensors of the layer."""
    keys, values = nodes.cache.layer(layer, (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]), key)
    if nodes.cache.dtype != "auto":
        pack = pack_vectors if key.dtype != torch.float32 or why_no_kernels(key.device) else _pack_native
        key, value = (pack(t, keys.dtype) for t in (key, value))
    for b, (slot, length) in enumerate(zip(nodes.slots, nodes.lengths, strict=True)):
        new = slice(length + nodes.held, length + nodes.total)
        keys[slot, :, new], values[slot, :, new] = key[b], value[b]
    return keys, values


def _pack_native(x: Tensor, dtype: torch.dtype) -> Tensor:
    return as_tensor(native.pack_vectors(x, dtype))


def attend(nodes: Nodes, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
    """Attention in the best form for the device. query: [batch, head, node, head_dim] -> [batch, node, head, head_dim].

    The cache holds the nodes' own keys and values already.
    """
    if query.device.type != "cpu":
        form = attend_masked
    elif query.dtype == torch.float32 and not why_no_kernels(query.device):
        form = attend_native
    else:
        form = attend_reference
    return form(nodes, layer, query, scoring)


def attend_native(nodes: Nodes, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
    """All nodes at once. Each has the bits that it has alone. Padding gives zeros."""
    keys, values = nodes.cache.layers[layer]
    return torch.from_numpy(native.attention(nodes.plan, query.transpose(1, 2), keys, values, scoring))


def attend_reference(nodes: Nodes, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
    """The definition, one node at a time."""
    keys, values = nodes.cache.layers[layer]
    heads, kv_heads = query.shape[1], keys.shape[1]
    out = query.new_empty(query.shape[0], query.shape[2], heads, vector_dim(values))
    for b, slot in enumerate(nodes.slots):
        for n, cells in enumerate(nodes.visible_cells[b]):
            seen = cells if scoring.window is None else cells[-scoring.window :]
            # [kv_head, token, head_dim]
            k, v = (unpack_vectors(t[slot, :, seen], query.dtype) for t in (keys, values))
            q = query[b, :, n].reshape(kv_heads, heads // kv_heads, -1)
            scores = torch.matmul(q, k.transpose(1, 2)) * scoring.scaling
            probs = _softmax(scores.view(heads, 1, -1), scoring).view(kv_heads, -1, len(seen))
            out[b, n] = torch.matmul(probs, v).view(heads, -1)
    return out


def attend_masked(nodes: Nodes, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
    """All nodes at once under a mask. The rounding depends on the batch."""
    keys, values = nodes.cache.layers[layer]
    k, v = (unpack_vectors(t[nodes.index, :, : nodes.span], query.dtype) for t in (keys, values))
    batch, heads, count, _ = query.shape
    q = query.reshape(batch, k.shape[1], -1, count, query.shape[-1])
    scores = torch.matmul(q, k[:, :, None].transpose(-1, -2)) * scoring.scaling  # [batch, kv_head, group, node, cell]
    probs = _softmax(scores.view(batch, heads, count, nodes.span), scoring, nodes.mask(scoring.window))
    out = torch.matmul(probs.view(batch, k.shape[1], -1, count, nodes.span), v[:, :, None])
    return out.reshape(batch, heads, count, -1).transpose(1, 2)


def _softmax(scores: Tensor, scoring: Scoring, mask: Tensor | None = None) -> Tensor:
    """Softmax of [..., head, node, cell] over the last dim, computed in float32, with the softcap and the sinks."""
    dtype, scores = scores.dtype, scores.float()
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        return scores.softmax(-1)[..., :-1].to(dtype)
    return scores.softmax(-1).to(dtype)
