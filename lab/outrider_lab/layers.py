"""Which layers of a model draft best for it (layer_skip), by measured agreement and measured cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from outrider.core.types import Array
from outrider.models.base import LanguageModel
from outrider.models.nodes import Nodes
from outrider_lab.gain import geometric, speedup


@dataclass(frozen=True)
class LayerSearch:
    """The best layers to draft with, and what they promise.

    acceptance: share of tokens of the texts at which their likeliest token was the target's. cost: time of one of their tokens
    over one of the target's. gain: predicted tokens per second over plain decoding, at `depth` draft tokens.
    """

    layers: list[int]
    acceptance: float
    cost: float
    depth: int
    gain: float

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def search_layers(
    target: LanguageModel,
    texts: Sequence[Sequence[int]],
    *,
    max_depth: int = 8,
    clock: Callable[[LanguageModel, int], float] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> LayerSearch:
    """Find the layers to draft with, by measured agreement with the target and measured cost.

    First each layer is left out alone, which ranks the layers. Then they are left out one after another, the least important
    first. The set with the most predicted tokens per second wins: (1 - a^(k+1)) / (1 - a) tokens in V(k+1) + k * cost, for
    the best k (Leviathan et al. 2211.17192, equation 1). Here a is the agreement and V(n) the time of a target forward.

    texts: token lists. max_depth: the largest k. clock(model, n): seconds of a forward over n tokens. progress: called with a
    line of text after each measurement. Raises ValueError without a text of two tokens.
    """
    texts = [list(t)[:256] for t in texts if len(t) > 1]
    if not texts:
        raise ValueError("the search needs a text of at least two tokens; give some of your prompts")
    count = target.num_layers
    clock = clock or _seconds
    choices = [_choices(target, t) for t in texts]

    def agreement(layers: list[int]) -> float:
        model = target.layer_subset(layers)
        same = np.concatenate([_choices(model, t) == c for t, c in zip(texts, choices, strict=True)])
        return float(same.mean())

    widths = [clock(target, n) for n in range(1, max_depth + 2)]
    missed = []
    for i in range(count):
        missed.append(agreement([n for n in range(count) if n != i]) if count > 1 else 0.0)
        progress(f"without layer {i}: {missed[-1]:.2f} of the choices are the target's")
    order = sorted(range(count), key=lambda i: -missed[i])
    best, left = LayerSearch(list(range(count)), 1.0, 1.0, 0, 1.0), list(range(count))
    for out in order[: count - 1]:
        left = [n for n in left if n != out]
        a = agreement(left)
        # in turns, because machines drift and other programs run
        smaller, whole = zip(
            *((clock(part, 1), clock(target, 1)) for part in 3 * [target.layer_subset(left)]), strict=True
        )
        cost = min(smaller) / min(whole)
        gains = [(speedup(geometric(a, k), k * cost, widths[k] / widths[0]), k) for k in range(1, max_depth + 1)]
        gain, depth = max(gains)
        progress(f"{len(left)} of {count} layers: agreement {a:.2f}, cost {cost:.2f}, predicted {gain:.2f} x")
        if gain > best.gain or best.depth == 0:
            best = LayerSearch(left, a, cost, depth, gain)
    return best


def _choices(model: LanguageModel, tokens: list[int]) -> Array:
    """int64 [token]: the likeliest next token after each."""
    cache = model.new_cache(1, len(tokens))
    return model.forward(Nodes(np.array([tokens]), cache, [0])).logits[0].argmax(-1)


def _seconds(model: LanguageModel, tokens: int, repeats: int = 5) -> float:
    cache, times = model.new_cache(1, 64), []
    ids = np.zeros((1, tokens), np.int64)
    for _ in range(repeats):
        start = perf_counter()
        model.forward(Nodes(ids, cache, [0]))
        times.append(perf_counter() - start)
    return min(times)  # other programs on the machine can only add time
