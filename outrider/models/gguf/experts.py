"""The experts of a layer in a GGUF file: slices of the mapped file. A forward packs an expert when a token first needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models.checkpoint import StoredTensor
from outrider.models.gguf.reader import floats_at, matrix_at

# The block formats that the kernels compute with. Others are dequantised.
PACKED_FORMATS = tuple(name for name in native.FORMATS if name not in native.KINDS)


@dataclass(frozen=True)
class StoredExperts:
    """Where a file has the experts of a layer. matrices: gate, up and down, [expert, out, in], in formats of the kernels. biases:
    the same, [expert, out]; empty if there are none."""

    matrices: tuple[StoredTensor, ...]
    biases: tuple[StoredTensor, ...] = ()

    def packed(self) -> list[native.Packed]:
        """Gate and up side by side (paired), and then down, of each expert in turn."""
        reserve, made = native.Reserve(), list[native.Packed]()
        biases = [[*floats_at(t)] for t in self.biases] or [[None] * self.matrices[0].shape[0]] * 3
        each = zip(*(slices(matrix_at(t), t.shape[0]) for t in self.matrices), *biases, strict=True)
        for gate, up, down, gate_bias, up_bias, down_bias in each:
            pair = native.Packed([gate, up], "float32", [gate_bias, up_bias], paired=True, later=reserve)
            made += [pair, native.Packed([down], "float32", [down_bias], later=reserve)]
        return made

    def places(self, files: Sequence[Path]) -> list[list[int]]:
        """The number of a tensor's file and where it begins there, of each. `at` finds the tensors again."""
        return [[files.index(t.path), t.offset] for t in (*self.matrices, *self.biases)]

    @classmethod
    def at(
        cls, places: Sequence[Sequence[int]], files: Sequence[Path], tensors: Mapping[str, StoredTensor]
    ) -> StoredExperts:
        """Those of a file with these tensors. Raises KeyError for places that are none of tensors."""
        found = {(files.index(t.path), t.offset): t for t in tensors.values()}
        each = [found[number, offset] for number, offset in places]
        return cls(tuple(each[:3]), tuple(each[3:]))


def slices(matrices: Tensor | Blocks, count: int) -> list[Tensor] | list[Blocks]:
    """The matrix of each expert."""
    if isinstance(matrices, Tensor):
        return [*matrices.view(count, -1, matrices.shape[-1])]
    return [replace(matrices, data=rows) for rows in matrices.data.chunk(count)]
