"""The matrix of a linear or an embedding: its `weight`, or in its place the blocks of a GGUF file, or the packed matrix.

Linears that are packed side by side have their matrix at the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models.dtypes import dtype_name

Matrix = Tensor | Blocks | native.Packed
_ATTRIBUTE = "matrix"  # of a module whose matrix is not its `weight`
EXPERTS = "expert_blocks"  # of a mixture: the blocks of its experts, until they are packed


def matrix_of(module: nn.Module) -> Matrix:
    """[out, in]."""
    other: Any = module.__dict__.get(_ATTRIBUTE)
    return module.weight.detach() if other is None else other  # pyright: ignore[reportCallIssue, reportReturnType]


def is_packed(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get(_ATTRIBUTE), native.Packed)


def matrices_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, Blocks | native.Packed]]:
    """The modules whose matrix is not their `weight`, with their names."""
    for name, module in model.named_modules():
        if (matrix := module.__dict__.get(_ATTRIBUTE)) is not None:
            yield name, module, matrix


def precision(model: Any) -> str:
    """ "gguf" if a matrix is in blocks, else the dtype of the output head."""
    if any(isinstance(m, Blocks) for _, _, m in matrices_in(model)) or any(
        EXPERTS in m.__dict__ for m in model.modules()
    ):
        return "gguf"
    return dtype_name(model.get_output_embeddings().weight.dtype)


def give_matrix_(module: nn.Module, matrix: Matrix) -> None:
    """Blocks and a packed matrix leave an empty `weight`."""
    free_matrix_(module)
    if isinstance(matrix, Tensor):
        module.weight = nn.Parameter(matrix, requires_grad=False)
    else:
        module.__dict__[_ATTRIBUTE] = matrix


def free_matrix_(*modules: nn.Module) -> None:
    """Let go of the memory, or of the mapped file."""
    for module in modules:
        module.__dict__.pop(_ATTRIBUTE, None)
        dtype: Any = torch.float32 if module.weight.is_meta else module.weight.dtype  # pyright: ignore
        module.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)


def share_matrix(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules have one matrix."""
    first, second = matrix_of(a), matrix_of(b)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.data_ptr() == second.data_ptr()
    return first is second


def rows_of(matrix: Matrix, rows: Tensor) -> Tensor | Blocks:
    """Some rows of a matrix; those of a packed one are float32. rows: int64 [n]."""
    if isinstance(matrix, Tensor):
        return matrix[rows.to(matrix.device)]
    if isinstance(matrix, native.Packed):
        return torch.stack([matrix.row(n) for n in rows.tolist()]) if len(rows) else torch.empty(0, matrix.k)
    return replace(matrix, order=rows if matrix.order is None else matrix.order[rows])


def float_rows(matrix: Matrix, rows: Tensor) -> Tensor:
    """float32 [*rows.shape, in]. rows: int64, of any shape."""
    found = dense(rows_of(matrix, rows.flatten()), torch.float32).float()
    return found.view(*rows.shape, matrix.shape[1])


def packed(
    matrices: Sequence[Matrix], kind: str, biases: Sequence[Tensor | None], *, paired: bool = False
) -> native.Packed:
    """Pack matrices side by side. What is packed already stays as it is, whatever the other arguments say.

    kind: "gguf" keeps everything in the format it has; others convert, see `native.Packed`."""
    if isinstance(matrices[0], native.Packed):
        return matrices[0]
    sources = [m for m in matrices if not isinstance(m, native.Packed)]
    if kind == "gguf":
        floats = {m.dtype for m in sources if isinstance(m, Tensor)}
        kind = dtype_name(floats.pop()) if len(floats) == 1 else "float32"
    else:
        sources = [dense(m, torch.float32) for m in sources]
    return native.Packed(sources, kind, [None if b is None else b.detach() for b in biases], paired=paired)


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """A tensor as it is; blocks and packed matrices as values of this dtype."""
    return matrix if isinstance(matrix, Tensor) else matrix.dense().to(dtype)
