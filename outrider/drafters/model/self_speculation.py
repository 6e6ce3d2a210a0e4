"""The target drafts for itself, with part of its layers (Draft & Verify, arXiv 2309.08168; LayerSkip, 2404.16710) or with
coarser weights (QuantSpec, 2502.10424).

No second cache: the committed keys and values are the target's own at every layer, so whoever has its layers has the whole
context without ever computing it, and the guesses live in the scratch that the target then overwrites.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from outrider.control.expectation import geometric, speedup
from outrider.core.types import Commit, Draft
from outrider.drafters.base import DraftContext, TargetPass
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.models.base import LanguageModel
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


class QuantizedSelfDrafter(ModelDrafter):
    """Chains and trees by a model with the target's layers, or some of them, in the target's own cache."""

    def __init__(self, model: LanguageModel, *, min_probability: float = 0.0) -> None:
        super().__init__(model, 1, 1, min_probability=min_probability)

    def propose(self, context: DraftContext) -> Draft:
        if context.cache is None:
            raise ValueError("this drafts in the target's cache; give DraftContext(..., cache=decoder.cache)")
        self.cache = context.cache
        return super().propose(context)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        """The target's own step has written what was accepted."""

    def missing(self, slot: int, tokens: list[int]) -> int:
        """The target has read it."""
        return 0

    def release(self, slot: int) -> None:
        """The target's rows are the loop's to release."""


class LayerSkipDrafter(QuantizedSelfDrafter):
    """The target's own layers, some of them left out."""

    def __init__(self, target: LanguageModel, layers: Sequence[int], *, min_probability: float = 0.0) -> None:
        """Raises ValueError for layers that the target does not have."""
        super().__init__(target.layer_subset(layers), min_probability=min_probability)
        self.layers = tuple(layers)


@dataclass(frozen=True)
class LayerSearch:
    """layers: what is best to draft with. acceptance: how often their first choice was the target's, on the texts. cost: one
    of their tokens over one of the target's. gain: predicted tokens per second over plain decoding, drafting `depth`."""

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
                f"{path} holds no layer set ({error}); make one with: outrider layers MODEL --out {path}"
            ) from error


def search_layers(
    target: LanguageModel,
    texts: Sequence[Sequence[int]],
    *,
    max_depth: int = 8,
    clock: Callable[[LanguageModel, int], float] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> LayerSearch:
    """Which layers to draft with, by measured agreement with the target on token lists and measured cost.

    First every layer is left out alone, which ranks them; then they leave one after another, the least missed first, and the
    set that promises the most tokens per second stays: (1 - a^(k+1)) / (1 - a) tokens for V(k+1) + k * cost, over the best
    k (Leviathan et al. 2211.17192, equation 1). clock(model, n): seconds of a forward over n tokens. Raises ValueError
    without a text of two tokens.
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
        a, cost = (
            agreement(left),
            clock(target.layer_subset(left), 1) / clock(target, 1),
        )  # side by side: machines drift
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


def _seconds(model: LanguageModel, tokens: int, repeats: int = 7) -> float:
    cache, times = model.new_cache(1, 64), []
    ids = torch.zeros(1, tokens, dtype=torch.long)
    for _ in range(repeats):
        start = perf_counter()
        model.forward(Nodes(ids, cache, [0]))
        times.append(perf_counter() - start)
    return min(times)  # what others do on the machine can only add
