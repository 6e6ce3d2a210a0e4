"""Token recycling: reuse the candidates that the target itself ranked after each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.core.sampling import largest
from outrider.core.types import PADDING, Commit, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, TargetPass
from outrider.drafters.config import DrafterSetup
from outrider.drafters.lookup.mixture import Context, drafted, grow
from outrider.drafters.shapes import BY_RANK


class TokenRecyclingDrafter(BaseDrafter):
    """Token recycling (arXiv 2408.08696): a table of the last top-k candidates after each token, no training.

    table: int64 [vocab, k], -1 where nothing is known. Every node of every step, accepted or not, writes the k tokens that the
    target found likeliest after it. The table is a `ContextSource` of the mixture. Its states are tokens, and its counts are the
    usual acceptance by rank. All sequences share it, so a second text of a kind starts warm.

    k: candidates kept per token. Raises ValueError for a k outside 1..vocab_size.
    """

    def __init__(self, vocab_size: int, k: int = 8) -> None:
        if not 1 <= k <= vocab_size:
            raise ValueError(f"k must be in 1..{vocab_size}, the vocabulary, got {k}")
        self.k, self.table = k, np.full((vocab_size, k), -1)

    def reset(self) -> None:
        """Empty the table."""
        self.table.fill(-1)

    def propose(self, context: DraftContext) -> Draft:
        offers = [
            replace(grow(tokens[-1], [Context(self, tokens[-1], 1.0, 1)], budget), match=0)
            for tokens, budget in zip(context.tokens, context.budgets, strict=True)
        ]
        return drafted(offers)

    def following(self, state: int) -> tuple[float, list[tuple[int, float, int]]]:
        ranked = zip(self.table[state].tolist(), BY_RANK, strict=False)
        return 1.0, [(token, chance, token) for token, chance in ranked if token >= 0]

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        real = target.draft.parents != PADDING
        self.table[target.draft.tokens[real]] = largest(target.logits[real], self.k)[0]


def from_setup(setup: DrafterSetup) -> TokenRecyclingDrafter:
    return TokenRecyclingDrafter(setup.target.model.vocab_size)
