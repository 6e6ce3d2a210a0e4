"""The matrix of a linear or an embedding: its `weight`, or in its place the blocks of a GGUF file, or the packed matrix.

Linears that are packed side by side have their matrix at the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.kernels.border import as_array, as_tensor
from outrider.models.dtypes import dtype_name

Matrix = Tensor | Blocks | native.Packed
_ATTRIBUTE = "matrix"  # of a module whose matrix is not its `weight`
EXPERTS = "expert_blocks"  # of a mixture: the blocks of its experts, until they are packed
STORED = "stored_experts"  # of a mixture: where a file has its experts, which are packed when a token needs them
LATENT = ("latent_keys", "latent_values")  # modules below a linear over a latent (MLA), once it is in two


def matrix_of(module: nn.Module) -> Matrix:
    """[out, in]."""
    other: Any = module.__dict__.get(_ATTRIBUTE)
    return module.weight.detach() if other is None else other  # pyright: ignore[reportCallIssue, reportReturnType]


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


def give_latent_(module: nn.Module, matrices: Sequence[Matrix]) -> None:
    """Give the linear that makes keys and values of a latent two matrices in place of its own, see `latent_matrices`."""
    free_matrix_(module)
    for part, matrix in zip(LATENT, matrices, strict=True):
        holder = nn.Module()
        holder.register_parameter("weight", nn.Parameter(torch.empty(0), requires_grad=False))
        give_matrix_(holder, matrix)
        module.add_module(part, holder)


def latent_matrices(module: nn.Module, heads: int, keys: int) -> list[Matrix]:
    """Of the linear that makes the keys and values of all heads of a latent: [heads * latent, keys], the first rows of each head
    transposed, and [heads * values, latent], the other rows."""
    if hasattr(module, LATENT[0]):
        return [matrix_of(module.get_submodule(part)) for part in LATENT]
    both = dense(matrix_of(module), torch.float32)
    both = both.view(heads, -1, both.shape[1])
    first, last = both[:, :keys].transpose(1, 2), both[:, keys:]
    return [part.reshape(-1, part.shape[2]) for part in (first, last)]


def join_latents_(model: Any) -> None:
    """The inverse of `give_latent_`, in all modules that have two matrices. They become floats."""
    for module in [m for m in model.modules() if hasattr(m, LATENT[0])]:
        heads, keys = model.config.num_attention_heads, model.config.qk_nope_head_dim
        first, last = (
            dense(m, torch.float32).view(heads, -1, m.shape[1]) for m in latent_matrices(module, heads, keys)
        )
        for part in LATENT:
            delattr(module, part)
        give_matrix_(module, torch.cat([first.transpose(1, 2), last], 1).flatten(0, 1))


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
        return torch.tensor(np.array([matrix.row(n) for n in rows.tolist()], np.float32).reshape(-1, matrix.k))
    return replace(matrix, order=rows if matrix.order is None else matrix.order[as_array(rows)])


def float_rows(matrix: Matrix, rows: Tensor) -> Tensor:
    """float32 [*rows.shape, in]. rows: int64, of any shape."""
    out = dense(rows_of(matrix, rows.flatten()), torch.float32).float()
    return out.view(*rows.shape, matrix.shape[1])


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


def joined(matrices: Sequence[Tensor | Blocks], order: Tensor | None = None) -> Tensor | Blocks:
    """Matrices below each other, then their rows in this order. Blocks of one format stay blocks; others become floats."""
    blocks = [m for m in matrices if not isinstance(m, Tensor)]
    if len(blocks) == len(matrices) and len({b.format for b in blocks}) == 1:
        return replace(blocks[0], data=np.concatenate([b.data for b in blocks]), order=order)
    rows = torch.cat([dense(m, torch.float32) for m in matrices])
    return rows if order is None else rows[order]


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """A tensor as it is; blocks and packed matrices as values of this dtype."""
    return matrix if isinstance(matrix, Tensor) else as_tensor(matrix.dense()).to(dtype)
