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

_RANK_WEIGHT = 8  # pseudo-observations of BY_RANK


class Ranks:
    """Acceptance by rank: how often the child of rank 0, 1, 2... was the accepted one, where its parent was reached."""

    def __init__(self, width: int = len(BY_RANK), memory: int = 64) -> None:
        """width: ranks that are counted apart. memory: visits after which one counts 1/e."""
        self.keep = 1 - 1 / memory
        self.hits, self.visits = [0.0] * min(width, len(BY_RANK)), [0.0] * min(width, len(BY_RANK))

    def observe(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """parents: of a draft's nodes, siblings in the order of their rank. path: the accepted nodes, the root first."""
        for node, following in zip(path, [*path[1:], 0], strict=True):
            children = [n for n, parent in enumerate(parents) if parent == node]
            for rank, child in enumerate(children[: len(self.hits)]):
                self.visits[rank] = self.keep * self.visits[rank] + 1
                self.hits[rank] = self.keep * self.hits[rank] + (child == following)

    def chances(self) -> list[float]:
        """The acceptance of each rank, never increasing; BY_RANK where little was observed."""
        first = (self.hits[0] + BY_RANK[0] * _RANK_WEIGHT) / (self.visits[0] + _RANK_WEIGHT)
        out, left = [first], (1 - first) / (1 - BY_RANK[0])
        for usual, hits, visits in zip(BY_RANK[1:], self.hits[1:], self.visits[1:], strict=False):
            out.append(min((hits + usual * left * _RANK_WEIGHT) / (visits + _RANK_WEIGHT), out[-1]))
        return out


class TokenRecyclingDrafter(BaseDrafter):
    """Token recycling (arXiv 2408.08696): a table of the last top-k candidates after each token, no training.

    table: int64 [vocab, k], -1 where nothing is known. Every node of every step, accepted or not, writes the k tokens that the
    target found likeliest after it. The table is a `ContextSource` of the mixture. Its states are tokens, and its counts are the
    acceptance by rank measured so far. All sequences share both, so a second text of a kind starts warm.

    k: candidates kept per token. Raises ValueError for a k outside 1..vocab_size.
    """

    def __init__(self, vocab_size: int, k: int = 8) -> None:
        if not 1 <= k <= vocab_size:
            raise ValueError(f"k must be in 1..{vocab_size}, the vocabulary, got {k}")
        self.k, self.table, self.ranks = k, np.full((vocab_size, k), -1), Ranks(k)
        self._chances: list[float] = []
        self._parents: dict[int, list[int]] = {}  # by slot, of the last proposal's nodes

    def reset(self) -> None:
        """Empty the table and the counts by rank."""
        self.table.fill(-1)
        self.ranks = Ranks(self.k)

    def propose(self, context: DraftContext) -> Draft:
        self._chances = self.ranks.chances()
        offers = [
            replace(grow(tokens[-1], [Context(self, tokens[-1], 1.0, 1)], budget), match=0)
            for tokens, budget in zip(context.tokens, context.budgets, strict=True)
        ]
        for slot, offer in zip(context.slots, offers, strict=True):
            self._parents[slot] = [parent for _, parent in offer.nodes]
        return drafted(offers)

    def following(self, state: int) -> tuple[float, list[tuple[int, float, int]]]:
        ranked = zip(self.table[state].tolist(), self._chances, strict=False)
        return 1.0, [(token, chance, token) for token, chance in ranked if token >= 0]

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        real = target.draft.parents != PADDING
        self.table[target.draft.tokens[real]] = largest(target.logits[real], self.k)[0]
        for slot, commit in zip(context.slots, commits, strict=True):
            parents = self._parents.pop(slot, None)
            # a text cut at its end does not show what was rejected
            if parents and commit.nodes and commit.finish is None:
                self.ranks.observe(parents, commit.nodes)

    def release(self, slot: int) -> None:
        self._parents.pop(slot, None)


def from_setup(setup: DrafterSetup) -> TokenRecyclingDrafter:
    return TokenRecyclingDrafter(setup.target.model.vocab_size)
