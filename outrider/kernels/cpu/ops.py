"""Attention over the slot cache, noise, and the choice of a token. numpy arrays in, numpy arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from outrider.kernels.cpu.library import AttentionStruct, CacheFormat, PlanStruct
from outrider.kernels.cpu.state import library
from outrider.kernels.vectors import packed_width, vector_dim

VECTOR_FORMATS = {
    np.dtype(np.float32): CacheFormat.CACHE_FLOAT32,
    np.dtype(ml_dtypes.bfloat16): CacheFormat.CACHE_BFLOAT16,
    np.dtype(np.int8): CacheFormat.CACHE_INT8,
}


class AttentionPlan:
    """The nodes of one forward: what each attends to, and where its keys are. Made once, used by every layer.

    Args:
        rows: cache slot of each batch entry.
        lengths: committed tokens of each.
        nodes: new nodes of each, padding included.
        parents: int64 [batch, held + nodes], -1 for the root and -2 for padding; None for a full chain.
        held: nodes that the scratch holds already. The new nodes come after them, and any of them may be a parent.

    Raises ValueError for parents that do not fit.
    """

    def __init__(
        self, rows: Sequence[int], lengths: Sequence[int], nodes: int, parents: ArrayLike | None = None, held: int = 0
    ) -> None:
        batch, total = len(rows), held + nodes
        if parents is not None:
            parents = np.ascontiguousarray(parents)
            if parents.dtype != np.int64 or parents.shape != (batch, total):
                raise ValueError(f"parents must be int64 [{batch}, {total}], got {parents.dtype} {[*parents.shape]}")
        elif held:
            raise ValueError(f"{held} nodes are in the scratch: give the parents of all {total}")
        self.batch, self.nodes = batch, nodes
        size, full = batch * nodes, batch * total
        self._row, self._length = np.array(rows, np.int32), np.array(lengths, np.int32)
        sizes = size, batch + 1, batch, full, full, full
        self._parts = np.split(np.empty(sum(sizes), np.int32), [*accumulate(sizes[:-1])])
        pointers = PlanStruct(*(p.ctypes.data for p in self._parts))
        tree = None if parents is None else parents.ctypes.data
        count = library().plan(batch, held, nodes, tree, self._length.ctypes.data, pointers)
        if count < 0:
            entry, node = divmod(-1 - count, total)
            raise ValueError(
                f"node {node} of entry {entry} has parent {int(parents[entry, node]) if parents is not None else '?'}; "
                "a parent is -1 for the root, -2 for padding, else a smaller node that is no padding"
            )
        self.count = count
        self.end = max((int(n) + total for n in lengths), default=0)  # cells that must exist

    @property
    def positions(self) -> np.ndarray:
        """int64 [count]: of the new nodes, in their order, without padding."""
        return self._parts[3][: self.count].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the scores of a node are made."""

    scaling: float  # factor of query times key
    window: int | None = None  # tokens that a node attends to, itself counted; None: all
    softcap: float | None = None  # scores become cap * tanh(score / cap); None: they stay
    sinks: Any = None  # float [head], one more score in each softmax, without a value


def attention(
    plan: AttentionPlan, query: np.ndarray, keys: np.ndarray, values: np.ndarray, scoring: Scoring
) -> np.ndarray:
    """Attention of the nodes of a plan over the slot cache: float32 [batch, node, head, value_dim]. Padding gives zeros.

    query: float32 [batch, node, head, dim]. keys, values: [slot, kv_head, cell, dim], the nodes' own included. They are float32,
    or packed (`pack_vectors`) in bfloat16 or int8. Packed ones give the bits that float32 ones of the same numbers give.

    The result of a node depends only on its own keys, in the order of their positions. It does not depend on cells,
    neighbours, capacity, or how a prompt was cut. Raises ValueError for arrays that do not fit.
    """
    batch, nodes, heads, dim = query.shape
    (_, kv_heads, capacity, _), value_dim = values.shape, vector_dim(values)
    for name, t in (("query", query), ("keys", keys), ("values", values)):
        kinds = [np.dtype(np.float32)] if t is query else [keys.dtype] if t is values else list(VECTOR_FORMATS)
        if t.dtype not in kinds:
            raise ValueError(f"{name} must be {' or '.join(map(str, kinds))}, got {t.dtype}")
    if (batch, nodes) != (plan.batch, plan.nodes):
        raise ValueError(f"the plan is for {plan.batch} x {plan.nodes} nodes, the query has {batch} x {nodes}")
    shape = (keys.shape[0], kv_heads, capacity, packed_width(dim, keys.dtype))
    if not (keys.flags.c_contiguous and values.flags.c_contiguous) or keys.shape != shape:
        raise ValueError(
            f"keys and values must be contiguous [slot, kv_head, cell, dim] alike, got {[*keys.shape]} and "
            f"{[*values.shape]} for a query of dimension {dim}"
        )
    if heads % kv_heads or plan.end > capacity or int(plan._row.max()) >= len(keys):
        raise ValueError(
            f"{heads} heads over {kv_heads} key heads, cells up to {plan.end} of {capacity}, slot {int(plan._row.max())} "
            f"of {len(keys)}: heads must divide, cells and slots must exist"
        )
    query, empty = np.ascontiguousarray(query), np.zeros if plan.count < batch * nodes else np.empty
    out = empty((batch, nodes, heads, value_dim), np.float32)
    sinks = scoring.sinks
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, np.float32)
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must hold one number per head ({heads}), got {[*sinks.shape]}")
    index, segment, chain, position, slot, parent = (p.ctypes.data for p in plan._parts)
    job = AttentionStruct(
        q=query.ctypes.data,
        k=keys.ctypes.data,
        v=values.ctypes.data,
        out=out.ctypes.data,
        segment=segment,
        row=plan._row.ctypes.data,
        length=plan._length.ctypes.data,
        chain=chain,
        position=position,
        slot=slot,
        parent=parent,
        index=index,
        sinks=None if sinks is None else sinks.ctypes.data,
        segments=batch,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=value_dim,
        capacity=capacity,
        ldq=heads * dim,
        ldo=heads * value_dim,
        window=scoring.window or 0,
        scale=scoring.scaling,
        softcap=scoring.softcap or 0.0,
        format=VECTOR_FORMATS[keys.dtype],
    )
    library().attention(job)
    return out


