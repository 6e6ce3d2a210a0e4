"""Whole chains of draft tokens on a GPU: each token is drawn where the next forward reads it, and the host waits once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.gpu import choice
from outrider.kernels.gpu.jit import power_of_two
from outrider.kernels.probabilities import log_softmax
from outrider.models.base import Chain, DrawnChain
from outrider.models.gpu.cache import GpuCache
from outrider.models.gpu.plan import GpuPlan
from outrider.models.gpu.rows import RowBuffer, Rows, reach
from outrider.models.gpu.step import MOST_ROWS, Graphs

RIVALS = 8  # tokens of a level that share its chance, see `drafters.model.confidence`
LEVELS = 64  # tokens of a chain


class GpuChains:
    """The chains of a plan."""

    def __init__(self, plan: GpuPlan) -> None:
        self._plan, self.most = plan, min(MOST_ROWS, plan.logit_rows)
        size, blocks = 2 * LEVELS * self.most * RIVALS, choice.blocks_of(plan.program.head.n)
        self._buffer = RowBuffer(plan.device, 2 * self.most, 0)
        self._best = torch.zeros(self.most, blocks, device=plan.device)
        self._index = torch.zeros(self.most, blocks, dtype=torch.int32, device=plan.device)
        self._out = torch.zeros(size, dtype=torch.int32, device=plan.device)
        self._told = torch.zeros(size, dtype=torch.int32, pin_memory=self._out.is_cuda)

    def draw(self, cache: GpuCache, chains: Sequence[Chain], held: Sequence[int]) -> list[DrawnChain]:
        """See `LanguageModel.draft_chains`. The chains are as deep as the deepest one, and the host cuts them.

        held: tokens of each that a forward has read to the scratch. The others are at most `most` together, as powers of two."""
        read = [chain.tokens[count:] for chain, count in zip(chains, held, strict=True)]
        starts = [cache.length[chain.slot] + count for chain, count in zip(chains, held, strict=True)]
        entries, nodes, depth = (
            power_of_two(len(chains)),
            power_of_two(max(map(len, read))),
            min(LEVELS, max(c.depth for c in chains)),
        )
        length = min(reach(max(starts) + nodes + depth), cache.capacity)
        count = RIVALS if any(chain.error for chain in chains) else 1
        first, host = self._buffer.views(entries, nodes, 0, length)
        after, step = self._buffer.views(entries, 1, 0, length, first.size)
        for chain in chains:  # one by one: the longest text is not that of the most tokens
            cache.reserve([chain.slot], len(chain.tokens) + depth - 1)
        for fields in (host, step):
            for name in fields:
                fields[name][:] = -1 if name == "positions" else 0
        for e, (chain, tokens, start) in enumerate(zip(chains, read, starts, strict=True)):
            at, end = e * nodes, start + len(tokens) - 1
            host["tokens"][at : at + len(tokens)], step["tokens"][e] = tokens, tokens[-1]
            host["positions"][at : at + len(tokens)] = host["cells"][at : at + len(tokens)] = range(start, end + 1)
            host["slots"][e] = step["slots"][e] = chain.slot
            host["starts"][e], host["last"][e] = start, at + len(tokens) - 1
            step["positions"][e] = step["cells"][e] = step["starts"][e] = step["last"][e] = end
            step["seeds"][e], step["temperatures"][e] = chain.noise[0], chain.temperature
            step["parents"][e] = chain.noise[3] - end - 1  # not read of single rows: where the noise is
        self._buffer.send(first.size + after.size)
        self._plan.turn += 1
        if (graphs := cache.kept.get(self)) is None:
            graphs = cache.kept[self] = Graphs(self._plan.device)
        for rows in (first if nodes > 1 else after, *[after] * (depth - 1)):
            graphs.run((rows, after, count), lambda rows=rows: self._commands(cache, rows, after, count))
        told = self._told[: 2 * LEVELS * entries * count]
        told.copy_(self._out[: len(told)], non_blocking=True)
        if self._out.is_cuda:
            torch.cuda.current_stream().synchronize()
        tokens, keys = (part.reshape(LEVELS, entries, count) for part in np.split(told.numpy(), 2))
        keys = keys.view(np.float32)
        return [_drawn(chain, tokens[: chain.depth, e], keys[: chain.depth, e]) for e, chain in enumerate(chains)]

    def _commands(self, cache: GpuCache, rows: Rows, after: Rows, count: int) -> None:
        """Read rows, draw a token of each entry, and leave the rows that read it."""
        logits, _ = self._plan.run(rows, cache, (), "all" if rows is after else "last")
        best, index, ahead = self._best[: after.count], self._index[: after.count], cast("Tensor", after.parents)
        size = LEVELS * after.count * count
        out, keys = self._out[:size].view(LEVELS, -1, count), self._out[size : 2 * size].view(torch.float32)
        choice.choose(logits, best, index, after, after.seeds, after.temperatures, ahead)
        choice.rank(logits, best, index, after, ahead, out, keys.view(LEVELS, -1, count))


def _drawn(chain: Chain, tokens: np.ndarray, keys: np.ndarray) -> DrawnChain:
    """tokens, keys: [level, rank] of the best tokens of each level."""
    end = int((tokens[:, 0] < 0).argmax()) if (tokens[:, 0] < 0).any() else len(tokens)
    if not chain.error:
        return DrawnChain(tokens[:end, 0].tolist(), [], [])
    chances = np.exp(log_softmax(keys[:end] * np.float32((chain.temperature or 1.0) / chain.error)))
    for level, chance in enumerate(np.cumprod(chances[:, 0]).tolist()):
        if chance < chain.min_probability:
            end = level + 1
            break
    siblings = list[list[tuple[int, float]]]()
    for others, each in zip(tokens[:end, 1 : chain.width].tolist(), chances[:, 1:].tolist(), strict=False):
        siblings.append([(token, chance) for token, chance in zip(others, each, strict=False) if token >= 0])
    return DrawnChain(tokens[:end, 0].tolist(), chances[:end, 0].tolist(), siblings if chain.width > 1 else [])
