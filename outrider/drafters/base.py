"""What the loop asks of a drafter, and the stubs that test the plumbing and teach the idea.

A drafter guesses; the target judges. So a drafter can be slow or wrong, and the text stays the target's own. Contract
(the loop checks it; `tests/unit/drafters/test_contract.py` for every drafter): parents precede children, tokens are in the
vocabulary, the budget is obeyed, and a declared law is the law drawn from. It may stop after a token it drew, and must not
un-draw one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider._deprecated import renamed
from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper
from outrider.core.tree import chain
from outrider.core.types import Budget, Commit, Draft
from outrider.models.cache import SlotCache


@dataclass(frozen=True, eq=False)
class DraftContext:
    """What a drafter may look at: the rows of this step, read-only.

    slots: cache slots, also the keys a drafter may keep state under until `release`.
    tokens: committed tokens of each row, prompt first; the last one is the draft's root.
    budgets: what may be spent on each row. stream: the noise to draw from. needs_probs: whether `Draft.probs` must be returned.
    """

    slots: list[int]
    tokens: list[list[int]]
    budgets: list[Budget]
    warp: LogitsWarper
    noise: Noise
    stream: Stream
    needs_probs: bool
    prompt_lengths: list[int]
    predictions: Sequence[Sequence[int]] = ()  # by row, the tokens its user expects of the answer; () when nobody does
    cache: SlotCache | None = None  # the target's; a drafter made of the target's layers may use its scratch

    @property
    def positions(self) -> Tensor:
        """int64 [batch]: the position of the first guessed token, on the noise's device."""
        return torch.tensor([len(t) for t in self.tokens], device=self.noise.seed.device)


@runtime_checkable
class Drafter(Protocol):
    """Three methods make a drafter: `propose`, `update`, `release`. `taps` names target layers it wants to see.

    A fourth is optional: `watch(batch, draft, logits)`, called before `update` with the target's logits [batch, node,
    vocab] at every node of the step's draft, kept or not. They are the loop's own and read-only; padding holds anything.
    """

    taps: tuple[int, ...]

    def propose(self, context: DraftContext) -> Draft:
        """The guesses for every row of the batch, a tree of one node where there is none."""
        ...

    def update(self, context: DraftContext, kept: Sequence[Commit], features: Tensor | None) -> None:
        """What was kept of the last proposal. features: [batch, node, feature] of the tapped layers, or None."""
        ...

    def release(self, row: int) -> None:
        """The sequence in this row has ended; the row may be reused."""
        ...


class BaseDrafter:
    """No state, no taps: a start for drafters that only look at the committed tokens."""

    taps: tuple[int, ...] = ()

    def update(self, context: DraftContext, kept: Sequence[Commit], features: Tensor | None) -> None: ...

    def release(self, row: int) -> None: ...


def chains(context: DraftContext, guesses: Sequence[Sequence[int]]) -> Draft:
    """A draft of one chain per row, each cut to its budget. No guess is an empty list."""
    cut = [list(g)[: min(b.depth, b.max_nodes)] for g, b in zip(guesses, context.budgets, strict=True)]
    tokens, parents = chain([[t[-1], *g] for t, g in zip(context.tokens, cut, strict=True)])
    return Draft(tokens, parents)


class NoDraft(BaseDrafter):
    """Plain decoding: every draft is a tree of one node."""

    def propose(self, context: DraftContext) -> Draft:
        return Draft(torch.tensor([[t[-1]] for t in context.tokens]), torch.full((len(context.tokens), 1), -1))


class Echo(BaseDrafter):
    """Guesses a text known beforehand, keyed by prompt: with the target's own continuation everything is accepted."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        """texts: prompt tokens -> all tokens of prompt and continuation."""
        self.texts = texts

    def propose(self, context: DraftContext) -> Draft:
        guesses = []
        for tokens, n, budget in zip(context.tokens, context.prompt_lengths, context.budgets, strict=True):
            known = self.texts.get(tuple(tokens[:n]), [])
            guesses.append(known[len(tokens) : len(tokens) + budget.depth])
        return chains(context, guesses)


class Wrong(BaseDrafter):
    """Always guesses one token, which is (nearly) never right. Speculation must still be exact, only slower."""

    def __init__(self, token: int = 0) -> None:
        self.token = token

    def propose(self, context: DraftContext) -> Draft:
        return chains(context, [[self.token] * b.depth for b in context.budgets])


class Noisy(BaseDrafter):
    """Right with a known probability: another drafter's chain, each token kept with probability alpha."""

    def __init__(self, inner: Drafter, alpha: float, vocab_size: int, seed: int = 0) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is a probability, got {alpha}")
        self.inner, self.alpha, self.vocab_size = inner, alpha, vocab_size
        self.taps = inner.taps
        self._seed = seed

    def propose(self, context: DraftContext) -> Draft:
        draft = self.inner.propose(context)
        n = draft.nodes
        if n == 1:
            return draft
        seed = torch.full((len(context.slots),), self._seed)
        coin = Noise(seed, seed).uniform(Stream.DRAFT, context.positions, 2 * n)
        other = (coin[:, n:] * (self.vocab_size - 1)).long()
        other = other + (other >= draft.tokens)  # any token but the drafted one
        spoil = (coin[:, :n] >= self.alpha) & (draft.parents >= 0)
        return Draft(torch.where(spoil, other.clamp_max(self.vocab_size - 1), draft.tokens), draft.parents)

    def update(self, context: DraftContext, kept: Sequence[Commit], features: Tensor | None) -> None:
        self.inner.update(context, kept, features)

    def release(self, row: int) -> None:
        self.inner.release(row)


if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
