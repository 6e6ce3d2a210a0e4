"""Attention over the slot cache under a tree mask.

What a node sees: the committed tokens of its row and its own ancestors, in the order of their positions. Three forms of
one definition: the reference takes one node at a time over exactly that list, so its arithmetic cannot depend on slots,
neighbours or chunking; the native kernel keeps the same promise for many nodes at once; the masked form is the one for
accelerators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.models.nodes import Nodes


def write(nodes: Nodes, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Put keys and values [batch, kv_head, node, head_dim] into the scratch; returns the layer's tensors."""
    keys, values = nodes.cache.layer(layer, (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]), key)
    for b, (slot, length) in enumerate(zip(nodes.slots, nodes.lengths, strict=True)):
        new = slice(length + nodes.held, length + nodes.total)
        keys[slot, :, new], values[slot, :, new] = key[b], value[b]
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
    for b, slot in enumerate(nodes.slots):
        for n, cells in enumerate(nodes.visible_cells[b]):
            seen = cells if window is None else cells[-window:]
            k, v = keys[slot, :, seen], values[slot, :, seen]  # [kv_head, token, head_dim]
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
