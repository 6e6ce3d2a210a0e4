"""What the loop asks of a drafter.

A drafter proposes tokens and the target judges them. A slow or wrong drafter costs time. It never changes the text.

The contract (`outrider.testing.check_drafter` tries all of it): parents precede children, tokens are in the vocabulary, the
budget is obeyed, and declared probabilities are those the tokens were drawn from. A drafter may stop after a token that it
drew. It must not take a drawn token back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper
from outrider.core.tree import tree
from outrider.core.types import Array, Budget, Commit, Draft
from outrider.models.cache import SlotCache


@dataclass(frozen=True, eq=False)
class DraftContext:
    """What a drafter sees of a step: one entry for each sequence. Everything is read-only."""

    slots: list[int]  # cache slot of each sequence. A drafter may keep state under a slot until `release`
    # committed tokens of each sequence, the prompt first. The last one is the root of the draft
    tokens: list[list[int]]
    budgets: list[Budget]  # what the drafter may spend on each sequence. A depth of 0 asks for no draft
    warp: LogitsWarper  # sampling parameters
    noise: Noise  # randomness to draw from
    stream: Stream  # which stream of the noise to draw from
    needs_probs: bool  # the drafter must return the distributions that it drew from, as `Draft.probs`
    prompt_lengths: list[int]  # tokens of each prompt
    predictions: Sequence[Sequence[int]] = ()  # tokens that each user expects in the answer; may be empty
    # the target's. A drafter of the target's own layers may use the space behind the committed tokens
    cache: SlotCache | None = None
    left: Sequence[int] = ()  # tokens that each sequence may still get; empty if that is not known
    clients: Sequence[str] = ()  # client of each sequence; empty if that is not known
    waiting: int = 0  # sequences whose prompts are not read yet

    @property
    def positions(self) -> Array:
        """int64 [batch]: the position of the first draft token."""
        return np.array([len(t) for t in self.tokens], np.int64)

    def but(self, **changes: Any) -> DraftContext:
        """The same with some fields changed."""
        view = DraftContext.__new__(DraftContext)  # `replace` would take all fields apart
        view.__dict__.update(self.__dict__, **changes)
        return view

    def select(self, some: Sequence[int]) -> DraftContext:
        """Some entries of the batch."""
        if len(some) == len(self.slots):
            return self
        each = ("slots", "tokens", "budgets", "prompt_lengths", "predictions", "left", "clients")
        changes = {name: [entries[b] for b in some] for name in each if (entries := getattr(self, name))}
        return self.but(warp=self.warp.select(some), noise=self.noise.select(some), **changes)


@dataclass(frozen=True, eq=False)
class TargetPass:
    """The target's forward over a draft."""

    draft: Draft  # what the target judged. Several drafters may have contributed to it
    logits: Array  # float32 [batch, node, vocab], after each node, accepted or not. Padding holds anything

    def select(self, entries: Sequence[int]) -> TargetPass:
        """Some entries of the batch."""
        if len(entries) == len(self.draft.host):
            return self
        some = list(entries)
        return TargetPass(Draft(self.draft.tokens[some], self.draft.parents[some]), self.logits[some])


@dataclass(frozen=True)
class Resources:
    """What a drafter runs and holds beside the texts, for what counts memory and time."""

    model: Any = None  # with `weight_bytes` that a draft token reads
    cache: SlotCache | None = None  # of its own; None also for one that works in the target's
    error: Any = None  # the `LogitError` that it learns
    reduction: str | None = None  # what was left out of the model to make it cheaper, in words
    siblings: bool = False  # its drafts that end at a threshold have siblings, at no cost


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens. Derive from `BaseDrafter` and write `propose`; the rest does nothing until you write it.

    Attributes:
        taps: Layers of the target whose output the drafter reads, as numbered by `LanguageModel.forward`. The loop passes the
            features of positions that the target reads once, in order: those of prefill and of steps that may not draft to
            `start`, those of other steps to `update`. Positions that the prefix cache held have none.
    """

    taps: tuple[int, ...]

    @abstractmethod
    def propose(self, context: DraftContext) -> Draft:
        """A draft for every sequence: a tree of one node where there is nothing to propose."""
        ...

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        """What the step committed. Called after each step that may draft.

        Args:
            context: That of the proposal. Its tokens hold the new ones already.
            commits: One for each sequence. Their `nodes` are numbered as in this drafter's own proposal; empty without one.
            target: The target's forward over the draft.
        """

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Array) -> None:
        """The target has read a chunk of a prompt, or a step that may not draft. Called for drafters with taps only.

        The first token waits for it: keep the features, and compute in `propose`. A sequence that was preempted is read again
        from its first token, after a `release`.

        Args:
            slot: Of the sequence.
            tokens: All committed tokens of the sequence; at least one follows the chunk.
            first: Position of the chunk's first token.
            features: float [chunk, feature], the taps side by side.
        """

    def release(self, slot: int) -> None:
        """The sequence in this slot has left. Another one may take the slot."""

    def reset(self) -> None:
        """Forget the texts of earlier sequences, so that their tokens cannot be found again."""

    def missing(self, slot: int, tokens: list[int]) -> int:
        """How many committed tokens it must read before it can draft for a sequence, the root not counted."""
        return 0

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        """Read the next `count` missing tokens, without a draft."""

    def inner(self) -> Mapping[str, Drafter]:
        """The drafters that this one asks, by name."""
        return {}

    def resources(self) -> Resources:
        """What it runs and holds."""
        return Resources()


class BaseDrafter(Drafter):
    """No state, no taps: a start for a drafter that only reads the committed tokens."""

    taps: tuple[int, ...] = ()


def chains(context: DraftContext, proposals: Sequence[Sequence[int]]) -> Draft:
    """A draft of one chain for each sequence, cut to its budget. An empty list proposes nothing."""
    cut = [list(p)[: min(b.depth, b.max_nodes)] for p, b in zip(proposals, context.budgets, strict=True)]
    rows = [[t[-1], *p] for t, p in zip(context.tokens, cut, strict=True)]
    return draft_of([[(token, n - 1) for n, token in enumerate(row)] for row in rows])


class ListedDraft(Draft):
    """A draft as lists. Its arrays are made when they are asked for: those of a draft that is not verified never are."""

    @cached_property
    def _tree(self) -> tuple[Array, Array]:
        return tree(self.host)

    @cached_property
    def tokens(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._tree[0]

    @cached_property
    def parents(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._tree[1]

    @cached_property
    def confidence(self) -> Array | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.stated is None:
            return None
        nodes = max(map(len, self.host), default=1)
        return np.array([[*chances, *[0.0] * (nodes - len(chances))] for chances in self.stated], np.float32)


def draft_of(
    trees: Sequence[Sequence[tuple[int, int]]],
    confidence: Mapping[int, Sequence[float]] | None = None,
    notes: Sequence[object] = (),
) -> Draft:
    """One draft for a batch.

    Args:
        trees: (token, parent) of the nodes of each entry, the root first.
        confidence: Of each node, by entry. Other entries state 0, and the draft states none if there is no entry.
        notes: As of `Draft`.
    """
    draft, stated = ListedDraft.__new__(ListedDraft), None
    if confidence:
        stated = [confidence.get(b) or [0.0] * len(nodes) for b, nodes in enumerate(trees)]
    draft.__dict__.update(host=[*trees], stated=stated, notes=tuple(notes))
    return draft


class NoDraft(BaseDrafter):
    """Plain decoding: every draft is a tree of one node."""

    def propose(self, context: DraftContext) -> Draft:
        return draft_of([[(tokens[-1], -1)] for tokens in context.tokens])
