"""Randomness as a value: a number is a function of (seed, stream, step, position, index). There is no generator state.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the row's seed; the counter
is (index // 4, position, stream, step). Each purpose of randomness has its own stream. `TOKEN` ignores the step. So plain
decoding and match verification read the same noise, and the text is the same for every drafter. All other streams use the
step too, because a later step uses the same positions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from outrider.core.types import ints
from outrider.kernels import cpu, why_no_kernels

_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
FEW = 64  # rows: a call each takes less than 150 operations on tensors
TOP = 1 - 2**-24  # the largest uniform: keeps log1p(-u) finite in float32


class Stream(Enum):
    TOKEN = 0  # the target's own choice of token; shared with a coupled drafter
    DRAFT = 1  # an independent drafter's draws
    ACCEPT = 2  # acceptance coins
    RESIDUAL = 3  # the draw after a rejection, and the bonus, under rejection and block


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; shapes broadcast. Returns four such tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # 32 x 32 -> 64 bit products in signed int64: split one factor so that nothing overflows
        hi0, lo0 = _mulhilo(_M0, c0)
        hi1, lo1 = _mulhilo(_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    low, high = (b & 0xFFFF) * a, (b >> 16) * a  # each below 2**48
    total = low + ((high & 0xFFFF) << 16)  # below 2**49
    return (high >> 16) + (total >> 32), total & _MASK


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of a batch. seed, step: int64 [batch]; the seed is read as 64 unsigned bits."""

    seed: Tensor
    step: Tensor

    def select(self, rows: Sequence[int]) -> Noise:
        """The noise of some of the rows."""
        return Noise(self.seed[rows], self.step[rows])  # pyright: ignore[reportArgumentType]

    def words(self, stream: Stream, position: Tensor, n: int) -> Tensor:
        """int64 [batch, n] of 32-bit words at `position` (int64 [batch])."""
        if 0 < len(self.seed) <= FEW and not why_no_kernels(self.seed.device):
            return torch.stack([torch.from_numpy(cpu.words(*key, n)) for key in self.keys(stream, position)])
        index = torch.arange((n + 3) // 4, device=self.seed.device)[None, :]
        step = torch.zeros_like(self.step) if stream is Stream.TOKEN else self.step
        shape = (len(self.seed), index.shape[1])
        counter = (
            index.expand(shape),
            (position[:, None] & _MASK).expand(shape),
            torch.full_like(index, stream.value).expand(shape),
            (step[:, None] & _MASK).expand(shape),
        )
        key = ((self.seed & _MASK)[:, None], ((self.seed >> 32) & _MASK)[:, None])
        return torch.stack(philox4x32(counter, key), dim=-1).flatten(1)[:, :n]

    def uniform(self, stream: Stream, position: Tensor, n: int) -> Tensor:
        """float32 [batch, n] in (0, 1). Steps are 2**-32 near 0, and coarser near 1."""
        words = self.words(stream, position, n)
        return ((words.double() + 0.5) * 2.0**-32).float().clamp_max_(TOP)

    def gumbel(self, stream: Stream, position: Tensor, n: int, ids: Tensor | None = None) -> Tensor:
        """float32 [batch, n] standard Gumbel: argmax(log p + gumbel) is a draw from p.

        ids: int64 [kept], contiguous: only the noise of these of the n tokens, [batch, kept]. It is the same noise."""
        if not why_no_kernels(self.seed.device):
            return torch.stack([torch.from_numpy(cpu.gumbel(*key, n, ids)) for key in self.keys(stream, position)])
        every = -torch.log(-torch.log1p(-self.uniform(stream, position, n)))
        return every if ids is None else every[:, ids]

    @cached_property
    def host(self) -> list[tuple[int, int]]:
        """(seed, step) of each row, read to the host once."""
        return [*zip(ints(self.seed), ints(self.step), strict=True)]

    def keys(self, stream: Stream, position: Tensor | Sequence[int]) -> list[tuple[int, int, int, int]]:
        """(seed, stream, step, position) of each row, as the native kernels take them."""
        rows = zip(self.host, ints(position) if isinstance(position, Tensor) else position, strict=True)
        return [(seed, stream.value, 0 if stream is Stream.TOKEN else step, at) for (seed, step), at in rows]
