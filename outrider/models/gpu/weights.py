"""Weights in the memory of a device, as the kernels of `outrider.kernels.gpu` read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from outrider.kernels.cpu import Packed
from outrider.kernels.cpu.packed import rounded
from outrider.models.dtypes import DTYPES
from outrider.models.hf.arrays import as_tensor
from outrider.models.matrix import Matrix, rows_of
from outrider.models.native.weights import Tensors, TensorSource

_PIECE = 1 << 24  # numbers of a matrix that the host holds a second time while they are copied


class DeviceMatrix:
    """One or more matrices [out, in] over the same inputs, one below the other, in bfloat16. A program takes it for a `Packed`.

    Args:
        matrices: floats, or the blocks of a GGUF file, which are dequantised.
        biases: one for each matrix, or None.
        device: where it is kept.
        paired: two matrices of one shape, gate and up.

    `weight` is bfloat16 [rows, k], and `bias` float32 [rows] or None.
    """

    formats = ("bfloat16",)

    def __init__(
        self, matrices: Sequence[Matrix], biases: Sequence[np.ndarray | None], device: str, paired: bool = False
    ) -> None:
        shapes = [m.shape for m in matrices]
        if any(len(s) != 2 or s[1] != shapes[0][1] for s in shapes) or (paired and shapes[0] != shapes[-1]):
            raise ValueError(f"matrices that lie side by side have shapes {shapes}")
        rows, self.k = sum(shape[0] for shape in shapes), shapes[0][1]
        self.n = 2 * rounded(shapes[0][0]) if paired else rows  # as a `Packed` counts them, whose panels are filled up
        self.weight = torch.empty(rows, self.k, dtype=torch.bfloat16, device=device)
        self.bias = torch.zeros(rows, device=device) if any(b is not None for b in biases) else None
        first, step = 0, max(_PIECE // self.k, 1)
        for matrix, bias, (count, _) in zip(matrices, biases, shapes, strict=True):
            for at in range(0, count, step):
                part = rows_of(matrix, slice(at, min(at + step, count)))
                part = np.array(part) if isinstance(part, np.ndarray) else part.dense()  # a copy, which torch may read
                if part.dtype.name not in DTYPES:
                    raise ValueError(
                        f"a matrix is {part.dtype}, and a device takes {', '.join(DTYPES)}; convert the checkpoint"
                    )
                self.weight[first + at : first + at + len(part)].copy_(as_tensor(part))
            if bias is not None and self.bias is not None:
                self.bias[first : first + count].copy_(torch.from_numpy(np.array(bias, np.float32)))
            first += count

    @property
    def bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def rows(self, index: np.ndarray) -> np.ndarray:
        """float32 [*index.shape, k]. index: int64, of any shape."""
        at = torch.from_numpy(np.ascontiguousarray(index)).to(self.weight.device)
        return self.weight[at].float().cpu().numpy()


class DeviceSource(TensorSource):
    """As `TensorSource`, with matrices on a device. Each goes there as soon as it is read, so the host never holds two."""

    def __init__(self, tensors: Tensors, config: Any, device: str, head_ids: np.ndarray | None = None) -> None:
        super().__init__(tensors, config, "bfloat16", head_ids, further=False)
        self.device = device

    def _packed(self, matrices: Sequence[Any], kind: str, biases: Sequence[Any], paired: bool = False) -> Packed:
        return cast("Packed", DeviceMatrix(matrices, biases, self.device, paired))

    def _table(self, matrix: Any) -> Packed | np.ndarray:
        return self._packed([matrix], "", [None])
