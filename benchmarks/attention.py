"""Attention over a long context: its time with rounded keys and values over its time with float32 ones.

    python -m benchmarks.attention --context 4096 16384 --nodes 1 5

One layer, with the heads of real models. The precisions take turns within a round, each on a cache of its own that is larger than
the processor's, as the layers of a model are. A ratio is taken within a round. Medians over the rounds, the first discarded.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from benchmarks import headline
from benchmarks.report import console, rich_table
from outrider.kernels import cpu as native
from outrider.kernels.attention import Scoring
from outrider.models.cache import KV_CACHE_DTYPES

MEMORY = 128 << 20  # bytes of float32 keys and values that the calls of a turn go through, so that none is in a cache
HEAD = ["heads", "context", "nodes", "ms, float32", "bfloat16 over it", "int8 over it"]


class Heads(NamedTuple):
    """The attention heads of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int


SHAPES = (
    Heads("builtin:code", 10, 2, 32),
    Heads("SmolLM2-135M", 9, 3, 64),
    Heads("Qwen2.5-1.5B", 12, 2, 128),
    Heads("Llama-3-8B", 32, 8, 128),
)


def measure(shape: Heads, context: int, nodes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call by precision, one number a round."""
    layers = max(1, MEMORY // (8 * shape.kv_heads * context * shape.dim))
    query = torch.randn(1, nodes, shape.heads, shape.dim)
    plan = native.AttentionPlan([0], [context - nodes], nodes)
    stored = {}
    for name, dtype in KV_CACHE_DTYPES.items():
        pairs = [
            [
                native.pack_vectors(torch.randn(1, shape.kv_heads, context, shape.dim), dtype or torch.float32)
                for _ in "kv"
            ]
            for _ in range(layers)
        ]
        stored[name] = pairs
    times: dict[str, list[float]] = {name: [] for name in stored}
    for turn in range(rounds + 1):
        for name, pairs in stored.items():
            start = perf_counter()
            for keys, values in pairs:
                native.attention(plan, query, keys, values, Scoring(shape.dim**-0.5))
            if turn:
                times[name].append((perf_counter() - start) / layers)
    return times


def row(shape: Heads, context: int, nodes: int, times: dict[str, list[float]]) -> list[str]:
    exact = times["auto"]
    ratios = [statistics.median(t / e for t, e in zip(times[k], exact, strict=True)) for k in ("bfloat16", "int8")]
    name = f"{shape.name}: {shape.heads} of {shape.dim}, {shape.kv_heads} of keys"
    return [name, f"{context:,}", str(nodes), f"{1e3 * statistics.median(exact):.3f}", *(f"{r:.2f}" for r in ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=headline(__doc__))
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 16384], help="tokens that a node attends to")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 5], help="nodes of a forward")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows: list[Sequence[str]] = [
        row(shape, context, nodes, measure(shape, context, nodes, args.rounds))
        for shape in SHAPES
        for context in args.context
        for nodes in args.nodes
    ]
    console.print(rich_table("attention of one layer", HEAD, rows))


if __name__ == "__main__":
    main()
