"""A quantised matrix of a checkpoint: its exact values, and the same values in a block format of our kernels if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.blocks import Blocks

_BLOCK = 32  # columns that share a scale in the block formats


class QuantisedWeight(Protocol):
    """A matrix [out, in]."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in]: the values that the format's own library gives in this dtype."""
        ...

    def blocks(self) -> Blocks | None:
        """The very values in a format of our kernels. None if no format holds them exactly."""
        ...


@dataclass(frozen=True, eq=False)
class ScaledIntegers:
    """value = integer * scale (* factor).

    values: int8 or int16 [out, in], with the zero point subtracted. scales: floats [out, group]. group: int64 [in], the group of
    each column. factor: a second factor, by which the library multiplies last.
    """

    values: Tensor
    scales: Tensor
    group: Tensor
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    def dense(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype)
        for part in range(0, len(out), 256):  # float32 for a few rows at a time
            rows = slice(part, part + 256)
            exact = self.values[rows].float() * self.scales[rows].float()[:, self.group]
            out[rows] = (exact if self.factor == 1.0 else exact * self.factor).to(dtype)
        return out

    def blocks(self) -> Blocks | None:
        """Q4_0 for integers of -8 to 7, Q5_0 for -16 to 15 (4 bits with a zero point), Q8_0 for 8 bits.

        A zero point must not become a minimum in float16: it would be rounded.
        """
        rows, columns = self.shape
        if columns % _BLOCK or self.factor != 1.0:
            return None
        group = self.group.view(-1, _BLOCK)
        if not bool((group == group[:, :1]).all()):  # the order of activations mixes the groups
            return None
        scales = self.scales[:, group[:, 0]]
        halves = scales.half()
        if not torch.equal(halves.float(), scales.float()):
            return None
        low, high = (int(x) for x in self.values.aminmax())
        values = self.values.view(rows, -1, _BLOCK)
        head = halves.contiguous().view(torch.uint8).view(rows, -1, 2)
        if low >= -8 and high <= 7:
            name, parts = "Q4_0", [head, _nibbles((values + 8).to(torch.uint8))]
        elif low >= -16 and high <= 15:
            shifted = (values + 16).to(torch.uint8)
            name, parts = "Q5_0", [head, _fifth_bits(shifted), _nibbles(shifted & 15)]
        elif low >= -128 and high <= 127:
            name, parts = "Q8_0", [head, values.to(torch.int8).view(torch.uint8)]
        else:
            return None
        return Blocks(torch.cat(parts, dim=-1).view(rows, -1), name, columns)


def _nibbles(values: Tensor) -> Tensor:
    """uint8 [..., 32] of 0 to 15 -> uint8 [..., 16]: the first half in the low bits, the second in the high ones."""
    return values[..., :16] | (values[..., 16:] << 4)


def _fifth_bits(values: Tensor) -> Tensor:
    """uint8 [..., 32] of 0 to 31 -> uint8 [..., 4]: bit i of the 32 is the fifth bit of value i."""
    bits = (values >> 4).view(*values.shape[:-1], 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class ScaledFloats:
    """value = small float * scale. values: float8 [out, in]. scales: floats [out or tiles of rows or 1, in or tiles or 1].

    tile: rows and columns of a tile; the last tile of a side may be cut.
    """

    values: Tensor
    scales: Tensor
    tile: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    def dense(self, dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape
        out = torch.empty(self.shape, dtype=dtype)
        column = torch.arange(columns) // self.tile[1]
        for part in range(0, rows, 256):
            row = torch.arange(part, min(part + 256, rows))
            scales = self.scales.float()[(row // self.tile[0])[:, None], column[None]]
            out[row] = (self.values[part : part + 256].float() * scales).to(dtype)
        return out

    def blocks(self) -> Blocks | None:
        return None


@dataclass(frozen=True, eq=False)
class CodedFloats:
    """value = code[index] * scale, over the flattened matrix (bitsandbytes' nf4 and fp4).

    index: uint8 [number]. code: float32 [16]. scales: float32 [block]. size: numbers in a block.
    """

    index: Tensor
    code: Tensor
    scales: Tensor
    size: int
    shape: tuple[int, int]

    def dense(self, dtype: torch.dtype) -> Tensor:
        values = self.code[self.index.long()]
        scales = self.scales.repeat_interleave(self.size)[: len(values)]
        return (values * scales).to(dtype).view(self.shape)

    def blocks(self) -> Blocks | None:
        return None


def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Matrices over the same inputs, one below the other."""
    same = [w for w in weights if isinstance(w, ScaledIntegers)]
    if len(same) == len(weights) and all(
        torch.equal(w.group, same[0].group) and w.factor == same[0].factor for w in same
    ):
        values, scales = torch.cat([w.values for w in same]), torch.cat([w.scales for w in same])
        return ScaledIntegers(values, scales, same[0].group, same[0].factor)
    return _Stacked(tuple(weights))


@dataclass(frozen=True, eq=False)
class _Stacked:
    """Matrices one below the other that are kept in floats."""

    weights: tuple[QuantisedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return (sum(w.shape[0] for w in self.weights), self.weights[0].shape[1])

    def dense(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([w.dense(dtype) for w in self.weights])

    def blocks(self) -> Blocks | None:
        return None
