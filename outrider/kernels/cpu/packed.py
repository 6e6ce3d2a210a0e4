"""Weights in the kernels' own layout, and the linear over them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.cpu.library import PackedStruct
from outrider.kernels.cpu.state import library

FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
_SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LANES = 16


class Packed:
    """y = x W^T + b for one or more weight matrices side by side. A row has the same bits for any number of rows.

    weights: matrices [out, in] over the same inputs (any strides: pass `w.T` of a [in, out] one), float32, bfloat16 or
    float16. biases: one per matrix, or None. paired: two matrices whose blocks of 16 outputs alternate (gate and up).
    int8 has one scale per output, int4 one per 32 inputs of an output. Raises ValueError for matrices that do not fit.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        kind: str,
        biases: Sequence[Tensor | None] | None = None,
        *,
        paired: bool = False,
    ) -> None:
        if kind not in FORMATS:
            raise ValueError(f"weights are kept as one of {', '.join(FORMATS)}, got {kind!r}")
        biases = [None] * len(weights) if biases is None else biases
        k = weights[0].shape[1]
        for w in weights:
            if w.dim() != 2 or w.shape[1] != k or w.device.type != "cpu" or w.dtype not in _SOURCES:
                raise ValueError(
                    f"expected CPU matrices [out, {k}] of float32, bfloat16 or float16, got {w.dtype} "
                    f"{tuple(w.shape)} on {w.device}"
                )
        if paired and (len(weights) != 2 or weights[0].shape != weights[1].shape):
            raise ValueError("paired packing takes two matrices of one shape: gate and up")
        sizes = [w.shape[0] for w in weights]
        n = 2 * _rounded(sizes[0]) if paired else sum(sizes)
        self.kind, self.n, self.k = kind, n, k
        panels, size = _rounded(n) // _LANES, library().panel_bytes(FORMATS[kind], k)
        self._data = torch.empty(max(panels * size, 1), dtype=torch.uint8)
        library().advise_huge(self._data.data_ptr(), self._data.numel())
        self._data.zero_()
        self._scale = torch.zeros(panels * _LANES) if kind == "int8" else None
        self._bias = torch.zeros(panels * _LANES) if any(b is not None for b in biases) else None
        self.struct = PackedStruct(
            self._data.data_ptr(), _pointer(self._scale), _pointer(self._bias), n, k, size, FORMATS[kind], panels
        )
        start = 0
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            first = i * _LANES if paired else start
            library().pack(
                self.struct, w.data_ptr(), _SOURCES[w.dtype], len(w), w.stride(0), w.stride(1), first, int(paired)
            )
            if b is not None and self._bias is not None:
                place = torch.arange(len(w))
                self._bias[first + (place // _LANES * 2 * _LANES + place % _LANES if paired else place)] = (
                    b.detach().float()
                )
            start += len(w)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._data, self._scale, self._bias) if t is not None)

    def linear(self, x: Tensor) -> Tensor:
        """float32 [..., in] -> float32 [..., out]."""
        if x.dtype != torch.float32 or x.shape[-1] != self.k or x.device.type != "cpu":
            raise ValueError(
                f"expected float32 inputs [..., {self.k}] on the CPU, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
        x = x if x.is_contiguous() else x.contiguous()
        rows = x.numel() // self.k
        y = x.new_empty(*x.shape[:-1], self.n)
        library().linear(self.struct, x.data_ptr(), y.data_ptr(), rows, self.k, self.n)
        return y

    def row(self, index: int) -> Tensor:
        """float32 [in]: row `index` of the stacked matrices, with the rounding of the packed format.

        Raises IndexError for a row that does not exist.
        """
        if not 0 <= index < self.n:
            raise IndexError(f"row {index} of {self.n}")
        out = torch.empty(self.k)
        library().unpack_column(self.struct, index, out.data_ptr())
        return out

    def dense(self) -> Tensor:
        """float32 [out, in]: the matrix that the kernels multiply with. For tests."""
        return torch.stack([self.row(i) for i in range(self.n)])


def _rounded(n: int) -> int:
    return (n + _LANES - 1) // _LANES * _LANES


def _pointer(t: Tensor | None) -> ctypes.c_void_p | None:
    return None if t is None else ctypes.c_void_p(t.data_ptr())
