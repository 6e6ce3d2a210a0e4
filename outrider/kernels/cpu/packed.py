"""Weights in the kernels' own layout, and the linear over them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from outrider.kernels.blocks import Blocks
from outrider.kernels.cpu.library import Format, PackedStruct, RowsStruct
from outrider.kernels.cpu.state import library

# How a matrix is kept. The names in capitals are ggml's; see src/quant.hpp.
FORMATS = {f.name.lower() if f <= Format.FLOAT16 else f.name: f.value for f in Format}
# What float weights may be rounded to, and how it is kept.
_ROUNDED = {"int8": "Q8_0", "int4": "Q4_0"}
KINDS = ("float32", "bfloat16", "float16", *_ROUNDED)
_SOURCES = {
    np.dtype(np.float32): Format.FLOAT32,
    np.dtype(ml_dtypes.bfloat16): Format.BFLOAT16,
    np.dtype(np.float16): Format.FLOAT16,
}
LANES = 16
MOST = 2**31 - 1
"""Native code counts in 32 bits."""
_MIXED = -1


class Packed:
    """y = x W^T + b for one or more weight matrices side by side. A row has the same bits for any number of rows.

    int8 and int4 have one float16 scale per 32 inputs of an output. Quantised weights meet activations that are rounded in
    blocks of 32: to 8 bits, or to 16 bits for weights of 8 bits.

    Args:
        weights: matrices [out, in] over the same inputs: float32, bfloat16 or float16 arrays of any strides (pass `w.T` of
            a [in, out] one), or `Blocks`, which keep their own format.
        kind: how arrays are kept, one of KINDS.
        biases: one per matrix, or None.
        paired: two matrices whose blocks of 16 outputs alternate (gate and up).
        later: pack when a forward first needs the matrix, into memory of this reserve. The weights are then `Blocks` of
            mapped files, as stored, whose pages are given back once they are packed.

    Raises ValueError for matrices that do not fit.
    """

    def __init__(
        self,
        weights: Sequence[np.ndarray | Blocks],
        kind: str,
        biases: Sequence[np.ndarray | None] | None = None,
        *,
        paired: bool = False,
        later: Reserve | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"weights are kept as one of {', '.join(KINDS)}, got {kind!r}")
        biases = [None] * len(weights) if biases is None else biases
        self.k = weights[0].shape[1]
        formats = [_format_of(w, self.k, kind) for w in weights]
        sizes = [w.shape[0] for w in weights]
        if paired and (len(weights) != 2 or sizes[0] != sizes[1]):
            raise ValueError("paired packing takes two matrices of one shape: gate and up")
        self.n = 2 * rounded(sizes[0]) if paired else sum(sizes)
        self.formats = tuple(dict.fromkeys(formats))
        panels = rounded(self.n) // LANES
        self._bias = np.zeros(panels * LANES, np.float32) if any(b is not None for b in biases) else None
        if len(self.formats) > 1:
            if not paired and any(size % LANES for size in sizes[:-1]):
                raise ValueError(
                    f"matrices in different formats ({', '.join(self.formats)}) need a multiple of {LANES} outputs each, "
                    f"got {sizes}; give them one format"
                )
            self.parts: list[Packed] = [Packed([w], kind, later=later) for w in weights]
            self._data = np.empty(0, np.uint8)
        else:
            self.parts = []
            size = max(panels * library().panel_bytes(FORMATS[formats[0]], self.k), 1)
            self._data = _untouched(size) if later is None else later.take(size)
            if later is None:
                library().advise_huge(self._data.ctypes.data, size)
        self._point(paired)
        if later is not None and not self.parts:
            self._read_later(cast("Sequence[Blocks]", weights))
        start = 0
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            first = i * LANES if paired else start
            if not self.parts and later is None:
                _fill(self.struct, w, first, paired)
            if b is not None and self._bias is not None:
                place = np.arange(len(b))
                self._bias[first + (place // LANES * 2 * LANES + place % LANES if paired else place)] = b
            start += sizes[i]

    def _point(self, paired: bool) -> None:
        """Make the struct over the buffers, or over the parts. paired: the panels of the parts alternate."""
        panels, bias = rounded(self.n) // LANES, _pointer(self._bias)
        if self.parts:
            self._pointers = (ctypes.c_void_p * len(self.parts))(*(ctypes.addressof(p.struct) for p in self.parts))
            parts = ctypes.addressof(self._pointers), len(self.parts), int(paired)
            self.struct = PackedStruct(None, bias, self.n, self.k, 0, _MIXED, panels, *parts)
        else:
            code = FORMATS[self.formats[0]]
            size = library().panel_bytes(code, self.k)
            self.struct = PackedStruct(self._data.ctypes.data, bias, self.n, self.k, size, code, panels, None, 0, 0)

    def _read_later(self, blocks: Sequence[Blocks]) -> None:
        rows = [(b.data.ctypes.data, b.data.shape[1], b.data.shape[0]) for b in blocks]
        self._unread = (RowsStruct * len(rows))(*rows), blocks
        self.struct.unread, self.struct.unread_count = ctypes.addressof(self._unread[0]), len(rows)

    @property
    def is_complete(self) -> bool:
        """Whether it is packed. If not, a forward packs it when it first needs it."""
        return not self.struct.unread and all(p.is_complete for p in self.parts)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What `from_state` makes the same object of: settings that JSON can hold, and the buffers by name."""
        library().complete(self.struct)
        parts = [p.state() for p in self.parts]
        settings = {"formats": [*self.formats], "n": self.n, "k": self.k, "paired": bool(self.struct.alternate)}
        buffers = {f"{i}.{name}": t for i, (_, arrays) in enumerate(parts) for name, t in arrays.items()}
        buffers |= {} if parts else {"data": self._data}
        buffers |= {} if self._bias is None else {"bias": self._bias}
        return settings | {"parts": [part for part, _ in parts]}, buffers

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], buffers: Mapping[str, np.ndarray]) -> Packed:
        """Keeps the buffers, without a copy. Raises ValueError for buffers that are not of these settings."""
        self = cls.__new__(cls)
        self.formats, self.n, self.k = tuple(settings["formats"]), settings["n"], settings["k"]
        what = f"a matrix {self.n} x {self.k} in {', '.join(map(str, self.formats))}"
        if not all(type(size) is int and 0 < size <= MOST for size in (self.n, self.k)):
            raise ValueError(f"{what}: it must have 1 to {MOST} outputs and inputs")
        self.parts = [
            cls.from_state(part, {n.removeprefix(f"{i}."): t for n, t in buffers.items() if n.startswith(f"{i}.")})
            for i, part in enumerate(settings["parts"])
        ]
        self._data, self._bias = buffers.get("data", np.empty(0, np.uint8)), buffers.get("bias")
        panels = rounded(self.n) // LANES
        self._check_parts(what, panels, bool(settings["paired"]))
        self._point(settings["paired"])
        sizes = {"data": (0 if self.parts else max(panels * self.struct.panel_bytes, 1), np.uint8)}
        sizes |= {} if self._bias is None else {"bias": (panels * LANES, np.float32)}
        got = {"data": (self._data.size, self._data.dtype)}
        got |= {} if self._bias is None else {"bias": (self._bias.size, self._bias.dtype)}
        if got != sizes:
            raise ValueError(f"{what} has buffers {sizes}, got {got}")
        return self

    def _check_parts(self, what: str, panels: int, paired: bool) -> None:
        """Raise ValueError unless the parts, if there are any, have the panels of the whole."""
        held = [rounded(p.n) // LANES for p in self.parts]
        if not self.parts:
            return
        cut = any(p.n % LANES for p in self.parts[:-1]) and not paired
        if any(p.k != self.k or p.parts for p in self.parts) or sum(held) != panels or cut or paired * len({*held}) > 1:
            sizes = ", ".join(f"{p.n} x {p.k}" for p in self.parts)
            raise ValueError(f"{what} cannot have parts of {sizes}")

    def converted(self, kind: str) -> Packed:
        """The same outputs and biases, with weights that are kept as `kind`."""
        out = Packed([self.dense()], kind)
        out._bias = self._bias
        out._point(False)
        return out

    @property
    def shape(self) -> tuple[int, int]:
        return (self.n, self.k)

    @property
    def bytes(self) -> int:
        here = sum(t.nbytes for t in (self._data, self._bias) if t is not None)
        return here + sum(p.bytes for p in self.parts)

    def linear(self, x: ArrayLike) -> np.ndarray:
        """float32 [..., in] -> float32 [..., out]."""
        x = np.ascontiguousarray(x, np.float32)
        if x.shape[-1] != self.k:
            raise ValueError(f"expected inputs [..., {self.k}], got {[*x.shape]}")
        y = np.empty((*x.shape[:-1], self.n), np.float32)
        library().linear(self.struct, x.ctypes.data, y.ctypes.data, x.size // self.k, self.k, self.n)
        return y

    def row(self, index: int) -> np.ndarray:
        """float32 [in]: row `index` of the stacked matrices, with the rounding of the packed format.

        Raises IndexError for a row that does not exist.
        """
        if not 0 <= index < self.n:
            raise IndexError(f"row {index} of {self.n}")
        out = np.empty(self.k, np.float32)
        library().unpack_column(self.struct, index, out.ctypes.data)
        return out

    def dense(self) -> np.ndarray:
        """float32 [out, in]: the matrix that the kernels multiply with."""
        return np.stack([self.row(i) for i in range(self.n)])


_LARGE_PAGE = 2 << 20
_RESERVED = 32 * _LARGE_PAGE


def zeros_in_large_pages(count: int) -> np.ndarray:
    """uint8 [count] of zeros. From the size of a large page on, it begins with one, and unwritten pages take no memory."""
    if count < _LARGE_PAGE:
        return np.zeros(count, np.uint8)
    size = -(-count // _LARGE_PAGE) * _LARGE_PAGE
    t = _untouched(size, _LARGE_PAGE)
    library().advise_huge(t.ctypes.data, size)
    return t[:count]


class Reserve:
    """Gives memory that takes no pages until it is written, in large pages."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def take(self, count: int) -> np.ndarray:
        """uint8 [count] of zeros, begun at a multiple of 64."""
        size = -(-count // 64) * 64
        if size > len(self._left):
            self._left = zeros_in_large_pages(max(size, _RESERVED))
        taken, self._left = self._left[:count], self._left[size:]
        return taken


def _untouched(count: int, begin: int = 64) -> np.ndarray:
    """uint8 [count] of zeros, begun at a multiple of `begin`. No page is written."""
    t = np.zeros(count + begin, np.uint8)
    return t[-t.ctypes.data % begin :][:count]


def _format_of(w: np.ndarray | Blocks, k: int, kind: str) -> str:
    """The name in FORMATS by which a matrix is kept. Raises ValueError for one that does not fit."""
    if isinstance(w, Blocks):
        if w.shape[1] != k or w.format not in FORMATS:
            raise ValueError(f"expected blocks [out, {k}] of {', '.join(FORMATS)}, got {w.format} {w.shape}")
        return w.format
    if w.ndim != 2 or w.shape[1] != k or w.dtype not in _SOURCES:
        raise ValueError(f"expected matrices [out, {k}] of float32, bfloat16 or float16, got {w.dtype} {[*w.shape]}")
    return _ROUNDED.get(kind, kind)


def _fill(to: ctypes.Structure, w: np.ndarray | Blocks, first: int, paired: bool) -> None:
    if isinstance(w, Blocks):
        rows, order = np.ascontiguousarray(w.data), None if w.order is None else np.ascontiguousarray(w.order, np.int64)
        library().pack_rows(to, rows.ctypes.data, rows.shape[1], w.shape[0], _pointer(order), first, int(paired))
    else:
        strides = (stride // w.itemsize for stride in w.strides)
        library().pack(to, w.ctypes.data, _SOURCES[w.dtype], len(w), *strides, first, int(paired))


def rounded(n: int) -> int:
    """Outputs with those that fill the last panel."""
    return (n + LANES - 1) // LANES * LANES


def _pointer(t: np.ndarray | None) -> ctypes.c_void_p | None:
    return None if t is None else ctypes.c_void_p(t.ctypes.data)
