"""Attention over a long context: its time over that of its bytes, by precision of keys and values.

    python -m benchmarks.attention --context 4096 16384 --nodes 5

One layer, with the heads of real models. The precisions take turns within a round, each on a cache of its own that is larger than
the processor's, as the layers of a model are. `beyond its bytes` is the time of one node beyond that at 128 tokens, over the time
that the bytes of the further tokens take at the machine's read bandwidth. Medians over the rounds, the first discarded.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from benchmarks import headline
from benchmarks.machine import bandwidth
from benchmarks.report import console, rich_table
from outrider.kernels import cpu as native
from outrider.kernels.attention import Scoring
from outrider.kernels.vectors import packed_width
from outrider.models.cache import KV_CACHE_DTYPES, SlotCache

MEMORY = 128 << 20  # bytes of float32 keys and values that the calls of a turn go through, so that none is in a cache
SHORT = 128  # tokens of the context to compare with
PRECISIONS = ("float32", "bfloat16", "int8")


class Heads(NamedTuple):
    """The attention heads of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int


SHAPES = (
    Heads("SmolLM2-135M", 9, 3, 64),
    Heads("Qwen2.5-1.5B", 12, 2, 128),
    Heads("Gemma-3-270M", 4, 1, 256),
    Heads("Llama-3-8B", 32, 8, 128),
)


def measure(shape: Heads, context: int, nodes: Sequence[int], rounds: int) -> dict[tuple[str, int], float]:
    """Seconds of a call by precision and nodes."""
    layers = max(1, MEMORY // (8 * shape.kv_heads * context * shape.dim))
    caches, heads = dict[str, SlotCache](), (shape.kv_heads, shape.dim)
    for name in PRECISIONS:
        caches[name] = cache = SlotCache(1, context, name)
        cache.reserve([0], context)
        cache.make(dict.fromkeys(range(layers), (heads, heads)), torch.empty(0))
        some = native.pack_vectors(torch.randn(1, shape.kv_heads, context, shape.dim), cache.layers[0][0].dtype)
        for pair in cache.layers:
            for t in pair:
                t[:, :, :context] = some
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for name in PRECISIONS for n in nodes}
    for turn in range(rounds + 1):
        for name, n in times:
            query, plan = torch.randn(1, n, shape.heads, shape.dim), native.AttentionPlan([0], [context - n], n)
            start = perf_counter()
            for keys, values in caches[name].layers:
                native.attention(plan, query, keys, values, Scoring(shape.dim**-0.5))
            if turn:
                times[name, n].append((perf_counter() - start) / layers)
    return {key: statistics.median(found) for key, found in times.items()}


def rows(shape: Heads, contexts: Sequence[int], nodes: Sequence[int], rounds: int, read: float) -> list[list[str]]:
    """read: bytes of a second at read bandwidth."""
    out = list[list[str]]()
    short = measure(shape, SHORT, [1], rounds)
    for context in contexts:
        times = measure(shape, context, [1, *nodes], rounds)
        for name in PRECISIONS:
            one, dtype = times[name, 1], KV_CACHE_DTYPES[name] or torch.float32
            size = 2 * shape.kv_heads * packed_width(shape.dim, dtype) * dtype.itemsize * (context - SHORT)
            beyond = (one - short[name, 1]) / (size / read)
            more = [f"{times[name, n] / one:.2f}" for n in nodes]
            heads = f"{shape.name}: {shape.heads} of {shape.dim}, {shape.kv_heads} of keys"
            out.append([heads, f"{context:,}", name, f"{1e3 * one:.3f}", f"{beyond:.2f}", *more])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=headline(__doc__))
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 16384], help="tokens that a node attends to")
    parser.add_argument("--nodes", type=int, nargs="+", default=[5], help="nodes of a forward, compared with one")
    parser.add_argument("--shape", nargs="+", choices=[s.name for s in SHAPES], default=[s.name for s in SHAPES])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    read = bandwidth()["all"] * 1e9
    found = [
        row
        for shape in SHAPES
        if shape.name in args.shape
        for row in rows(shape, args.context, args.nodes, args.rounds, read)
    ]
    head = [
        "heads",
        "context",
        "keys and values",
        "ms, one node",
        "beyond its bytes",
        *(f"{n} nodes" for n in args.nodes),
    ]
    console.print(rich_table(f"attention of one layer, {read / 1e9:.1f} GB/s", head, found))


if __name__ == "__main__":
    main()
