"""Every drafter keeps the contract, and each does what it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import VOCAB, decoder, plain_texts, request, toy_drafters

from outrider.core.params import SamplingParams
from outrider.core.tree import tree
from outrider.core.types import Budget, Draft
from outrider.drafters.base import BaseDrafter, DraftContext
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.models.nodes import Nodes
from outrider.testing.contract import check_drafter, context
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB)
DRAWN = ("draft_model", "self", "shape", "unsure")


@pytest.mark.parametrize("name", [n for n in toy_drafters(TARGET) if n not in ("random_tree", "target_tree")])
def test_contract(name: str) -> None:
    for seed in range(3):
        check_drafter(
            toy_drafters(TARGET)[name],
            VOCAB,
            seed,
            draws=name in DRAWN,
            shares=name in ("suffix_shared", "token_recycling"),
        )


class _Greedy(BaseDrafter):
    """Breaks the budget."""

    def propose(self, context: DraftContext) -> Draft:
        return Draft(
            torch.tensor([[t[-1], 1, 2] for t in context.tokens]), torch.tensor([[-1, 0, 1]] * len(context.slots))
        )


class _Rootless(BaseDrafter):
    def propose(self, context: DraftContext) -> Draft:
        return Draft(torch.zeros(len(context.slots), 1, dtype=torch.long), torch.full((len(context.slots), 1), -1))


class _Forgetful(NgramDrafter):
    """Keeps a row's index after release."""

    def release(self, row: int) -> None: ...


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
        return replace(draft, probs=changed / changed.sum(-1, keepdim=True).clamp_min(1e-9))


class _Sharper(_Sharp):
    declared = staticmethod(lambda q: q**1.3)  # a forgotten temperature


class _Shifted(_Sharp):
    declared = staticmethod(lambda q: q * torch.linspace(0.6, 1.4, VOCAB))


class _Truncated(_Sharp):
    declared = staticmethod(lambda q: q * (q >= q.topk(4).values[..., -1:]))  # a top-k that the draw did not apply


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_Greedy, "allows"),
        (_Rootless, "last committed token"),
        (_Forgetful, "state depends"),
        (_Wide, "2 children of a node"),
        (_Sharper, "not drawn from the distribution"),
        (_Shifted, "not drawn from the distribution"),
        (_Truncated, "no mass in probs"),
    ],
)
def test_the_contract_catches_a_drafter_that_breaks_it(broken: type, message: str) -> None:
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
                logits = draft.forward(Nodes(torch.tensor([before]), draft.new_cache(1, 50), [0]), want="last").logits[
                    :, 0
                ]
                distribution = ask.warp.select([b]).scores(logits, [before[len(tokens) :]]).softmax(-1)[0]
                torch.testing.assert_close(made.probs[b, parent], distribution)
                assert distribution[token] > 0


def test_a_draft_model_that_cannot_see_far_drafts_on() -> None:
    target = ToyModel(VOCAB, max_length=200)
    near = ModelDrafter(ToyModel(VOCAB, max_length=30), 1, 30)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine = decoder(target, near, rows=1)
    steps = [s for s, _ in engine.steps([request([1, 2], params)]) if s]
    assert sum(s.draft.nodes == 1 for s in steps) < 3
    assert [t for s in steps for t in s.commits[0].tokens] == plain_texts(target, [request([1, 2], params)])[0]
