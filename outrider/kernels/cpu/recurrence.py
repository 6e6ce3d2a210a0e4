"""Recurrent layers over chains of nodes: the gated delta rule, and the selective state space of Mamba."""

from __future__ import annotations

from collections.abc import Sequence

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
    job = ScanStruct(heads=heads, keys=keys, width=width, groups=1, kind=0, per_column=decay.dim() == 3)
    return _run(job, value, beta, decay, query, key, starts, chains, wanted)


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
    job = ScanStruct(heads=channels, keys=1, width=width, groups=groups, kind=1, per_column=a.dim() == 2)
    return _run(job, x, step, a, c, b, starts, chains, wanted)


def _check(name: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or tuple(tensor.shape) not in shapes:
        raise ValueError(
            f"{name} must be float32 {' or '.join(str([*s]) for s in shapes)} on the CPU, got {tensor.dtype} {[*tensor.shape]}"
        )


def _run(
    job: ScanStruct,
    value: Tensor,
    step: Tensor,
    decay: Tensor,
    query: Tensor,
    key: Tensor,
    starts: Sequence[Tensor],
    chains: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[bool]],
) -> tuple[Tensor, list[list[Tensor | None]]]:
    _check("the rows", value, [tuple(value.shape)])
    if any(not 0 <= row < len(value) for chain in chains for row in chain):
        raise ValueError(f"a chain has a row beyond the {len(value)} that are given")
    held = [t.contiguous() for t in (query, key, value, step, decay)]
    begins = [t.contiguous() for t in starts]
    states = [[torch.empty(start.shape) if w else None for w in ws] for start, ws in zip(begins, wanted, strict=True)]
    ends = torch.tensor([0, *map(len, chains)]).cumsum(0)
    rows = torch.tensor([row for chain in chains for row in chain])
    from_, to = (
        torch.tensor([0 if t is None else t.data_ptr() for t in ts])
        for ts in (begins, [s for each in states for s in each])
    )
    out, work = torch.zeros(value.shape), torch.empty(len(begins), *begins[0].shape)
    job.query, job.key, job.value, job.step, job.decay = (t.data_ptr() for t in held)
    job.out, job.work, job.count = out.data_ptr(), work.data_ptr(), len(begins)
    job.chains, job.rows, job.starts, job.states = (t.data_ptr() for t in (ends, rows, from_, to))
    library().scan(job)
    return out, states
