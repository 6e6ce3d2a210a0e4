"""The matrix of a linear or an embedding: its `weight`, or the blocks of a GGUF file in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models.dtypes import dtype_name


def matrix_of(module: nn.Module) -> Tensor | Blocks:
    """[out, in]."""
    blocks: Any = module.__dict__.get("blocks")
    return module.weight.detach() if blocks is None else blocks  # pyright: ignore[reportCallIssue, reportReturnType]


def give_matrix_(module: nn.Module, matrix: Tensor | Blocks) -> None:
    """Blocks leave an empty `weight`."""
    free_matrix_(module)
    if isinstance(matrix, Blocks):
        module.__dict__["blocks"] = matrix
    else:
        module.weight = nn.Parameter(matrix, requires_grad=False)


def free_matrix_(*modules: nn.Module) -> None:
    """Let go of the memory, or of the mapped file."""
    for module in modules:
        module.__dict__.pop("blocks", None)
        dtype: Any = torch.float32 if module.weight.is_meta else module.weight.dtype  # pyright: ignore
        module.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)


def share_matrix(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules have one matrix."""
    first, second = matrix_of(a), matrix_of(b)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.data_ptr() == second.data_ptr()
    return first is second


def rows_of(matrix: Tensor | Blocks, rows: Tensor) -> Tensor | Blocks:
    """Some rows of a matrix. rows: int64 [n]."""
    if isinstance(matrix, Tensor):
        return matrix[rows]
    return replace(matrix, order=rows if matrix.order is None else matrix.order[rows])


def packed(
    matrices: Sequence[Tensor | Blocks], kind: str, biases: Sequence[Tensor | None], *, paired: bool = False
) -> native.Packed:
    """Pack matrices side by side. kind: "gguf" keeps everything in the format it has; others convert, see `native.Packed`."""
    if kind == "gguf":
        floats = {m.dtype for m in matrices if isinstance(m, Tensor)}
        return native.Packed(
            matrices, dtype_name(floats.pop()) if len(floats) == 1 else "float32", biases, paired=paired
        )
    return native.Packed([dense(m, torch.float32) for m in matrices], kind, biases, paired=paired)


def dense(matrix: Tensor | Blocks, dtype: torch.dtype) -> Tensor:
    """A tensor as it is; blocks as values of this dtype."""
    return matrix.dense().to(dtype) if isinstance(matrix, Blocks) else matrix
