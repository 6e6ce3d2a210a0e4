"""Matrices of 8 and of 4 bits, which a product reads as they are: a number is code * scale + minimum, rounded to bfloat16.

Blocks of a GGUF file keep their codes. Scales and minima become float16, which changes those of Q4_K, Q5_K and Q6_K by at most
1/4096: an eighth of what rounding to bfloat16 does. All others are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.kernels.blocks import Blocks

_BLOCK = 128  # numbers to a multiple of which rows are filled up: the widest tile of a product
_ROUNDED = 32  # numbers of a group where floats are rounded, as on the CPU
_FORMATS = {
    "Q4_0": (18, 4, 32), "Q4_1": (20, 4, 32), "Q4_K": (144, 4, 32), "Q5_0": (22, 8, 32), "Q5_1": (24, 8, 32),
    "Q5_K": (176, 8, 32), "Q6_K": (210, 8, 16), "Q8_0": (34, 8, 32),
}  # fmt: skip
"""Bytes of a block, bits of a code here, numbers of a group. Other formats have no codes: they become bfloat16."""
_LEVELS = (-8.0, -7.5, -7.0, 7.0, -8.6, 7.6)  # for the peak of 32 numbers in 4 bits, as on the CPU

Numbers = tuple[
    Tensor, Tensor, Tensor
]  # codes int16 [n, k], and of each group a scale and a minimum, float32 [n, groups]


class Coded(NamedTuple):
    """A matrix [n, k].

    codes: int8 [n, K], or uint8 [n, K / 2], where the low half of a byte is the first of two numbers. K is k, filled up.
    pairs: int32 [n, K / group]: the bits of a float16 scale, and above them those of a minimum.
    """

    codes: Tensor
    pairs: Tensor
    k: int
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.k

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.pairs.nbytes

    def write(self, row: int, numbers: Numbers) -> None:
        """From this row on."""
        codes, width, rows = numbers[0], self.pairs.shape[1], slice(row, row + len(numbers[0]))
        affine = [x.repeat_interleave(codes.shape[1] // x.shape[1] // self.group, 1) for x in numbers[1:]]
        pairs = torch.stack(affine, -1).half().view(torch.int32)[..., 0]
        codes = pad(codes, (0, width * self.group - codes.shape[1]))
        self.codes[rows] = codes if self.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
        self.pairs[rows] = pad(pairs, (0, width - pairs.shape[1]))

    def floats(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """bfloat16 [rows, k]: what products read."""
        codes, pairs = self.codes[rows], self.pairs[rows].unsqueeze(-1).view(torch.float16).float()
        codes = codes if self.bits == 8 else torch.stack([codes & 15, codes >> 4], -1)
        values = codes.reshape(*pairs.shape[:-1], self.group) * pairs[..., :1] + pairs[..., 1:]
        return values.flatten(-2)[..., : self.k].bfloat16()


def empty(matrices: Sequence[object], kind: str, n: int, k: int, device: str) -> Tensor | Coded:
    """What matrices that lie one below the other are written to, [n, k].

    kind: "int8" or "int4" rounds. "gguf" keeps blocks, with the most bits that one of them has. Others are bfloat16."""
    formats = [_FORMATS.get(m.format) if isinstance(m, Blocks) else None for m in matrices if kind == "gguf"]
    if kind in ("int8", "int4"):
        bits, group = int(kind[3:]), _ROUNDED
    elif None in formats or kind != "gguf":
        return torch.empty(n, k, dtype=torch.bfloat16, device=device)
    else:
        _, sizes, groups = zip(*(f for f in formats if f), strict=True)
        bits, group = max(sizes), min(groups)
    width, dtype = -(-k // _BLOCK) * _BLOCK, torch.int8 if bits == 8 else torch.uint8
    codes = torch.empty(n, width * bits // 8, dtype=dtype, device=device)
    return Coded(codes, torch.empty(n, width // group, dtype=torch.int32, device=device), k, bits, group)


def rounded(weights: Tensor, bits: int) -> Numbers:
    """Floats [n, k] in 8 or 4 bits. They are the numbers that `Packed` keeps on the CPU."""
    w = pad(weights.float(), (0, -weights.shape[1] % _ROUNDED)).unflatten(1, (-1, _ROUNDED))
    peak = w.gather(2, w.abs().argmax(2, keepdim=True))
    peak, best, least = peak.abs() if bits == 8 else peak, torch.zeros_like(peak), torch.full_like(peak, torch.inf)
    top, bottom, zero = (127, -127, 0) if bits == 8 else (7, -8, 8)
    for levels in (127.0,) if bits == 8 else _LEVELS:
        scale = (peak / levels).half().float()
        error = (w - scale * (w / scale).round().clamp(bottom, top)).square().sum(2, keepdim=True)
        better = (scale != 0) & scale.isfinite() & (error < least)
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    codes = torch.where(best != 0, w * (1 / best), 0).round().clamp(bottom, top) + zero
    return codes.short().flatten(1), best[..., 0], best[..., 0] * -zero


def of_blocks(data: Tensor, kind: str) -> Numbers:
    """The rows of a GGUF file. data: uint8 [n, bytes]. kind: ggml's name of the format."""
    data = data.unflatten(1, (-1, _FORMATS[kind][0]))  # [row, block, byte]
    b, halves, bit = (
        data.short(),
        data.view(torch.float16).float(),
        torch.arange(8, device=data.device, dtype=torch.int16),
    )
    scale, minimum = halves[..., :1], None
    if kind == "Q8_0":
        codes = b[..., 2:].to(torch.int8).short()
    elif kind == "Q6_K":
        low, high = b[..., :128].unflatten(2, (2, 64)), b[..., 128:192].unflatten(2, (2, 1, 32))
        low, high = torch.cat([low & 15, low >> 4], -1), high >> 2 * bit[:4, None] & 3
        codes = (low | high.flatten(3) << 4) - 32
        scale = halves[..., 104:] * b[..., 192:208].to(torch.int8)
    elif kind in ("Q4_K", "Q5_K"):
        first, second, third = b[..., 4:16].split(4, 2)
        scale = scale * torch.cat([first & 63, third & 15 | first >> 6 << 4], 2)
        minimum = -halves[..., 1:2] * torch.cat([second & 63, third >> 4 | second >> 6 << 4], 2)
        low = b[..., -128:].unflatten(2, (4, 32))
        codes = torch.stack([low & 15, low >> 4], 3).flatten(2, 3)
        if kind == "Q5_K":
            codes = codes | (b[..., None, 16:48] >> bit[:, None] & 1) << 4
    else:
        low = b[..., -16:]
        codes, zero = torch.cat([low & 15, low >> 4], 2), 8
        if kind[1] == "5":
            codes, zero = codes | (b[..., -20:-16, None] >> bit & 1).flatten(2) << 4, 16
        minimum = halves[..., 1:2] if kind[3] == "1" else scale * -zero
    minimum = torch.zeros_like(scale) if minimum is None else minimum
    return codes.reshape(len(b), -1), scale.reshape(len(b), -1), minimum.reshape(len(b), -1)
