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

import numpy as np

from outrider.core.types import Array
from outrider.kernels import cpu

_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
FEW = 64  # rows: a call each takes less than 150 operations on arrays
TOP = 1 - 2**-24  # the largest uniform: keeps log1p(-u) finite in float32


class Stream(Enum):
    TOKEN = 0  # the target's own choice of token; shared with a coupled drafter
    DRAFT = 1  # an independent drafter's draws
    ACCEPT = 2  # acceptance coins
    RESIDUAL = 3  # the draw after a rejection, and the bonus, under rejection and block


def philox4x32(counter: Sequence[Array], key: Sequence[Array]) -> tuple[Array, ...]:
    """Philox4x32-10 on integer arrays that hold 32-bit words; shapes broadcast. Returns four uint64 arrays of such words."""
    (c0, c1, c2, c3), (k0, k1) = (
        [np.asarray(word, np.uint64) for word in words] for words in (counter, key)
    )  # room for products
    for _ in range(10):
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of a batch. seed, step: int64 [batch], or lists; the seed is read as 64 unsigned bits."""

    seed: Array | Sequence[int]
    step: Array | Sequence[int]

    def select(self, rows: Sequence[int]) -> Noise:
        """The noise of some of the rows."""
        return Noise(*([each[row] for row in rows] for each in map(_listed, (self.seed, self.step))))

    def words(self, stream: Stream, position: Array, n: int) -> Array:
        """int64 [batch, n] of 32-bit words at `position` (int64 [batch])."""
        if 0 < len(self.seed) <= FEW and cpu.available():
            return np.stack([cpu.words(*key, n) for key in self.keys(stream, position)])
        seed, step = (np.array(each, np.int64)[:, None] for each in (self.seed, self.step))
        index, at = np.arange((n + 3) // 4)[None], position[:, None] & _MASK
        now = 0 * step if stream is Stream.TOKEN else step & _MASK
        counter, key = np.broadcast_arrays(index, at, np.array(stream.value), now), (seed & _MASK, (seed >> 32) & _MASK)
        return np.stack(philox4x32(counter, key), -1).reshape(len(self.seed), 4 * index.size)[:, :n].astype(np.int64)

    def uniform(self, stream: Stream, position: Array, n: int) -> Array:
        """float32 [batch, n] in (0, 1). Steps are 2**-32 near 0, and coarser near 1."""
        words = self.words(stream, position, n)
        return np.minimum(((words + 0.5) * 2.0**-32).astype(np.float32), TOP)

    def gumbel(self, stream: Stream, position: Array, n: int, ids: Array | None = None) -> Array:
        """float32 [batch, n] standard Gumbel: argmax(log p + gumbel) is a draw from p.

        ids: int64 [kept], contiguous: only the noise of these of the n tokens, [batch, kept]. It is the same noise."""
        if len(self.seed) and cpu.available():
            return np.stack([cpu.gumbel(*key, n, ids) for key in self.keys(stream, position)])
        every = -np.log(-np.log1p(-self.uniform(stream, position, n)))
        return every if ids is None else every[:, ids]

    def keys(self, stream: Stream, position: Array | Sequence[int]) -> list[tuple[int, int, int, int]]:
        """(seed, stream, step, position) of each row, as the native kernels take them."""
        rows = zip(*map(_listed, (self.seed, self.step, position)), strict=True)
        return [(seed, stream.value, 0 if stream is Stream.TOKEN else step, at) for seed, step, at in rows]


def _listed(numbers: Array | Sequence[int]) -> Sequence[int]:
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers
