"""Recurrent layers over chains of nodes: the gated delta rule, and the selective state space of Mamba."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.kernels.cpu.library import ScanStruct
from outrider.kernels.cpu.state import library


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    starts: Sequence[Tensor],
    chains: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[bool]],
) -> tuple[Tensor, list[list[Tensor | None]]]:
    """The gated delta rule (Yang et al. 2024, equation 10): S <- decay S; S <- S + key beta (value - key^T S)^T; out = query^T S.

    query, key: float32 [row, head, key]. value: float32 [row, head, width]. decay: float32 [row, head], or [row, head, key] (Kimi
    Linear). beta: float32 [row, head]. starts: float32 [head, key, width], the state before the first node of each chain.
    chains: the rows of the nodes of each chain. wanted: whether the state after each of them is returned.

    Returns float32 [row, head, width], zeros for rows of no chain, and the states. Nodes of a chain have the bits that they have
    one by one. Raises ValueError for tensors that do not fit.
    """
    rows, heads, width = value.shape
    keys = key.shape[-1]
    for name, tensor, shapes in (
        ("query", query, [(rows, heads, keys)]),
        ("key", key, [(rows, heads, keys)]),
        ("decay", decay, [(rows, heads), (rows, heads, keys)]),
        ("beta", beta, [(rows, heads)]),
        *(("a state", start, [(heads, keys, width)]) for start in starts),
    ):
        _check(name, tensor, shapes)
    job = ScanStruct(heads=heads, keys=keys, width=width, groups=heads, factor=1.0, kind=0, per_column=decay.dim() == 3)
    parts = {"query": query, "key": key, "value": value, "step": beta, "decay": decay}
    return _run(job, parts, value.shape, starts, chains, wanted)


def selective(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    starts: Sequence[Tensor],
    chains: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[bool]],
) -> tuple[Tensor, list[list[Tensor | None]]]:
    """The selective state space of Mamba (Gu and Dao 2023, algorithm 2). S <- exp(step a) S + (step b) x; out = S c.

    x, step: float32 [row, channel]. a: float32 [channel], or [channel, width]. b, c: float32 [row, group, width]. starts: float32
    [channel, width]. The others, what is returned, and the errors are as in `delta_rule`; the result is [row, channel].
    """
    rows, channels = x.shape
    groups, width = b.shape[1:]
    if not groups or channels % groups:
        raise ValueError(f"{groups} groups must divide {channels} channels")
    for name, tensor, shapes in (
        ("step", step, [(rows, channels)]),
        ("a", a, [(channels,), (channels, width)]),
        ("b", b, [(rows, groups, width)]),
        ("c", c, [(rows, groups, width)]),
        *(("a state", start, [(channels, width)]) for start in starts),
    ):
        _check(name, tensor, shapes)
    a = a.contiguous()
    job = ScanStruct(
        heads=channels, keys=1, width=width, groups=groups, kind=1, per_column=a.dim() == 2, a=a.data_ptr()
    )
    return _run(job, {"value": x, "key": b, "query": c, "step": step}, x.shape, starts, chains, wanted)


def _check(name: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or tuple(tensor.shape) not in shapes:
        raise ValueError(
            f"{name} must be float32 {' or '.join(str([*s]) for s in shapes)} on the CPU, got {tensor.dtype} {[*tensor.shape]}"
        )


def _run(
    job: ScanStruct,
    parts: Mapping[str, Tensor],
    shape: Sequence[int],
    starts: Sequence[Tensor],
    chains: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[bool]],
) -> tuple[Tensor, list[list[Tensor | None]]]:
    """parts: what each node reads, by the names of ScanJob. shape: of the output."""
    _check("the rows", parts["value"], [tuple(parts["value"].shape)])
    count = shape[0]
    if any(not 0 <= row < count for chain in chains for row in chain):
        raise ValueError(f"a chain has a row beyond the {count} that are given")
    records = torch.cat([t.reshape(count, -1) for t in parts.values()], 1)
    width = 0
    for name, part in parts.items():
        setattr(job, name, width)
        width += part[0].numel()
    begins = [t.contiguous() for t in starts]
    work = [torch.empty(start.shape) for start in begins]  # the states that are not returned
    states = [[torch.empty(start.shape) if w else None for w in ws] for start, ws in zip(begins, wanted, strict=True)]
    out, flat = torch.zeros(*shape), [row for chain in chains for row in chain]
    ends = torch.tensor([0, *map(len, chains)]).cumsum(0)
    rows = torch.tensor(flat, dtype=torch.int64)
    pointers = [records.data_ptr() + rows * (4 * width), out.data_ptr() + rows * (4 * out[0].numel())]
    to = [(room if s is None else s).data_ptr() for each, room in zip(states, work, strict=True) for s in each]
    pointers += [torch.tensor(to), torch.tensor([t.data_ptr() for t in begins]), ends]
    job.records, job.out, job.states, job.starts, job.chains = (t.data_ptr() for t in pointers)
    job.count = len(begins)
    library().scan(job)
    return out, states
