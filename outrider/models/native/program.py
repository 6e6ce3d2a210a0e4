"""A model's forward as a program for native code (`kernels/cpu/src/program.hpp`), which a `Builder` builds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from outrider.kernels import cpu as native
from outrider.kernels.cpu.library import AnglesStruct, OpFlag, OpKind, OpStruct, ProgramStruct
from outrider.kernels.cpu.packed import MOST

Width = TypeVar("Width", bound=Hashable)
_KEEPERS = ("store", "conv", "scan")  # what they write, later nodes read


class NotNative(ValueError):
    """A model that the native step cannot run, and why."""


@dataclass(frozen=True)
class Value:
    """Some columns of a register: float32 [node, width]."""

    register: int
    offset: int
    width: int

    def split(self, *widths: int) -> list[Value]:
        """Views of consecutive columns. Raises ValueError unless these are all columns."""
        if sum(widths) != self.width:
            raise ValueError(f"{self.width} columns cannot be split into {widths}")
        starts = [sum(widths[:i]) for i in range(len(widths))]
        return [Value(self.register, self.offset + start, width) for start, width in zip(starts, widths, strict=True)]

    def part(self, start: int, width: int) -> Value:
        """A view of some columns."""
        return self.split(start, width, self.width - start - width)[1]


@dataclass(frozen=True)
class Op:
    kind: str
    layer: int
    flags: tuple[str, ...] = ()
    in_: Value | None = None
    other: Value | None = None
    out: Value | None = None
    matrices: tuple[native.Packed, ...] = ()
    p: np.ndarray | None = None
    q: np.ndarray | None = None
    i: tuple[int, ...] = ()
    f: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Native code believes these numbers. Raises ValueError for one that no model has."""
        if not all(_is_whole(n) and -MOST <= n <= MOST for n in self.i) or not all(map(math.isfinite, self.f)):
            raise ValueError(f"{self.kind} in layer {self.layer} has the numbers {self.i} and {self.f}")

    @property
    def values(self) -> list[Value]:
        return [v for v in (self.in_, self.other, self.out) if v is not None]


@dataclass(frozen=True)
class AngleTable:
    """factors: of cosines and sines, float32 [n], each for `every` positions, and the last one from there on. long: the
    frequencies of caches that may hold longer texts than `first` tokens; None: they have the same ones."""

    inv_freq: np.ndarray
    factors: np.ndarray
    every: int = 1
    long: np.ndarray | None = None
    first: int = 0


