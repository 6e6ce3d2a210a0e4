"""Starting the sides of a comparison, and saying which could not be had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.machine import cores
from benchmarks.pairs import PRECISIONS, Pair
from benchmarks.side import Missing, Side, pinned

PEERS = ("transformers", "llama.cpp")


def start(name: str, models: Pair, precision: str) -> Side:
    """One side. Raises Missing for a peer that is not here or has no such precision."""
    told, threads = PRECISIONS[precision], cores()
    if name == "outrider":
        more = ["--dtype", told["dtype"], *(["--quantization", told["quantization"]] if told["quantization"] else [])]
        return Side(name, "benchmarks.peers.ours", *models.arguments(), *more, env=pinned(threads))
    if name == "transformers":
        if told["transformers"] is None:
            raise Missing(f"transformers has no CPU path for {precision} weights")
        more = ["--dtype", told["transformers"]]
        return Side(name, "benchmarks.peers.transformers_generate", *models.arguments(), *more, env=pinned(threads))
    if name == "llama.cpp":
        more = ["--type", told["gguf"], "--threads", str(threads)]
        return Side(name, "benchmarks.peers.llama_cpp", *models.arguments(), *more, env=pinned(threads))
    raise ValueError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")


@contextmanager
def open_sides(models: Pair, precision: str, peers: Sequence[str]) -> Iterator[tuple[list[Side], list[str]]]:
    """outrider and these peers, started; and a line for each peer that is missing."""
    with ExitStack() as stack:
        sides, missing = [stack.enter_context(start("outrider", models, precision))], list[str]()
        for name in peers:
            try:
                sides.append(stack.enter_context(start(name, models, precision)))
            except Missing as reason:
                missing.append(f"{name}: {reason}")
        yield sides, missing
