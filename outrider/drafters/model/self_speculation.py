"""The target drafts for itself.

It uses part of its layers (Draft & Verify, arXiv 2309.08168; LayerSkip, 2404.16710) or weights of lower precision (QuantSpec,
2502.10424). There is no second cache. The drafter reads the target's keys and values, so it never has to read the context. The
draft tokens are in the scratch, which the target then overwrites.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.core.types import Commit
from outrider.drafters.base import DraftContext, Resources
from outrider.drafters.config import DrafterSetup
from outrider.drafters.method import LOWER_PRECISION
from outrider.drafters.model.cached import CachedLevels, Feed
from outrider.drafters.model.grower import TreeDrafter
from outrider.kernels import cpu as native
from outrider.models.load import load


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
    """Raises ValueError without layers, and for layers that cannot be read or that the target lacks."""
    target, layers = setup.target, setup.config.layers
    if isinstance(layers, str):
        try:  # a file that `outrider layers` wrote
            layers = json.loads(Path(layers).read_text(encoding="utf-8"))["layers"]
        except (OSError, TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{layers} contains no layer set ({error}); make one with: outrider layers -m MODEL --out {layers}"
            ) from error
    elif layers is None:
        raise ValueError(
            f'layer_skip needs the layers of {target.name} that draft: {{"method": "layer_skip", "layers": [0, 2, ...]}}. '
            f"Find them: outrider layers -m {target.name} --out layers.json"
        )
    return TreeDrafter(TargetCache(target.model.layer_subset(layers)))
