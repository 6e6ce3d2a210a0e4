"""A matrix [out, in]: floats, the blocks of a file, or packed by the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks

Matrix = np.ndarray | Blocks | native.Packed


def rows_of(matrix: Matrix, rows: np.ndarray | slice) -> np.ndarray | Blocks:
    """Some rows of a matrix; those of a packed one are float32. rows: int64 [n], or a slice."""
    if isinstance(matrix, np.ndarray):
        return matrix[rows]
    rows = np.arange(matrix.shape[0])[rows]
    if isinstance(matrix, native.Packed):
        return np.array([matrix.row(n) for n in rows.tolist()], np.float32).reshape(-1, matrix.k)
    return replace(matrix, order=rows if matrix.order is None else matrix.order[rows])


def float_rows(matrix: Matrix, rows: np.ndarray) -> np.ndarray:
    """float32 [*rows.shape, in]. rows: int64, of any shape."""
    return dense(rows_of(matrix, rows.reshape(-1))).reshape(*rows.shape, matrix.shape[1])


def joined(matrices: Sequence[np.ndarray | Blocks], order: np.ndarray | None = None) -> np.ndarray | Blocks:
    """Matrices below each other, then their rows in this order. Blocks of one format stay blocks; others become float32."""
    blocks = [m for m in matrices if isinstance(m, Blocks)]
    if len(blocks) == len(matrices) and len({b.format for b in blocks}) == 1:
        return replace(blocks[0], data=np.concatenate([b.data for b in blocks]), order=order)
    rows = np.concatenate([dense(m) for m in matrices])
    return rows if order is None else rows[order]


def dense(matrix: Matrix, dtype: Any = np.float32) -> np.ndarray:
    """The values in this dtype."""
    return np.asarray(matrix if isinstance(matrix, np.ndarray) else matrix.dense(), dtype)
