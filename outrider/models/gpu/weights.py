"""Weights in the memory of a device, as the kernels of `outrider.kernels.gpu` read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from outrider.kernels.blocks import Blocks
from outrider.kernels.cpu import Packed
from outrider.kernels.cpu.packed import rounded
from outrider.kernels.gpu import coded
from outrider.kernels.gpu.coded import Coded
from outrider.models.dtypes import DTYPES
from outrider.models.hf.arrays import as_tensor
from outrider.models.matrix import Matrix, rows_of
from outrider.models.native.weights import Tensors, TensorSource

_PIECE = 1 << 24  # numbers of a matrix that the host holds a second time while they are copied


class DeviceMatrix:
    """One or more matrices [out, in] over the same inputs, one below the other. A program takes it for a `Packed`.

    Args:
        matrices: floats, or the blocks of a GGUF file.
        biases: one for each matrix, or None.
        device: where it is kept.
        paired: two matrices of one shape, gate and up.
        kind: "bfloat16", "int8", "int4", or "gguf", which keeps blocks in 8 or 4 bits, see `coded.empty`.

    `weight` is [rows, k], a tensor or coded, and `bias` float32 [rows] or None.
    """

    formats = ("",)  # one for all rows

    def __init__(
        self, matrices: Sequence[Matrix], biases: Sequence[Any], device: str, paired: bool = False, kind: str = "bfloat16"
    ) -> None:  # fmt: skip
        shapes = [m.shape for m in matrices]
        if any(len(s) != 2 or s[1] != shapes[0][1] for s in shapes) or (paired and shapes[0] != shapes[-1]):
            raise ValueError(f"matrices that lie side by side have shapes {shapes}")
        rows, self.k = sum(shape[0] for shape in shapes), shapes[0][1]
        self.n = 2 * rounded(shapes[0][0]) if paired else rows  # as a `Packed` counts them, whose panels are filled up
        self.weight, self.device = coded.empty(matrices, kind, rows, self.k, device), device
        self.bias = torch.zeros(rows, device=device) if any(b is not None for b in biases) else None
        first, step = 0, max(_PIECE // self.k, 1)
        for matrix, bias, (count, _) in zip(matrices, biases, shapes, strict=True):
            for at in range(0, count, step):
                part = rows_of(matrix, slice(at, min(at + step, count)))
                if kind == "gguf" and isinstance(self.weight, Coded) and isinstance(part, Blocks):
                    stored = torch.from_numpy(part.data[part.order]).to(device)
                    self.weight.write(first + at, coded.of_blocks(stored, part.format))
                    continue
                part = np.array(part) if isinstance(part, np.ndarray) else part.dense()  # a copy, which torch may read
                if part.dtype.name not in DTYPES:
                    raise ValueError(
                        f"a matrix is {part.dtype}, and a device takes {', '.join(DTYPES)}; convert the checkpoint"
                    )
                if isinstance(self.weight, Coded):
                    self.weight.write(first + at, coded.rounded(as_tensor(part).to(device), self.weight.bits))
                else:
                    self.weight[first + at : first + at + len(part)].copy_(as_tensor(part))
            if bias is not None and self.bias is not None:
                self.bias[first : first + count].copy_(torch.from_numpy(np.array(bias, np.float32)))
            first += count

    @property
    def bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def floats(self) -> torch.Tensor:
        """The weight in bfloat16: a copy of a coded one. A forward reads few rows of a table, so few bits save no time there."""
        return self.weight.floats() if isinstance(self.weight, Coded) else self.weight

    def rows(self, index: np.ndarray) -> np.ndarray:
        """float32 [*index.shape, k]. index: int64, of any shape."""
        at = torch.from_numpy(np.ascontiguousarray(index)).to(self.device)
        return (self.weight.floats(at) if isinstance(self.weight, Coded) else self.weight[at]).float().cpu().numpy()


class DeviceSource(TensorSource):
    """As `TensorSource`, with matrices on a device. Each goes there as soon as it is read, so the host never holds two."""

    def __init__(
        self, tensors: Tensors, config: Any, device: str, head_ids: np.ndarray | None = None, packing: str = "bfloat16"
    ) -> None:  # fmt: skip
        super().__init__(tensors, config, packing, head_ids, further=False)
        self.device = device

    def _packed(self, matrices: Sequence[Any], kind: str, biases: Sequence[Any], paired: bool = False) -> Packed:
        return cast("Packed", DeviceMatrix(matrices, biases, self.device, paired, kind))

    def _table(self, matrix: Any) -> Packed | np.ndarray:
        return self._packed([matrix], "bfloat16", [None])
