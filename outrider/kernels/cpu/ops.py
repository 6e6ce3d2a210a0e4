"""Attention over the slot cache, noise, and the choice of a token. Checked torch tensors in, torch tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.cpu.library import AttentionStruct, CacheFormat, PlanStruct
from outrider.kernels.cpu.state import library
from outrider.kernels.vectors import packed_width, vector_dim

VECTOR_FORMATS = {
    torch.float32: CacheFormat.CACHE_FLOAT32,
    torch.bfloat16: CacheFormat.CACHE_BFLOAT16,
    torch.int8: CacheFormat.CACHE_INT8,
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
        self, rows: Sequence[int], lengths: Sequence[int], nodes: int, parents: Tensor | None = None, held: int = 0
    ) -> None:
        batch, total = len(rows), held + nodes
        if parents is not None:
            if parents.dtype != torch.int64 or parents.shape != (batch, total) or parents.device.type != "cpu":
                raise ValueError(
                    f"parents must be int64 [{batch}, {total}] on the CPU, got {parents.dtype} {tuple(parents.shape)}"
                )
            parents = parents.contiguous()
        elif held:
            raise ValueError(f"{held} nodes are in the scratch: give the parents of all {total}")
        self.batch, self.nodes = batch, nodes
        size, full = batch * nodes, batch * total
        self._row = torch.tensor([*rows], dtype=torch.int32)
        self._length = torch.tensor([*lengths], dtype=torch.int32)
        self._arrays = torch.empty(size + 2 * batch + 1 + 3 * full, dtype=torch.int32)
        self._parts = self._arrays.split([size, batch + 1, batch, full, full, full])
        pointers = PlanStruct(*(p.data_ptr() for p in self._parts))
        count = library().plan(
            batch, held, nodes, None if parents is None else parents.data_ptr(), self._length.data_ptr(), pointers
        )
        if count < 0:
            entry, node = divmod(-1 - count, total)
            raise ValueError(
                f"node {node} of entry {entry} has parent {int(parents[entry, node]) if parents is not None else '?'}; "
                "a parent is -1 for the root, -2 for padding, else a smaller node that is no padding"
            )
        self.count = count
        self.end = max((int(n) + total for n in lengths), default=0)  # cells that must exist

    @property
    def positions(self) -> Tensor:
        """int64 [count]: of the new nodes, in their order, without padding."""
        return self._parts[3][: self.count].long()


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the scores of a node are made."""

    scaling: float  # factor of query times key
    window: int | None = None  # tokens that a node attends to, itself counted; None: all
    softcap: float | None = None  # scores become cap * tanh(score / cap); None: they stay
    sinks: Tensor | None = None  # float [head], one more score in each softmax, without a value