def pack_vectors(x: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """x [..., dim], in float32, as a cache of this dtype keeps it: see `outrider.kernels.vectors`."""
    x, dtype = np.ascontiguousarray(x, np.float32), np.dtype(dtype)
    dim = x.shape[-1]
    out = np.empty((*x.shape[:-1], packed_width(dim, dtype)), dtype)
    library().pack_vectors(VECTOR_FORMATS[dtype], x.ctypes.data, out.ctypes.data, x.size // max(dim, 1), dim)
    return out


def words(seed: int, stream: int, step: int, position: int, n: int) -> np.ndarray:
    """int64 [n] of 32-bit words: those of `outrider.core.noise`."""
    out = np.empty(n, np.uint32)
    library().words(seed & _64, stream, step & _32, position & _32, n, out.ctypes.data)
    return out.astype(np.int64)


def gumbel(seed: int, stream: int, step: int, position: int, n: int, ids: ArrayLike | None = None) -> np.ndarray:
    """float32 [n] standard Gumbel, made of the integers of `outrider.core.noise`.

    ids: int64 [kept]: only the noise of these tokens, [kept]. Each costs as much as four that are neighbours.
    """
    key = seed & _64, stream, step & _32, position & _32
    if ids is None:
        out = np.empty(n, np.float32)
        library().gumbel(*key, n, out.ctypes.data)
        return out
    ids = np.ascontiguousarray(ids, np.int64)
    out = np.empty(len(ids), np.float32)
    library().gumbel_at(*key, ids.ctypes.data, len(ids), out.ctypes.data)
    return out


def argmax_gumbel(
    scores: ArrayLike,
    seed: int,
    stream: int,
    step: int,
    position: int,
    *,
    temperature: float = 1.0,
    ids: ArrayLike | None = None,
) -> int:
    """argmax(scores / temperature + gumbel(...)) over float32 [n]. -inf is allowed; the lowest index wins a tie.

    ids: int64 [n], ascending: the token of each score, whose noise is added. The result is still an index of `scores`.
    None: score i is of token i. Raises ValueError on NaN, and for ids that do not fit.
    """
    row, tokens = np.ascontiguousarray(scores, np.float32), None if ids is None else np.ascontiguousarray(ids, np.int64)
    if row.ndim != 1 or not row.size:
        raise ValueError(f"expected scores [n] with n >= 1, got {[*row.shape]}")
    if tokens is not None and tokens.shape != row.shape:
        raise ValueError(f"ids must be int64 [{row.size}], got {[*tokens.shape]}")
    noise, place = (seed & _64, stream, step & _32, position & _32), None if tokens is None else tokens.ctypes.data
    found = library().argmax_gumbel(row.ctypes.data, place, row.size, temperature, *noise)
    if found < 0:
        raise ValueError("the scores hold NaN: the model's weights or its input are damaged")
    return found


def truncate(scores: np.ndarray, top_k: int, top_p: float, least: float) -> np.ndarray:
    """float32 [n] -> the same with -inf outside of top-k, top-p and min-p; the twin of `outrider.core.sampling.truncate`.

    top_k: 0 keeps all. least: the logarithm of min-p; -inf keeps all."""
    out = np.array(scores, np.float32)
    library().truncate(out.ctypes.data, out.size, top_k, top_p, least)
    return out


def softmax(scores: ArrayLike, *, logarithm: bool = False) -> np.ndarray:
    """float32 [..., n] -> its softmax over the last dimension, or the logarithm of that.

    NaN in a row with NaN, inf or only -inf."""
    x = np.ascontiguousarray(scores, np.float32)
    out, n = np.empty_like(x), x.shape[-1]
    library().softmax(int(logarithm), x.ctypes.data, out.ctypes.data, x.size // max(n, 1), n)
    return out


def log(values: ArrayLike) -> np.ndarray:
    """float64 -> the natural logarithms; -inf for 0 and for subnormal numbers, NaN for negative ones."""
    x = np.ascontiguousarray(values, np.float64)
    out = np.empty_like(x)
    library().log(x.ctypes.data, out.ctypes.data, x.size)
    return out


def total(values: ArrayLike) -> np.ndarray:
    """float64 [..., n] -> [...]: the sums over the last dimension, in one order."""
    x = np.ascontiguousarray(values, np.float64)
    out = np.empty(x.shape[:-1])
    library().total(x.ctypes.data, out.ctypes.data, out.size, x.shape[-1])
    return out


_32, _64 = 2**32 - 1, 2**64 - 1