@dataclass(frozen=True)
class Program:
    """What a `Builder` has built."""

    ops: tuple[Op, ...]  # in order
    widths: tuple[int, ...]  # of the registers
    angles: tuple[AngleTable, ...]  # tables of rotary embeddings
    cells: dict[int, tuple[int, int, int]]  # (heads, numbers of a key, numbers of a value) of each layer of the cache
    head: native.Packed  # the output matrix
    head_ids: np.ndarray | None  # its tokens, int64 [n], ascending; None for all
    table: native.Packed | np.ndarray  # the embedding
    embedding_factor: float  # of its rows
    vocab_size: int  # tokens of the model
    num_layers: int  # of the model
    hidden: int  # numbers that a tap of a layer shows
    fed_back: int  # numbers that each node feeds back
    max_length: int = 0  # tokens of the longest sequence
    facts: dict[str, Any] = field(default_factory=dict)  # for packs, the settings that it was built from
    named: Mapping[str, Any] = field(default_factory=dict)  # for packs, the weights by name
    mtp: Program | None = None  # the program of the layer that predicts one token further; None if there is none

    def subset(self, layers: Sequence[int]) -> Program:
        """With these layers only, over the same cache."""
        ops = tuple(
            replace(op, i=(layers.index(op.layer),)) if op.layer >= 0 and "tap" in op.flags else op
            for op in self.ops
            if op.layer < 0 or op.layer in layers
        )
        used = {op.i[0] for op in ops if op.kind == "store"}
        if any(op.kind == "attend" and op.i[0] not in used for op in ops):
            raise ValueError("a layer reads the keys of another one, so that one cannot be left out")
        cells = {layer: shape for layer, shape in self.cells.items() if layer in used}
        return replace(self, ops=ops, cells=cells, num_layers=len(layers))

    def converted(self, kind: str) -> Program:
        """With matrices that are kept as `kind`: those of linears and experts, but not of routers, the embedding and the head."""
        routers = {op.in_.register for op in self.ops if op.kind == "route" and op.in_ is not None}

        def changed(op: Op) -> Op:
            router = op.out is not None and op.out.register in routers
            keep = op.kind not in ("linear", "heads", "experts") or (op.kind == "linear" and router)
            return op if keep else replace(op, matrices=tuple(m.converted(kind) for m in op.matrices))

        return replace(self, ops=tuple(map(changed, self.ops)))

    @property
    def recurrent(self) -> dict[int, object]:
        """The numbers of recurrent ops, by the number of their state."""
        return {op.i[0]: (op.kind, op.in_ and op.in_.width, *op.i) for op in self.ops if op.kind in ("conv", "scan")}

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that each attention reads at most; 0: the whole text."""
        return tuple(op.i[5] for op in self.ops if op.kind == "attend")

    @property
    def matrices(self) -> list[native.Packed]:
        """Those that a forward multiplies with, if it is given no features."""
        return [m for op in self.ops if op.kind != "embed" and "fresh" not in op.flags for m in op.matrices]

    @property
    def first_length(self) -> int:
        """Where a cache may hold longer texts than this, `for_length` has other angles. 0: the angles are always the same."""
        return max((a.first for a in self.angles), default=0)

    def for_length(self, length: int) -> Program:
        """With the angles for caches that hold texts of this length."""
        chosen = (a.long if a.long is not None and length > a.first else a.inv_freq for a in self.angles)
        return replace(self, angles=tuple(replace(a, inv_freq=f) for f, a in zip(chosen, self.angles, strict=True)))

    def compiled(self) -> tuple[ctypes.Structure, object]:
        """The struct for native code, and what it points to besides the program."""
        last = max((op.layer for op in self.ops if op.kind in _KEEPERS), default=-1)
        later = {-1, *range(last, self.num_layers)}  # where no other node reads what a node has left
        ops = [op for op in self.ops if op.kind != "rows" or "tap" in op.flags or op.layer in later]
        places, widths = register_places(ops, self.widths)
        keep = list[Any]()
        structs = (OpStruct * len(ops))(*(_struct(op, places, keep) for op in ops))
        tables = (AnglesStruct * len(self.angles))(
            *(
                (a.inv_freq.ctypes.data, a.factors.ctypes.data, len(a.inv_freq), a.every, len(a.factors))
                for a in self.angles
            )
        )
        width = (ctypes.c_int32 * len(widths))(*widths)
        arrays = (ctypes.addressof(array) for array in (structs, width, tables))
        program = ProgramStruct(*arrays, address(self.head_ids), len(ops), len(widths), len(tables), self.vocab_size)
        return program, (structs, keep, tables, width)


def _struct(op: Op, places: Mapping[int, int], keep: list[Any]) -> ctypes.Structure:
    """places: of registers. keep: gets what the struct points to."""
    views = ((0, 0, 0) if v is None else (places[v.register], v.offset, v.width) for v in (op.in_, op.other, op.out))
    pointers = (ctypes.c_void_p * len(op.matrices))(*(ctypes.addressof(m.struct) for m in op.matrices))
    keep.append(pointers)
    return OpStruct(
        OpKind[f"OP_{op.kind.upper()}"],
        sum(OpFlag[f"OP_{flag.upper()}"] for flag in op.flags),
        *views,
        len(pointers),
        ctypes.addressof(pointers) if op.matrices else None,
        address(op.p),
        address(op.q),
        op.i,
        op.f,
    )


def _is_whole(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)


def address(t: np.ndarray | None) -> int | None:
    """Of its first number. The array must be contiguous, and stay."""
    if t is None:
        return None
    try:
        # a fourth of the time, and less code that is not in a cache
        return ctypes.addressof(ctypes.c_char.from_buffer(t))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):  # read-only, or empty
        return t.ctypes.data


def register_places(ops: Sequence[Op], widths: Sequence[Width]) -> tuple[dict[int, int], list[Width]]:
    """A place for each register, and the widths of places. Registers of one width that live one after another share one."""
    lasts = {value.register: n for n, op in enumerate(ops) for value in op.values}
    places, sizes, free = dict[int, int](), list[Width](), dict[Width, list[int]]()
    for n, op in enumerate(ops):
        for value in op.values:
            register = value.register
            if register in places:
                continue
            width = widths[register]
            if free.get(width):
                places[register] = free[width].pop()
            else:
                places[register] = len(sizes)
                sizes.append(width)
        for register in {value.register for value in op.values if lasts[value.register] == n}:
            free.setdefault(widths[register], []).append(places[register])
    return places, sizes
