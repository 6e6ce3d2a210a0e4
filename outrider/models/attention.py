"""Attention over the slot cache under a tree mask.

A node attends to the committed tokens of its slot and to its own ancestors, in the order of their positions. The reference
takes one node at a time over exactly that list, so its arithmetic cannot depend on cells, neighbours or chunking. The native
kernel keeps the same promise for many nodes at once. For accelerators see `outrider.models.hf.device`.
"""

from __future__ import annotations

import numpy as np

from outrider.kernels import cpu as native
from outrider.kernels.cpu import Scoring
from outrider.kernels.vectors import pack_vectors, unpack_vectors, vector_dim
from outrider.models.nodes import Nodes


def write(nodes: Nodes, layer: int, key: np.ndarray, value: np.ndarray) -> None:
    """Write keys and values, float32 [batch, kv_head, node, head_dim], to the scratch."""
    stored = nodes.cache.layer(layer, (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
    pack = native.pack_vectors if native.available() else pack_vectors
    for cells, new in zip(stored, (key, value), strict=True):
        packed = new if cells.dtype == np.float32 else pack(new, cells.dtype)
        for b, (slot, length) in enumerate(zip(nodes.slots, nodes.lengths, strict=True)):
            cells[slot, :, length + nodes.held : length + nodes.total] = packed[b]


def attend(nodes: Nodes, layer: int, query: np.ndarray, scoring: Scoring) -> np.ndarray:
    """Attention: float32 [batch, head, node, head_dim] -> [batch, node, head, head_dim].

    The cache holds the nodes' own keys and values already.
    """
    return (attend_native if native.available() else attend_reference)(nodes, layer, query, scoring)


def attend_native(nodes: Nodes, layer: int, query: np.ndarray, scoring: Scoring) -> np.ndarray:
    """All nodes at once. Each has the bits that it has alone. Padding gives zeros."""
    keys, values = nodes.cache.layers[layer]
    return native.attention(nodes.plan, query.swapaxes(1, 2), keys, values, scoring)


def attend_reference(nodes: Nodes, layer: int, query: np.ndarray, scoring: Scoring) -> np.ndarray:
    """The definition, one node at a time."""
    keys, values = nodes.cache.layers[layer]
    heads, kv_heads = query.shape[1], keys.shape[1]
    out = np.empty((query.shape[0], query.shape[2], heads, vector_dim(values)), np.float32)
    for b, slot in enumerate(nodes.slots):
        for n, cells in enumerate(nodes.visible_cells[b]):
            seen = cells if scoring.window is None else cells[-scoring.window :]
            # [kv_head, token, head_dim]; in one order in memory, because products of another layout sum in another order
            k, v = (np.ascontiguousarray(unpack_vectors(t[slot][:, seen])) for t in (keys, values))
            q = np.ascontiguousarray(query[b, :, n]).reshape(kv_heads, heads // kv_heads, -1)
            probs = _softmax((q @ k.swapaxes(1, 2) * scoring.scaling).reshape(heads, -1), scoring)
            out[b, n] = (probs.reshape(kv_heads, -1, len(seen)) @ v).reshape(heads, -1)
    return out


def _softmax(scores: np.ndarray, scoring: Scoring) -> np.ndarray:
    """Softmax of float32 [head, cell], with the softcap and the sinks."""
    cells = scores.shape[1]
    if scoring.softcap is not None:
        scores = np.tanh(scores / scoring.softcap) * scoring.softcap
    if scoring.sinks is not None:
        scores = np.concatenate([scores, np.asarray(scoring.sinks, np.float32)[:, None]], 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True))[:, :cells]
