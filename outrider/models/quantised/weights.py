"""A quantised matrix of a checkpoint: its exact values, and the same values in a block format of our kernels if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.blocks import Blocks

_BLOCK = 32  # columns that share a scale in the block formats
_FLOATS4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12])  # e2m1, doubled
_ROWS = 256  # of which `dense` has float32 values at a time


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A matrix [out, in]: value[i, j] = values[i, j] * scales[i // tile, group[j]] (* factor)."""

    values: Tensor  # [out, in], integers with the zero point subtracted, or small floats
    scales: Tensor  # floats [tiles of rows, group]
    group: Tensor  # int64 [in], the group of each column
    tile: int = 1  # rows that share a scale; the last tile may be cut
    factor: float = 1.0  # a second factor, by which the library multiplies last

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in]: the values that the format's own library gives in this dtype."""
        out = torch.empty(self.shape, dtype=dtype)
        for start in range(0, len(out), _ROWS):
            part = self.values[start : start + _ROWS].float()
            tiles = torch.arange(start, start + len(part)) // self.tile
            exact = part * self.scales[tiles].float()[:, self.group]
            out[start : start + _ROWS] = (exact if self.factor == 1.0 else exact * self.factor).to(dtype)
        return out

    def blocks(self) -> Blocks | None:
        """The very values in a format of our kernels. None if no format holds them exactly.

        MXFP4 for doubled 4-bit floats under powers of two. Q4_0 for integers of -8 to 7, Q5_0 for -16 to 15 (4 bits with a zero
        point), Q8_0 for 8 bits. A zero point must not become a minimum in float16: it would be rounded.
        """
        rows, columns = self.shape
        if self.values.is_floating_point() or columns % _BLOCK or self.factor != 1.0 or self.tile != 1:
            return None
        group = self.group.view(-1, _BLOCK)
        if not bool((group == group[:, :1]).all()):  # the order of activations mixes the groups
            return None
        scales = self.scales[:, group[:, 0]]
        values = self.values.view(rows, -1, _BLOCK)
        if (packed := _mxfp4(values, scales)) is not None:
            return Blocks(packed, "MXFP4", columns)
        halves = scales.half()
        if not torch.equal(halves.float(), scales.float()):
            return None
        low, high = (int(x) for x in self.values.aminmax())
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


def _mxfp4(values: Tensor, scales: Tensor) -> Tensor | None:
    """MXFP4's blocks uint8 [out, bytes] of integers [out, block, 32] and scales [out, block], or None if they are others."""
    mantissa, exponent = scales.float().frexp()
    if not bool(((mantissa == 0.5) & (exponent >= -127)).all()) or not bool(torch.isin(values, _FLOATS4).all()):
        return None
    codes = (values[..., None].abs() == _FLOATS4[:8]).to(torch.uint8).argmax(-1) + 8 * (values < 0)
    head = (exponent + 127).to(torch.uint8)[..., None]
    return torch.cat([head, _nibbles(codes.to(torch.uint8))], dim=-1).view(len(values), -1)


def _nibbles(values: Tensor) -> Tensor:
    """uint8 [..., 32] of 0 to 15 -> uint8 [..., 16]: the first half in the low bits, the second in the high ones."""
    return values[..., :16] | (values[..., 16:] << 4)


def _fifth_bits(values: Tensor) -> Tensor:
    """uint8 [..., 32] of 0 to 31 -> uint8 [..., 4]: bit i of the 32 is the fifth bit of value i."""
    bits = (values >> 4).view(*values.shape[:-1], 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Matrices of one format over the same inputs, one below the other."""
    first = weights[0]
    if any(w.tile != 1 or not torch.equal(w.group, first.group) for w in weights):  # then each number has its scale
        each = torch.arange(first.shape[1])
        scales = [w.scales[torch.arange(w.shape[0]) // w.tile].float()[:, w.group] for w in weights]
        return QuantisedWeight(torch.cat([w.values.float() for w in weights]), torch.cat(scales), each, 1, first.factor)
    values, scales = torch.cat([w.values for w in weights]), torch.cat([w.scales for w in weights])
    return QuantisedWeight(values, scales, first.group, 1, first.factor)
