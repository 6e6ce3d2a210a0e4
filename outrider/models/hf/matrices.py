"""The matrix of a linear or an embedding: its `weight`, or in its place blocks, or the packed matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.kernels.border import as_array, as_tensor
from outrider.models import matrix as arrays

Matrix = Tensor | Blocks | native.Packed
_ATTRIBUTE = "matrix"  # of a module whose matrix is not its `weight`
EXPERTS = "expert_blocks"  # of a mixture: the blocks of its experts, until they are packed


def matrix_of(module: nn.Module) -> Matrix:
    """[out, in]."""
    other: Any = module.__dict__.get(_ATTRIBUTE)
    return module.weight.detach() if other is None else other  # pyright: ignore[reportCallIssue, reportReturnType]


def matrices_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, Blocks | native.Packed]]:
    """The modules whose matrix is not their `weight`, with their names."""
    for name, module in model.named_modules():
        if (matrix := module.__dict__.get(_ATTRIBUTE)) is not None:
            yield name, module, matrix


def give_matrix_(module: nn.Module, matrix: Matrix) -> None:
    """Blocks and a packed matrix leave an empty `weight`."""
    module.__dict__.pop(_ATTRIBUTE, None)
    dtype: Any = torch.float32 if module.weight.is_meta else module.weight.dtype  # pyright: ignore
    values = matrix if isinstance(matrix, Tensor) else torch.empty(0, dtype=dtype)
    module.weight = nn.Parameter(values, requires_grad=False)
    if not isinstance(matrix, Tensor):
        module.__dict__[_ATTRIBUTE] = matrix


def rows_of(matrix: Matrix, rows: Tensor) -> Tensor | Blocks:
    """As `models.matrix.rows_of`."""
    if isinstance(matrix, Tensor):
        return matrix[rows.to(matrix.device)]
    found = arrays.rows_of(matrix, as_array(rows))
    return found if isinstance(found, Blocks) else as_tensor(found)


def float_rows(matrix: Matrix, rows: Tensor) -> Tensor:
    """As `models.matrix.float_rows`."""
    if isinstance(matrix, Tensor):
        return matrix[rows.to(matrix.device)].float()
    return as_tensor(arrays.float_rows(matrix, as_array(rows)))
