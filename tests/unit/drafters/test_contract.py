"""Every drafter keeps the contract, and each does what it is for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import VOCAB, toy_drafters

from outrider.core.params import SamplingParams
from outrider.core.tree import chain, tree
from outrider.core.types import Budget, Commit, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, NoDraft, TargetPass, chains
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.kernels.probabilities import softmax
from outrider.models.nodes import Nodes
from outrider.testing.contract import check_drafter, context
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB)
DRAWN = ("draft_model", "self", "shape", "unsure")


@pytest.mark.parametrize("name", [n for n in toy_drafters(TARGET) if n not in ("random_tree", "target_tree")])
def test_contract(name: str) -> None:
    check_drafter(
        toy_drafters(TARGET)[name],
        VOCAB,
        draws=name in DRAWN,
        shares=name in ("suffix_shared", "token_recycling"),
        proposes=name not in ("none", "echo"),
    )


class _Greedy(BaseDrafter):
    """Breaks the budget."""

    def propose(self, context: DraftContext) -> Draft:
        return Draft(*chain([[t[-1], 1, 2] for t in context.tokens]))


class _Rootless(BaseDrafter):
    def propose(self, context: DraftContext) -> Draft:
        return Draft(*chain([[0]] * len(context.slots)))


class _Wide(BaseDrafter):
    """Two children of the root, whatever the budget's width is."""

    def propose(self, context: DraftContext) -> Draft:
        rows = [[1, 2][: b.max_nodes if b.depth else 0] for b in context.budgets]
        return Draft(
            *tree([[(t[-1], -1), *((x, 0) for x in row)] for t, row in zip(context.tokens, rows, strict=True)])
        )


class _Sharp(ModelDrafter):
    """Declares another distribution than the one it drew from: `declared` changes the probs of a draft that is right."""

    declared = staticmethod(lambda q: q)

    def __init__(self) -> None:
        super().__init__(ToyModel(VOCAB, seed=3), 4, 200)

    def propose(self, context: DraftContext) -> Draft:
        draft = super().propose(context)
        if draft.probs is None:
            return draft
        changed = self.declared(draft.probs)
        return replace(draft, probs=changed / np.maximum(changed.sum(-1, keepdims=True), 1e-9))


class _Bigram(BaseDrafter):
    """The drafter of docs/guides/drafter.md: what followed the last token before."""

    def __init__(self) -> None:
        self.following = defaultdict[int, dict[int, int]](dict)
        self.seen = defaultdict[int, int](int)

    def propose(self, context: DraftContext) -> Draft:
        proposals = []
        for slot, tokens, budget in zip(context.slots, context.tokens, context.budgets, strict=True):
            following, seen = self.following[slot], self.seen[slot]
            following.update(pairwise(tokens[max(seen - 1, 0) :]))
            self.seen[slot] = len(tokens)
            proposal, last = [], tokens[-1]
            while len(proposal) < budget.depth and last in following:
                last = following[last]
                proposal.append(last)
            proposals.append(proposal)
        return chains(context, proposals)

    def release(self, slot: int) -> None:
        self.following.pop(slot, None)
        self.seen.pop(slot, None)


