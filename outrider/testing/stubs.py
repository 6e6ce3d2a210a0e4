"""Simple drafters for tests and for learning: always right, always wrong, right with a known probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from outrider.core.noise import Noise, Stream
from outrider.core.types import Array, Commit, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, TargetPass, chains
from outrider.drafters.proposal import NodeList, own_commit


class Wrong(BaseDrafter):
    """Always proposes one token, which is almost never right. Speculation must still be exact, only slower."""

    def __init__(self, token: int = 0) -> None:
        self.token = token

    def propose(self, context: DraftContext) -> Draft:
        return chains(context, [[self.token] * b.depth for b in context.budgets])


class Echo(BaseDrafter):
    """Proposes a known text, found by its prompt. With the target's own continuation everything is accepted."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        """texts: prompt tokens -> all tokens of prompt and continuation."""
        self.texts = texts

    def propose(self, context: DraftContext) -> Draft:
        proposals = []
        for tokens, n, budget in zip(context.tokens, context.prompt_lengths, context.budgets, strict=True):
            text = self.texts.get(tuple(tokens[:n]), [])
            proposals.append(text[len(tokens) : len(tokens) + budget.depth])
        return chains(context, proposals)


class Noisy(BaseDrafter):
    """Another drafter's draft, each token kept with probability alpha. With `Echo` inside, alpha is the acceptance rate."""

    def __init__(self, wrapped: Drafter, alpha: float, vocab_size: int, seed: int = 0) -> None:
        """Raises ValueError for an alpha outside 0..1."""
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is a probability, got {alpha}")
        self.wrapped, self.taps = wrapped, wrapped.taps
        self.alpha, self.vocab_size, self.seed = alpha, vocab_size, seed
        self._proposals: dict[int, NodeList] = {}  # by slot, before tokens were changed

    def propose(self, context: DraftContext) -> Draft:
        draft = self.wrapped.propose(context)
        self._proposals = dict(zip(context.slots, draft.host, strict=True))
        n = draft.nodes
        if n == 1:
            return draft
        seed = np.full(len(context.slots), self.seed)
        coin = Noise(seed, seed).uniform(Stream.DRAFT, context.positions, 2 * n)
        other = (coin[:, n:] * (self.vocab_size - 1)).astype(np.int64)
        other = other + (other >= draft.tokens)  # any token but the drafted one
        spoil = (coin[:, :n] >= self.alpha) & (draft.parents >= 0)
        return Draft(np.where(spoil, np.minimum(other, self.vocab_size - 1), draft.tokens), draft.parents)

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Array) -> None:
        self.wrapped.start(slot, tokens, first, features)

    def release(self, slot: int) -> None:
        self.wrapped.release(slot)

    def reset(self) -> None:
        self.wrapped.reset()

    def inner(self) -> Mapping[str, Drafter]:
        return {"wrapped": self.wrapped}

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        renumbered = [own_commit(c, self._proposals.get(slot)) for slot, c in zip(context.slots, commits, strict=True)]
        self._proposals = {}
        self.wrapped.update(context, renumbered, target)
