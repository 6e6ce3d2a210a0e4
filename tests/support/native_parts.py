"""Parts of native programs alone, as tests call them: the gated delta rule, the selective state space of Mamba, and argmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from outrider.kernels.cpu.library import Recurrence, ScanStruct
from outrider.kernels.cpu.state import library


def delta_rule(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    starts: Sequence[np.ndarray],
    chains: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[bool]],
) -> tuple[np.ndarray, list[list[np.ndarray | None]]]:
    """The gated delta rule (Yang et al. 2024, equation 10): S <- decay S; S <- S + key beta (value - key^T S)^T; out = query^T S.

    Args:
        query: float32 [row, head, key].
        key: float32 [row, head, key].
        value: float32 [row, head, width].
        decay: float32 [row, head], or [row, head, key] (Kimi Linear).
        beta: float32 [row, head].
        starts: float32 [head, key, width], the state before the first node of each chain.
        chains: the rows of the nodes of each chain.
        wanted: whether the state after each of them is returned.

    Returns float32 [row, head, width], zeros for rows of no chain, and the states. Nodes of a chain have the bits that they have
    one by one. Raises ValueError for arrays that do not fit.
    """
    rows, heads, width = value.shape
    keys = key.shape[-1]
    for name, array, shapes in (
        ("query", query, [(rows, heads, keys)]),
        ("key", key, [(rows, heads, keys)]),
        ("decay", decay, [(rows, heads), (rows, heads, keys)]),
        ("beta", beta, [(rows, heads)]),
        *(("a state", start, [(heads, keys, width)]) for start in starts),
    ):
        _check(name, array, shapes)
    sizes = {"heads": heads, "keys": keys, "width": width, "groups": heads, "per_column": decay.ndim == 3}
    parts = {"query": query, "key": key, "value": value, "step": beta, "decay": decay}
    return _run(Recurrence.DELTA_RULE, sizes, parts, value.shape, starts, chains, wanted)


def selective(
    x: np.ndarray,
    step: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    starts: Sequence[np.ndarray],
    chains: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[bool]],
) -> tuple[np.ndarray, list[list[np.ndarray | None]]]:
    """The selective state space of Mamba (Gu and Dao 2023, algorithm 2). S <- exp(step a) S + (step b) x; out = S c.

    Args:
        x: float32 [row, channel].
        step: float32 [row, channel].
        a: float32 [channel], or [channel, width].
        b: float32 [row, group, width].
        c: float32 [row, group, width].
        starts: float32 [channel, width], as in `delta_rule`.
        chains: as in `delta_rule`.
        wanted: as in `delta_rule`.

    Returns what `delta_rule` returns, with a result [row, channel], and raises what it raises.
    """
    rows, channels = x.shape
    groups, width = b.shape[1:]
    if not groups or channels % groups:
        raise ValueError(f"{groups} groups must divide {channels} channels")
    for name, array, shapes in (
        ("step", step, [(rows, channels)]),
        ("a", a, [(channels,), (channels, width)]),
        ("b", b, [(rows, groups, width)]),
        ("c", c, [(rows, groups, width)]),
        *(("a state", start, [(channels, width)]) for start in starts),
    ):
        _check(name, array, shapes)
    a = np.ascontiguousarray(a)
    sizes = {
        "heads": channels,
        "keys": 1,
        "width": width,
        "groups": groups,
        "per_column": a.ndim == 2,
        "a": a.ctypes.data,
    }
    parts = {"value": x, "key": b, "query": c, "step": step}
    return _run(Recurrence.SELECTIVE, sizes, parts, x.shape, starts, chains, wanted)


def _check(name: str, array: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> None:
    if array.dtype != np.float32 or array.shape not in shapes:
        raise ValueError(
            f"{name} must be float32 {' or '.join(str([*s]) for s in shapes)}, got {array.dtype} {[*array.shape]}"
        )


def _run(
    kind: Recurrence,
    sizes: Mapping[str, int],
    parts: Mapping[str, np.ndarray],
    shape: Sequence[int],
    starts: Sequence[np.ndarray],
    chains: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[bool]],
) -> tuple[np.ndarray, list[list[np.ndarray | None]]]:
    """sizes: fields of ScanJob. parts: what each node reads, by the names of ScanJob. shape: of the output."""
    _check("the rows", parts["value"], [tuple(parts["value"].shape)])
    count = shape[0]
    if any(not 0 <= row < count for chain in chains for row in chain):
        raise ValueError(f"a chain has a row beyond the {count} that are given")
    read = {name: t.reshape(count, -1) for name, t in parts.items()}
    records, ends = np.concatenate([*read.values()], 1), [0, *accumulate(t.shape[1] for t in read.values())]
    begins = [np.ascontiguousarray(t) for t in starts]
    work = [np.empty_like(start) for start in begins]  # the states that are not returned
    states = [[np.empty_like(start) if w else None for w in ws] for start, ws in zip(begins, wanted, strict=True)]
    out = np.zeros(shape, np.float32)
    rows = np.array([row for chain in chains for row in chain], np.int64)
    to = [(room if s is None else s).ctypes.data for each, room in zip(states, work, strict=True) for s in each]
    pointers = {
        "records": records.ctypes.data + rows * records.strides[0],
        "out": out.ctypes.data + rows * out.strides[0],
        "states": np.array(to, np.int64),
        "starts": np.array([t.ctypes.data for t in begins], np.int64),
        "chains": np.array([0, *accumulate(map(len, chains))], np.int64),
    }
    places = {name: t.ctypes.data for name, t in pointers.items()} | dict(zip(parts, ends, strict=False))
    library().scan(ScanStruct(count=len(begins), factor=1.0, kind=kind, **sizes, **places))
    return out, states


def argmax(scores: np.ndarray) -> int:
    """The index of the largest value of float32 [n]; the lowest of equals. Raises ValueError on NaN."""
    found = library().argmax(scores.ctypes.data, scores.size)
    if found < 0:
        raise ValueError("NaN")
    return found