def attention(plan: AttentionPlan, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Attention of the nodes of a plan over the slot cache: float32 [batch, node, head, value_dim]. Padding gives zeros.

    query: float32 [batch, node, head, dim]. keys, values: [slot, kv_head, cell, dim], the nodes' own included. They are float32,
    or packed (`pack_vectors`) in bfloat16 or int8. Packed ones give the bits that float32 ones of the same numbers give.

    The result of a node depends only on its own keys, in the order of their positions. It does not depend on cells,
    neighbours, capacity, or how a prompt was cut. Raises ValueError for tensors that do not fit.
    """
    batch, nodes, heads, dim = query.shape
    (_, kv_heads, capacity, _), value_dim = values.shape, vector_dim(values)
    for name, t in (("query", query), ("keys", keys), ("values", values)):
        kinds = [torch.float32] if t is query else [keys.dtype] if t is values else list(VECTOR_FORMATS)
        if t.dtype not in kinds or t.device.type != "cpu":
            raise ValueError(f"{name} must be {' or '.join(map(str, kinds))} on the CPU, got {t.dtype} on {t.device}")
    if (batch, nodes) != (plan.batch, plan.nodes):
        raise ValueError(f"the plan is for {plan.batch} x {plan.nodes} nodes, the query has {batch} x {nodes}")
    shape = (keys.shape[0], kv_heads, capacity, packed_width(dim, keys.dtype))
    if not (keys.is_contiguous() and values.is_contiguous()) or keys.shape != shape:
        raise ValueError(
            f"keys and values must be contiguous [slot, kv_head, cell, dim] alike, got {tuple(keys.shape)} and "
            f"{tuple(values.shape)} for a query of dimension {dim}"
        )
    if heads % kv_heads or plan.end > capacity or int(plan._row.max()) >= len(keys):
        raise ValueError(
            f"{heads} heads over {kv_heads} key heads, cells up to {plan.end} of {capacity}, slot {int(plan._row.max())} "
            f"of {len(keys)}: heads must divide, cells and slots must exist"
        )
    query = query if query.is_contiguous() else query.contiguous()
    out = query.new_empty(batch, nodes, heads, value_dim)
    if plan.count < batch * nodes:
        out.zero_()
    sinks = scoring.sinks
    if sinks is not None:
        sinks = sinks.detach().to(torch.float32).contiguous()
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must hold one number per head ({heads}), got {tuple(sinks.shape)}")
    index, segment, chain, position, slot, parent = (p.data_ptr() for p in plan._parts)
    job = AttentionStruct(
        q=query.data_ptr(),
        k=keys.data_ptr(),
        v=values.data_ptr(),
        out=out.data_ptr(),
        segment=segment,
        row=plan._row.data_ptr(),
        length=plan._length.data_ptr(),
        chain=chain,
        position=position,
        slot=slot,
        parent=parent,
        index=index,
        sinks=None if sinks is None else sinks.data_ptr(),
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


def pack_vectors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 x [..., dim] as a cache of this dtype keeps it: see `outrider.kernels.vectors`.

    Raises ValueError if x is not float32 on the CPU.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"vectors to pack must be float32 on the CPU, got {x.dtype} on {x.device}")
    x, dim = x.contiguous(), x.shape[-1]
    out = torch.empty(*x.shape[:-1], packed_width(dim, dtype), dtype=dtype)
    library().pack_vectors(VECTOR_FORMATS[dtype], x.data_ptr(), out.data_ptr(), x.numel() // max(dim, 1), dim)
    return out


def words(seed: int, stream: int, step: int, position: int, n: int) -> Tensor:
    """int64 [n] of 32-bit words: those of `outrider.core.noise`."""
    out = torch.empty(n, dtype=torch.int32)
    library().words(seed & _64, stream, step & _32, position & _32, n, out.data_ptr())
    return out.long() & _32


def gumbel(seed: int, stream: int, step: int, position: int, n: int, ids: Tensor | None = None) -> Tensor:
    """float32 [n] standard Gumbel, made of the integers of `outrider.core.noise`.

    ids: int64 [kept], contiguous: only the noise of these tokens, [kept]. Each costs as much as four that are neighbours.
    """
    key = seed & _64, stream, step & _32, position & _32
    if ids is None:
        out = torch.empty(n)
        library().gumbel(*key, n, out.data_ptr())
        return out
    out = torch.empty(len(ids))
    library().gumbel_at(*key, ids.data_ptr(), len(ids), out.data_ptr())
    return out


def argmax(scores: Tensor) -> int:
    """The index of the largest value of float32 [n]; the lowest of equals. Raises ValueError on NaN."""
    return _index(library().argmax(_row(scores).data_ptr(), scores.numel()))


def argmax_gumbel(
    scores: Tensor,
    seed: int,
    stream: int,
    step: int,
    position: int,
    *,
    temperature: float = 1.0,
    ids: Tensor | None = None,
) -> int:
    """argmax(scores / temperature + gumbel(...)) over float32 [n]. -inf is allowed; the lowest index wins a tie.

    ids: int64 [n], ascending: the token of each score, whose noise is added. The result is still an index of `scores`.
    None: score i is of token i. Raises ValueError on NaN, and for ids that do not fit.
    """
    if ids is not None and (ids.dtype != torch.int64 or ids.shape != scores.shape or not ids.is_contiguous()):
        raise ValueError(f"ids must be contiguous int64 [{scores.numel()}], got {ids.dtype} {tuple(ids.shape)}")
    noise = seed & _64, stream, step & _32, position & _32
    tokens = None if ids is None else ids.data_ptr()
    return _index(library().argmax_gumbel(_row(scores).data_ptr(), tokens, scores.numel(), temperature, *noise))


def softmax(scores: Tensor, *, logarithm: bool = False) -> Tensor:
    """float32 [..., n] -> its softmax over the last dimension, or the logarithm of that.

    NaN in a row with NaN, inf or only -inf. Raises ValueError if the scores are not float32."""
    if scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32, got {scores.dtype}; write scores.float()")
    scores, n = scores.contiguous(), scores.shape[-1]
    out = torch.empty_like(scores)
    library().softmax(int(logarithm), scores.data_ptr(), out.data_ptr(), scores.numel() // max(n, 1), n)
    return out


def log(values: Tensor) -> Tensor:
    """float64 -> the natural logarithms; -inf for 0 and for subnormal numbers, NaN for negative ones."""
    values = values.contiguous()
    out = torch.empty_like(values)
    library().log(values.data_ptr(), out.data_ptr(), values.numel())
    return out


def total(values: Tensor) -> Tensor:
    """float64 [..., n] -> [...]: the sums over the last dimension, in one order."""
    values = values.contiguous()
    out = values.new_empty(values.shape[:-1])
    library().total(values.data_ptr(), out.data_ptr(), out.numel(), values.shape[-1])
    return out


_32, _64 = 2**32 - 1, 2**64 - 1


def _row(scores: Tensor) -> Tensor:
    if scores.dtype != torch.float32 or scores.dim() != 1 or not scores.is_contiguous() or not scores.numel():
        raise ValueError(f"expected contiguous float32 [n] with n >= 1, got {scores.dtype} {tuple(scores.shape)}")
    return scores


def _index(found: int) -> int:
    if found < 0:
        raise ValueError("the scores hold NaN: the model's weights or its input are damaged")
    return found
