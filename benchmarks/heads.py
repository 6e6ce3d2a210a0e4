"""What a draft with a head costs, for targets of real shapes, with made weights: its own forwards, and all around them.

    python -m benchmarks.heads --depth 4 --precisions bfloat16 int8
    python -m benchmarks.heads --kinds          # every kind of head, beside a forward of its target

Cost does not depend on the values of weights. A draft reads two new pairs, as after a step with one accepted token, and draws a
chain. What is compared takes turns within a round. Medians over the rounds, the first discarded.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks import headline
from benchmarks.head_kinds import kinds_table
from benchmarks.report import console, rich_table
from outrider.core.types import Budget, Commit
from outrider.drafters.heads.eagle.drafter import Pairs, eagle_model
from outrider.drafters.heads.eagle.module import Eagle, EagleConfig
from outrider.drafters.heads.reading import HeadWeights
from outrider.drafters.model.grower import TreeDrafter
from outrider.kernels import cpu as native
from outrider.models.base import LanguageModel, Output, Want
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes
from outrider.testing.contract import GREEDY, context

HEAD = [
    "target",
    "precision",
    "MB read",
    "first token, ms",
    "each later one, ms",
    "around the forwards, ms",
    "prompt, us a token",
]
TEXT = 512  # tokens of the text before the draft


class Shape(NamedTuple):
    """What a head takes from its target."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    layers: int


SHAPES = (
    Shape("SmolLM2-135M", 576, 1536, 9, 3, 64, 49152, 30),
    Shape("Qwen2.5-1.5B", 1536, 8960, 12, 2, 128, 151936, 28),
)


class Embedding(LanguageModel):
    """A target that only lends its embedding."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.device = table, torch.device("cpu")

    @property
    def embedding_table(self) -> Tensor:
        return self.table

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        return self.table[tokens].float()

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        raise NotImplementedError

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        raise NotImplementedError


def made(shape: Shape, draft_vocab: int) -> HeadWeights[EagleConfig]:
    """A head of EAGLE-3.1 with random weights."""
    config = EagleConfig(
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        draft_vocab_size=draft_vocab,
        taps=(1, shape.layers // 2 - 1, shape.layers - 4),
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        target_hidden_size=shape.hidden,
        max_position_embeddings=2048,
        fc_norm=True,
        norm_output=True,
    )
    with torch.device("meta"):
        names = {n: t.shape for n, t in Eagle(config).state_dict().items() if "embed" not in n}
    tensors = {n: (torch.randn(s) * 0.02).bfloat16() for n, s in names.items()}
    return HeadWeights(config, tensors, torch.arange(draft_vocab) * (shape.vocab // draft_vocab))


class Timed:
    """A drafter on a text, and the seconds of its parts."""

    def __init__(self, head: HeadWeights, target: LanguageModel, quantization: str) -> None:
        self.model = eagle_model(head, target, 2048, quantization)
        self.drafter = TreeDrafter(Pairs(self.model, 1, 2048))
        self.size = len(self.model.taps) * head.config.target_hidden_size
        self.inside = 0.0
        chains = self.model.draft_chains

        def timed(*given: Any) -> Any:
            start = perf_counter()
            found = chains(*given)
            self.inside += perf_counter() - start
            return found

        self.model.draft_chains = timed  # type: ignore[method-assign]

    def draft(self, depth: int) -> tuple[float, float, float]:
        """Seconds in the head's own forwards, around them, and for a token of the prompt."""
        text = [(7 * i) % 1000 for i in range(TEXT)]
        start = perf_counter()
        self.drafter.start(0, text, 0, torch.randn(TEXT - 1, self.size))
        prompt = (perf_counter() - start) / TEXT
        self.drafter.propose(context([0], [text], [Budget(1)], GREEDY))
        text += [3, 5]
        asked, self.inside = context([0], [text], [Budget(depth)], GREEDY), 0.0
        commit = Commit([3, 5], [0, 1], 1, None, torch.randn(2, self.size))
        start = perf_counter()
        self.drafter.update(asked, [commit], cast("Any", None))
        self.drafter.propose(asked)
        return self.inside, perf_counter() - start - self.inside, prompt


def measure(shape: Shape, draft_vocab: int, depth: int, precisions: Sequence[str], rounds: int) -> list[list[str]]:
    head = made(shape, draft_vocab)
    target = cast("LanguageModel", Embedding(torch.randn(shape.vocab, shape.hidden).bfloat16()))
    sides = {p: Timed(head, target, "none" if p == "bfloat16" else p) for p in precisions}
    times: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with native.one_torch_thread(torch.device("cpu")):
        for turn in range(rounds + 1):
            for precision, side in sides.items():
                for length in (1, depth):
                    found = side.draft(length)
                    if turn:
                        times.setdefault((precision, length), []).append(found)
    rows: list[list[str]] = []
    for precision, side in sides.items():
        one, all_ = ([*zip(*times[precision, n], strict=True)] for n in (1, depth))
        first, whole = (statistics.median(t[0]) for t in (one, all_))
        around, prompt = statistics.median(all_[1]), statistics.median(all_[2])
        numbers = [1e3 * first, 1e3 * (whole - first) / (depth - 1), 1e3 * around, 1e6 * prompt]
        rows.append([shape.name, precision, f"{side.model.weight_bytes / 1e6:.0f}", *(f"{n:.2f}" for n in numbers)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=headline(__doc__))
    parser.add_argument("--depth", type=int, default=4, help="draft tokens, at least 2")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--precisions", nargs="+", choices=("bfloat16", "int8", "int4"), default=["bfloat16", "int8"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kinds", action="store_true", help="every kind of head, beside a forward of its target")
    args = parser.parse_args()
    if args.kinds:
        console.print(kinds_table(args.depth, args.draft_vocab, args.rounds))
        return
    rows = [row for s in SHAPES for row in measure(s, args.draft_vocab, args.depth, args.precisions, args.rounds)]
    console.print(rich_table(f"an EAGLE-3 head with {args.draft_vocab} tokens, chains of {args.depth}", HEAD, rows))


if __name__ == "__main__":
    main()
