"""A matrix as a GGUF file stores it: blocks of small integers with scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix [out, in] in one of ggml's block formats."""

    data: np.ndarray  # uint8 [out, bytes of a row]; it may be a view of a mapped file
    format: str  # ggml's name of the format, such as "Q4_K"
    columns: int  # the `in` of the shape
    order: np.ndarray | None = None  # int64 [out], row i of the matrix is row order[i] of `data`; None: as stored

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.data) if self.order is None else len(self.order), self.columns)

    def dense(self) -> np.ndarray:
        """float32 [out, in]: the values that ggml's own dequantisation gives. The reference of the packed kernels."""
        from gguf import GGMLQuantizationType, quants

        rows = self.data if self.order is None else self.data[self.order]
        return quants.dequantize(rows, GGMLQuantizationType[self.format])
