"""V(M): the time of a forward over M tokens over the time of a forward over one. What verification costs.

    python -m benchmarks.forward --size 0.5B --precision float32 [--random]

Sides take turns within a round; a ratio is taken within a round, so that a machine that slows down between rounds does
not bend it. Medians over the rounds, the first discarded.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from benchmarks import headline
from benchmarks.pairs import BYTES, PRECISIONS, Pair, made, pair, weight_count
from benchmarks.sides import open_sides

ROWS = (1, 2, 4, 8, 16)


class Timed(Protocol):
    """What can be timed. forward: seconds of each repeat of a forward over so many rows behind a context."""

    @property
    def name(self) -> str: ...

    def forward(self, rows: int, context: int, repeats: int) -> list[float]: ...


def measure(
    sides: Sequence[Timed], rows: Sequence[int] = ROWS, context: int = 256, rounds: int = 5, repeats: int = 3
) -> dict[str, dict[int, list[float]]]:
    """Seconds by side and M: the least of `repeats` for every round after the warm-up."""
    times: dict[str, dict[int, list[float]]] = {s.name: {m: [] for m in rows} for s in sides}
    for turn in range(rounds + 1):
        for side in sides:
            for m in rows:
                least = min(side.forward(m, context, repeats))
                if turn:
                    times[side.name][m].append(least)
    return times


def summary(times: dict[int, list[float]]) -> dict[str, Any]:
    """Milliseconds at one token; for each M the median ratio and its smallest and largest."""
    ratios = {m: [t / one for t, one in zip(ts, times[1], strict=True)] for m, ts in times.items()}
    return {
        "ms": round(1e3 * statistics.median(times[1]), 3),
        "ms_least": round(1e3 * min(times[1]), 3),
        "ratio": {m: round(statistics.median(r), 3) for m, r in ratios.items()},
        "least_ratio": {m: round(min(ts) / min(times[1]), 3) for m, ts in times.items()},
        "spread": {m: [round(min(r), 3), round(max(r), 3)] for m, r in ratios.items()},
    }


def table(times: dict[str, dict[int, list[float]]], weight_bytes: float, read: float | None) -> list[dict[str, Any]]:
    """One record a side. gb_per_second: bytes of weights over the least time at one token; share: of the read bandwidth."""
    out = []
    for name, t in times.items():
        record = {"side": name, **summary(t)}
        record["gb_per_second"] = round(weight_bytes / min(t[1]) / 1e9, 1)
        if read:
            record["share"] = round(record["gb_per_second"] / read, 3)
        out.append(record)
    return out


def main() -> None:
    from benchmarks.machine import bandwidth
    from benchmarks.report import console, forward_table

    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=headline(__doc__))
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--source", default="builtin:code-draft")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--random", action="store_true", help="every side a second time, on random weights of that size"
    )
    parser.add_argument("--peers", nargs="*", default=["transformers", "llama.cpp"])
    args = parser.parse_args()
    stored = PRECISIONS[args.precision]["stored"]
    models, read = pair(args.size, stored, args.source), bandwidth()["all"]
    with ExitStack() as stack:
        sides, missing = stack.enter_context(open_sides(models, args.precision, args.peers))
        if args.random:
            noise = made(
                f"random-{args.size}-{stored}", args.source, "--random", "--size", args.size, "--dtype", stored
            )
            more, _ = stack.enter_context(open_sides(Pair(noise, {}), args.precision, args.peers))
            for side in more:
                side.name += " random"
            sides += more
        times = measure(sides, context=args.context, rounds=args.rounds)
    records = table(times, BYTES[args.precision] * weight_count(models.target), read)
    console.print(forward_table(f"{args.size} {args.precision}, context {args.context}", records))
    for reason in missing:
        console.print(f"[yellow]{reason}[/]")


if __name__ == "__main__":
    main()
