"""The time of a forward over some nodes behind a context: what verification and a draft token cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.ruler import turns
from outrider.core.types import Array
from outrider.kernels.vectors import pack_vectors, vector_dim
from outrider.models.base import LanguageModel
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes

NODES = (1, 2, 3, 5, 9, 17)
CONTEXT = 256
Times = dict[int, list[float]]  # seconds of each round, by nodes


def some_tokens(count: int, vocab_size: int) -> Array:
    """int64 [1, count], always the same."""
    return np.random.default_rng(count).integers(vocab_size, size=(1, count))


def read_context(model: LanguageModel, length: int) -> SlotCache:
    """A cache with room for some nodes, in whose slot so many tokens were read."""
    cache = model.new_cache(1, length + 64)
    model.forward(Nodes(some_tokens(length, model.vocab_size), cache, [0]), want="none")
    cache.commit([0], [range(length)])
    return cache


def random_context(model: LanguageModel, length: int) -> SlotCache:
    """The same with random keys and values: the time does not depend on them, and nothing must be read."""
    cache = model.new_cache(1, length + 64)
    model.forward(Nodes(some_tokens(1, model.vocab_size), cache, [0]), want="none")
    cache.reserve([0], length + 64)
    draw = np.random.default_rng(0).standard_normal
    for t in (t for pair in cache.layers for t in pair if t.shape[1]):
        t[:, :, :length] = pack_vectors(draw((1, t.shape[1], length, vector_dim(t)), np.float32), t.dtype)
    cache.restore(0, length, cache.snapshot(0))
    return cache


def forward_seconds(
    sides: Mapping[str, tuple[LanguageModel, SlotCache]],
    nodes: Sequence[int] = NODES,
    rounds: int = 7,
    repeats: int = 3,
) -> dict[str, Times]:
    """Seconds of a forward of each side, the sides and sizes in turns.

    Args:
        sides: models by name, each with the cache that it reads.
        nodes: sizes of a forward.
        rounds: that count.
        repeats: forwards of a side and size in a round, of which the fastest counts.
    """
    times: dict[str, Times] = {name: {n: [] for n in nodes} for name in sides}
    for number, (name, n) in turns([(name, n) for name in sides for n in nodes], rounds):
        model, cache = sides[name]
        tokens, seconds = some_tokens(n, model.vocab_size), list[float]()
        for _ in range(repeats):
            began = perf_counter()
            model.forward(Nodes(tokens, cache, [0]))
            seconds.append(perf_counter() - began)
        if number >= 0:
            times[name][n].append(min(seconds))
    return times


def summary(times: Times) -> dict[str, Any]:
    """Milliseconds over the fewest nodes, and for each size the ratio to them: a median of ratios within a round."""
    one = times[min(times)]
    ratios = {n: statistics.median(t / o for t, o in zip(ts, one, strict=True)) for n, ts in times.items()}
    return {"ms": round(1e3 * statistics.median(one), 3), "ratio": {str(n): round(r, 3) for n, r in ratios.items()}}
