"""The target's own token at each row, and the path of a draft that agrees with it: rule `match`.

The noise has the bits of `core.noise`, whose operations are repeated one by one. A token is the one that `core.sampling` draws.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import RowTensors
from outrider.kernels.gpu.jit import blocks, jit, power_of_two, settings

BLOCK = 1024  # tokens of the vocabulary of a program


def blocks_of(vocab: int) -> int:
    """Numbers that `choose` leaves of each row."""
    return blocks(vocab, BLOCK)


@jit
def _log(x):
    """Of positive normal numbers; `log8` of the CPU kernels, each operation rounded as there."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    n = e.to(tl.float32)
    f = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    z = f * f
    p = tl.fma(f, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, f, 1.1676998740e-1)
    p = tl.fma(p, f, -1.2420140846e-1)
    p = tl.fma(p, f, 1.4249322787e-1)
    p = tl.fma(p, f, -1.6668057665e-1)
    p = tl.fma(p, f, 2.0000714765e-1)
    p = tl.fma(p, f, -2.4999993993e-1)
    p = tl.fma(p, f, 3.3333331174e-1)
    y = tl.fma(n, -2.12194440e-4, p * f * z)
    y = f + tl.fma(z, -0.5, y)
    return tl.fma(n, 0.693359375, y)


@jit
def gumbel(seed, position, first, STREAM: tl.constexpr, V: tl.constexpr):
    """Noise of V tokens from `first` on, at a position: float32 [V]. V and `first` are multiples of 4."""
    quads, zero = (first // 4 + tl.arange(0, V // 4)).to(tl.uint32), tl.zeros((V // 4,), tl.uint32)
    a, b, c, d = tl.philox(seed, quads, zero + position.to(tl.uint32), zero + STREAM, zero)
    word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (V,))  # the words of a quad stand beside each other
    half = (word.to(tl.int64) * 2 + 1).to(tl.float32)  # 2 * (word + 1/2), rounded once
    u = tl.minimum(half * 1.1641532182693481e-10, 0.9999999403953552)  # times 2 ** -33; at most 1 - 2 ** -24
    w = 1.0 - u
    return -_log(-(_log(w) + tl.div_rn((1.0 - w) - u, w)))


@jit
def _scores(logits, first, vocab, seed, temperature, position, V: tl.constexpr):
    """Of V tokens from `first` on: the logits, divided by the temperature and with the noise of a position unless that is 0."""
    at = first + tl.arange(0, V)
    score = tl.load(logits + at, at < vocab, float("-inf"))
    if temperature > 0:
        score = tl.div_rn(score, temperature + tl.zeros((V,), tl.float32)) + gumbel(seed, position, first, 0, V)
    return score


@jit(do_not_specialize=["each"])
def _choose(
    logits, best, index, seeds, temperatures, positions, ahead, each, vocab, blocks, logits_step, V: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1)
    position, at, entry = tl.load(positions + row), block * V + tl.arange(0, V), row // each
    if position < 0:
        return
    if ahead is not None:
        position += tl.load(ahead + entry)
    own = logits + row.to(tl.int64) * logits_step
    score = _scores(
        own, block * V, vocab, tl.load(seeds + entry), tl.load(temperatures + entry), position + 1, V
    )  # Stream.TOKEN, at the position of the token that is drawn
    bad = tl.max((score != score).to(tl.int32), 0)
    top = tl.where(bad > 0, float("inf"), tl.max(score, 0))
    tl.store(best + row * blocks + block, top)
    tl.store(index + row * blocks + block, tl.min(tl.where(score == top, at, 2147483647), 0))


def choose(
    logits: Tensor,
    best: Tensor,
    index: Tensor,
    rows: RowTensors,
    seeds: Tensor,
    temperatures: Tensor,
    ahead: Tensor | None = None,
) -> None:
    """The largest score of each block of the vocabulary, and its token: logits / temperature + noise, or the logits if it is 0.

    logits: float32 [R, vocab]. best: float32 [R, `blocks_of(vocab)`]; inf where the logits have NaN. index: int32, like best.
    seeds: int64 [E]. temperatures: float32 [E]; 0: greedy. ahead: int32 [E], added to positions for the noise."""
    (count, vocab), many = logits.shape, best.shape[1]
    _choose[count, many](
        logits, best, index, seeds, temperatures, rows.positions, ahead, count // len(seeds), vocab, many, logits.stride(0),
        V=BLOCK, **settings(),
    )  # fmt: skip


