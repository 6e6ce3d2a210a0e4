"""The experts of a layer in a GGUF file: slices of the mapped file. A forward packs an expert when a token first needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models.checkpoint import StoredTensor
from outrider.models.gguf.reader import floats_at, matrix_at

# The block formats that the kernels compute with. Others are dequantised.
PACKED_FORMATS = tuple(name for name in native.FORMATS if name not in native.KINDS)


@dataclass(frozen=True)
class StoredExperts:
    """Where a file has the experts of a layer. tensors: by name, gate, up and down, [expert, out, in], in formats of the kernels;
    then their biases, [expert, out], if there are any."""

    tensors: Mapping[str, StoredTensor]

    def packed(self) -> list[native.Packed]:
        """Gate and up side by side (paired), and then down, of each expert in turn."""
        reserve, made, tensors = native.Reserve(), list[native.Packed](), [*self.tensors.values()]
        biases = [[*floats_at(t)] for t in tensors[3:]] or [[None] * tensors[0].shape[0]] * 3
        each = zip(*(slices(matrix_at(t), t.shape[0]) for t in tensors[:3]), *biases, strict=True)
        for gate, up, down, gate_bias, up_bias, down_bias in each:
            pair = native.Packed([gate, up], "float32", [gate_bias, up_bias], paired=True, later=reserve)
            made += [pair, native.Packed([down], "float32", [down_bias], later=reserve)]
        return made


def slices(matrices: Tensor | Blocks, count: int) -> list[Tensor] | list[Blocks]:
    """The matrix of each expert."""
    if isinstance(matrices, Tensor):
        return [*matrices.view(count, -1, matrices.shape[-1])]
    return [replace(matrices, data=rows) for rows in matrices.data.chunk(count)]