class _Shared(_Bigram):
    """One table for all sequences, which `reset` leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        table = dict[int, int]()
        self.following.default_factory = lambda: table


class _NearestState(BaseDrafter):
    """What followed the most similar hidden state."""

    taps = (0,)

    def __init__(self) -> None:
        self.states = defaultdict[int, list[np.ndarray]](list)

    def start(self, slot: int, tokens: Sequence[int], first: int, features: np.ndarray) -> None:
        self.states[slot].extend(features)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        for slot, commit in zip(context.slots, commits, strict=True):
            assert commit.features is not None
            self.states[slot].extend(commit.features)

    def propose(self, context: DraftContext) -> Draft:
        proposals = []
        for slot, tokens in zip(context.slots, context.tokens, strict=True):
            *states, last = self.states[slot] or [np.zeros(8)]
            near = [float(state @ last / np.linalg.norm(state)) for state in states[: len(tokens) - 2]]
            at = near.index(max(near)) + 2 if near else len(tokens)
            proposals.append(tokens[at : at + 3])
        return chains(context, proposals)

    def release(self, slot: int) -> None:
        self.states.pop(slot, None)


def changed(kind: type, **members: Any) -> type:
    """A kind of drafter with other members."""
    return type(kind.__name__, (kind,), members)


def half_kept(name: str) -> Callable[[_Bigram, int], None]:
    """A `release` that forgets one of two."""
    return lambda self, slot: getattr(self, name).pop(slot, None)


def nothing(self: object, *of_the_call: object) -> None:
    """A method that was forgotten."""


@pytest.mark.parametrize("vocab_size", [4, VOCAB, 50, 32000])
@pytest.mark.parametrize("right", [_Bigram, _NearestState])
def test_a_drafter_of_the_guide_passes(right: type, vocab_size: int) -> None:
    check_drafter(right, vocab_size)


@pytest.mark.parametrize("vocab_size", [VOCAB, 50])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_Greedy, "allows"),
        (_Rootless, "last committed token"),
        (changed(NgramDrafter, release=nothing), "state depends"),
        (changed(_Bigram, release=nothing), "state depends"),
        (changed(_Bigram, release=half_kept("seen")), "state depends"),
        (changed(_Bigram, release=half_kept("following")), "state depends"),
        (_Shared, "state depends"),
        (changed(_NearestState, release=nothing), "state depends"),
        (changed(_NearestState, update=nothing), "state depends"),
        (_Wide, "2 children of a node"),
        (NoDraft, r"nothing was proposed in \d+ steps, so nothing was checked. Give proposes=False"),
    ],
)
def test_the_contract_catches_a_drafter_that_breaks_it(broken: type, message: str, vocab_size: int) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        check_drafter(broken, vocab_size)


def test_a_drafter_that_shares_forgets_at_reset() -> None:
    with pytest.raises(AssertionError, match="after `reset` it still knows earlier texts"):
        check_drafter(_Shared, 50, shares=True)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (lambda q: q**1.3, "not drawn from the distribution"),  # a forgotten temperature
        (lambda q: q * np.linspace(0.6, 1.4, VOCAB, dtype=np.float32), "not drawn from the distribution"),
        (lambda q: q * (q >= np.sort(q)[..., -4:-3]), "no mass in probs"),  # a top-k that the draw did not apply
    ],
)
def test_the_contract_catches_another_distribution(declared: Callable[[np.ndarray], np.ndarray], message: str) -> None:
    broken = changed(_Sharp, declared=staticmethod(declared))
    with pytest.raises((AssertionError, ValueError), match=message):
        for seed in range(10):
            check_drafter(broken, VOCAB, seed)


def test_the_drafters_that_declare_another_distribution_break_nothing_else() -> None:
    check_drafter(_Sharp, VOCAB)


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_declared_probs_are_those_that_were_drawn_from(error: float) -> None:
    draft = ToyModel(VOCAB, seed=0, error=error)
    ask = context(
        [0, 1], [[1, 2, 3], [4]], [Budget(3), Budget(2)], SamplingParams(temperature=0.8, top_k=6), needs_probs=True
    )
    made = ModelDrafter(draft, 2, 100).propose(ask)
    assert made.probs is not None
    for b, tokens in enumerate(ask.tokens):
        for node, (token, parent) in enumerate(made.host[b]):
            if node:
                before = [*tokens, *(t for t, _ in made.host[b][1:node])]
                logits = draft.forward(Nodes(np.array([before]), draft.new_cache(1, 50), [0]), want="last").logits
                distribution = softmax(ask.warp.select([b]).scores(np.asarray(logits[:, 0]), [before[len(tokens) :]]))[
                    0
                ]
                assert np.array_equal(made.probs[b, parent], distribution)
                assert distribution[token] > 0
