"""The target drafts for itself.

It uses part of its layers (Draft & Verify, arXiv 2309.08168; LayerSkip, 2404.16710) or weights of lower precision (QuantSpec,
2502.10424). There is no second cache. The drafter reads the target's keys and values, so it never has to read the context. The
draft tokens are in the scratch, which the target then overwrites.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from outrider.core.types import Commit
from outrider.drafters.base import DraftContext, Resources
from outrider.drafters.config import DrafterSetup
from outrider.drafters.method import LOWER_PRECISION
from outrider.drafters.model.cached import CachedLevels, Feed
from outrider.drafters.model.grower import TreeDrafter
from outrider.drafters.shapes import geometric, speedup
from outrider.kernels import cpu as native
from outrider.models.base import LanguageModel
from outrider.models.load import load
from outrider.models.nodes import Nodes

SAMPLE = '''def read_lines(path):
    """Return the lines of a text file, without those that are empty or start with a hash sign."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if line and not line.startswith("#"):
                lines.append(line)
    return lines


The committee met on Tuesday to discuss the report. It was agreed that the first part should be sent to the members before
the end of the month, and that the second part would be read again at the next meeting.
'''


class TargetCache(CachedLevels):
    """Levels of a model with the target's layers, or some of them, in the target's own cache.

    The target's step writes the accepted tokens, and the loop releases its slots.
    """

    def begin(self, context: DraftContext) -> None:
        """Raises ValueError if the context has no cache."""
        if context.cache is None:
            raise ValueError("this drafter works in the target's cache; give DraftContext(..., cache=decoder.cache)")
        self.cache = context.cache

    def room(self, slot: int, tokens: list[int]) -> int:
        return self.cache.max_length - len(tokens)

    def unread(self, slot: int, tokens: list[int]) -> Feed:
        return tokens[self.cache.length[slot] :], None

    def update(self, context: DraftContext, commits: Sequence[Commit]) -> None: ...

    def release(self, slot: int) -> None: ...

    def resources(self) -> Resources:
        return Resources(self.model)


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

    @classmethod
    def load(cls, path: str | Path) -> LayerSearch:
        """Raises ValueError for a file that is missing or that `save` did not write."""
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} contains no layer set ({error}); make one with: outrider layers -m MODEL --out {path}"
            ) from error


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
        same = torch.cat([_choices(model, t) == c for t, c in zip(texts, choices, strict=True)])
        return float(same.float().mean())

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


def _choices(model: LanguageModel, tokens: list[int]) -> Tensor:
    """int64 [token]: the likeliest next token after each."""
    cache = model.new_cache(1, len(tokens))
    return model.forward(Nodes(torch.tensor([tokens]), cache, [0])).logits[0].argmax(-1)


def _seconds(model: LanguageModel, tokens: int, repeats: int = 5) -> float:
    cache, times = model.new_cache(1, 64), []
    ids = torch.zeros(1, tokens, dtype=torch.long)
    for _ in range(repeats):
        start = perf_counter()
        model.forward(Nodes(ids, cache, [0]))
        times.append(perf_counter() - start)
    return min(times)  # other programs on the machine can only add time


def quantized_from_setup(setup: DrafterSetup) -> TreeDrafter[TargetCache]:
    """Raises ValueError if the copy would not be cheaper to read than the target."""
    weights, target = setup.config.copy_weights, setup.target
    if not native.available():
        raise ValueError(
            f'method "quantized_self" needs the native kernels: {native.why()}; or use {{"method": "suffix"}}'
        )
    if weights not in LOWER_PRECISION.get(target.weights, ()):
        raise ValueError(
            f"a copy with {weights} weights would gain nothing for a target with {target.weights} weights; "
            'use {"method": "quantized_self", "quantization": "int4"}, or a target with 16 or 32 bit weights'
        )
    copied = load(target.source, target.tokenizer, device="cpu", quantization=weights)
    return TreeDrafter(TargetCache(copied.model))


def layer_skip_from_setup(setup: DrafterSetup) -> TreeDrafter[TargetCache]:
    """Use the layers that are given or saved. Without them, search on a sample text, which takes a while."""
    config, target = setup.config, setup.target
    layers, first, count = config.layers, config.assistant_early_exit, target.model.num_layers
    if isinstance(layers, str):
        layers = LayerSearch.load(layers).layers
    elif first is not None:
        if first > count:
            raise ValueError(
                f"assistant_early_exit is {first}, and {target.name} has {count} layers; use {count} at most"
            )
        layers = range(first)
    elif layers is None:
        if target.tokenizer is None:
            raise ValueError(
                f"{target.name} has no tokenizer, so no layers can be searched; name them: "
                '{"method": "layer_skip", "layers": [0, 2, ...]}'
            )
        layers = search_layers(target.model, [target.tokenizer(SAMPLE)["input_ids"]]).layers
    return TreeDrafter(TargetCache(target.model.layer_subset(layers)))