@jit
def _rank(
    logits, best, index, seeds, temperatures, ahead, tokens, positions, cells, starts, first, out, keys, vocab, blocks,
    logits_step, V: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.arange(0, B)
    position, at = tl.load(positions + row), tl.arange(0, V)
    if position < 0:
        return
    seed, temperature, ahead = tl.load(seeds + row), tl.load(temperatures + row), tl.load(ahead + row)
    own = logits + row.to(tl.int64) * logits_step
    scores = tl.load(best + row * blocks + block, block < blocks, float("-inf"))
    places = tl.load(index + row * blocks + block, block < blocks, 2147483647)
    to = ((position - tl.load(first + row)) * tl.num_programs(0) + row) * COUNT
    for rank in range(COUNT):
        top = tl.max(scores, 0)
        place = tl.min(tl.where(scores == top, places, 2147483647), 0)
        token = tl.where((top > float("-inf")) & (top < float("inf")), place, -1)
        tl.store(out + to + rank, token)
        tl.store(keys + to + rank, top)
        if rank == 0:
            tl.store(tokens + row, tl.maximum(token, 0))
        if COUNT > 1:  # the next one of its block takes its place
            begin = place // V * V
            score = _scores(own, begin, vocab, seed, temperature, position + 1 + ahead, V)
            score = tl.where((score < top) | ((score == top) & (begin + at > place)), score, float("-inf"))
            most = tl.max(score, 0)
            places = tl.where(block == place // V, tl.min(tl.where(score == most, begin + at, 2147483647), 0), places)
            scores = tl.where(block == place // V, most, scores)
    tl.store(positions + row, position + 1)
    tl.store(cells + row, position + 1)
    tl.store(starts + row, position + 1)


def rank(logits: Tensor, best: Tensor, index: Tensor, rows: Any, ahead: Tensor, out: Tensor, keys: Tensor) -> None:
    """The largest scores of each entry, in falling order; then the rows, of one node an entry, are those after its first token.

    logits: float32 [E, vocab]. best, index, ahead: as of `choose`. out: int32 [level, E, count], tokens, -1 where none can be
    drawn. keys: float32 like it, their scores. The level is that of a row's position after `rows.last`."""
    (entries, vocab), many = logits.shape, best.shape[1]
    _rank[(entries,)](
        logits, best, index, rows.seeds, rows.temperatures, ahead, rows.tokens, rows.positions, rows.cells, rows.starts,
        rows.last, out, keys, vocab, many, logits.stride(0), V=BLOCK, B=power_of_two(many), COUNT=out.shape[2], **settings(),
    )  # fmt: skip


@jit
def _walk(
    best, index, tokens, positions, parents, path, accepted, drawn, nodes, blocks, N: tl.constexpr, B: tl.constexpr
):
    entry, n = tl.program_id(0), tl.arange(0, N)
    row = entry * nodes + n
    there = n < nodes
    there = there & (tl.load(positions + row, there, -1) >= 0)
    top, token = tl.full((N,), float("-inf"), tl.float32), tl.full((N,), -1, tl.int32)
    for first in range(0, blocks, B):
        block = first + tl.arange(0, B)
        at, seen = row[:, None] * blocks + block[None, :], there[:, None] & (block < blocks)[None, :]
        score = tl.load(best + at, seen, float("-inf"))
        most = tl.max(score, 1)
        place = tl.min(tl.where(score == most[:, None], tl.load(index + at, seen, 2147483647), 2147483647), 1)
        token = tl.where(most > top, place, token)  # blocks rise, so the first of equals is the lowest token
        top = tl.maximum(top, most)
    token = tl.where(top < float("inf"), token, -1)
    tl.store(drawn + row, token, n < nodes)
    given, parent = tl.load(tokens + row, there, -2), n - 1  # -2 is never drawn
    if parents is not None:
        parent = tl.load(parents + row, there, -2)
    tl.store(path + row, tl.where(n == 0, 0, -1), n < nodes)
    tl.debug_barrier()  # the path is written again below, by other threads
    here, length = 0, 0
    while here < N:  # a child is after its parent; N: there is none that was drawn
        own = tl.sum(tl.where(n == here, token, 0), 0)
        here = tl.min(tl.where((parent == here) & (given == own) & (n > here), n, N), 0)
        length += (here < N).to(tl.int32)
        tl.store(path + entry * nodes + length, here, here < N)
    tl.store(accepted + entry, length)


def walk(best: Tensor, index: Tensor, rows: RowTensors, path: Tensor, accepted: Tensor, drawn: Tensor) -> None:
    """The token drawn at each row, and the path of nodes that were drawn at their parents; among equals the lowest node.

    best, index: of `choose`. path: int32 [E, N], node numbers from the root on, and -1 after the last. accepted: int32 [E], nodes
    after the root. drawn: int32 [E, N]; -1 where logits have NaN or inf, or nothing can be drawn. The last token of a step is
    drawn[path[accepted]]."""
    (entries, nodes), many = path.shape, best.shape[1]
    n = power_of_two(nodes)
    _walk[entries,](
        best, index, rows.tokens, rows.positions, rows.parents, path, accepted, drawn, nodes, many, N=n,
        B=min(power_of_two(many), max(16, 2048 // n)), **settings(),
    )  # fmt: skip


@jit
def _advance(tokens, positions, cells, starts, drawn):
    entry = tl.program_id(0)
    position = tl.load(positions + entry)
    if position >= 0:
        tl.store(tokens + entry, tl.maximum(tl.load(drawn + entry), 0))
        tl.store(positions + entry, position + 1)
        tl.store(cells + entry, position + 1)
        tl.store(starts + entry, position + 1)


def advance(rows: RowTensors, drawn: Tensor) -> None:
    """Make rows of one node an entry those of the next step: what was drawn, a place further on. drawn: int32 [E, 1]."""
    _advance[(len(rows.slots),)](rows.tokens, rows.positions, rows.cells, rows.starts, drawn, **settings(1))
