"""A drafter that fails loses its row and nothing else: the text goes on, the neighbours never notice, and it is told."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import VOCAB, decoder, plain_texts, planned, request
from light import torch

from outrider import LLM, SamplingParams
from outrider.core.types import Budget, Commit, Draft
from outrider.drafters import BaseDrafter, Drafter, NoDraft
from outrider.drafters.base import DraftContext, TargetPass, draft_of
from outrider.drafters.contract import Broken, check
from outrider.testing.contract import context
from outrider.testing.stubs import Echo, Wrong
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB)


def _grown(draft: Draft, b: int, extra: list[tuple[int, int]]) -> Draft:
    """The draft with more nodes, (token, parent) of each, for one sequence."""
    trees = [list(nodes) for nodes in draft.host]
    trees[b] += extra
    return draft_of(trees)


WRONGS: dict[str, tuple[Callable[[Draft], Any], str]] = {
    "children first": (lambda d: _grown(d, 1, [(1, 60), (1, 0)]), "a parent comes before its children"),
    "no such token": (lambda d: _grown(d, 1, [(VOCAB + 3, 0)]), f"outside the target's {VOCAB} tokens"),
    "too many nodes": (lambda d: _grown(d, 1, [(1, 0)] * 9), "nodes where the sequence's budget allows 4"),
    "another root": (lambda d: Draft((d.tokens + 1) % VOCAB, d.parents), "node 0 is the last"),
    "too wide": (lambda d: _grown(d, 1, [(1, 0), (2, 0)]), "2 children of a node"),
    "too deep": (lambda d: _grown(d, 1, [(1, 0), *((1, n) for n in range(1, 5))]), "levels where the sequence's budget allows 4"),
    "not a draft": (lambda _: None, "returned a NoneType, not a Draft"),
    "too few": (lambda d: Draft(d.tokens[:1], d.parents[:1]), "1 drafts for 2 sequences"),
    "floats": (lambda d: Draft(d.tokens.astype(float), d.parents), "int64"),
    "tensors": (lambda d: Draft(torch.as_tensor(d.tokens), d.parents), "tokens is a Tensor and must be a numpy array"),
    "loops": (lambda d: Draft(d.tokens, abs(d.parents)), "-1"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_draft_that_breaks_the_contract_is_named(wrong: str) -> None:
    asked, (spoil, words) = context([0, 1], [[1, 2], [3]], [Budget(4)] * 2, SamplingParams()), WRONGS[wrong]
    right = NoDraft().propose(asked)
    check(right, asked, VOCAB)
    with pytest.raises(Broken, match=words):
        check(spoil(right), asked, VOCAB)


class Bad(BaseDrafter):
    """Right for every text but that which starts with token 0, which it changes."""

    def __init__(self, good: Drafter) -> None:
        self.good = good

    def propose(self, context: DraftContext) -> Draft:
        draft = self.good.propose(context)
        for tokens in context.tokens:
            if tokens[0] == 0 and len(tokens) > 6:
                tokens[-1] = 1 - tokens[-1] % 2
                tokens.append(2)
        return draft


def test_the_sequence_is_lost_and_no_other() -> None:
    params = SamplingParams(max_tokens=30, temperature=0.7, ignore_eos=True)
    requests = [request([first, 1, 2], params, seed=first) for first in (3, 0, 5)]
    plain = plain_texts(TARGET, requests)
    texts = {(r.prompt[0], 1, 2): [*r.prompt, *out] for r, out in zip(requests, plain, strict=True)}
    told: list[str] = []
    roster = planned({"bad": Bad(Echo(texts))}, (), Budget(4), True, tell=told.append)
    run = decoder(TARGET, roster, budget=Budget(4), rows=3)
    steps = [(step, moved) for step, moved in run.steps(requests) if step is not None]
    rows = {row.request: row for _, moved in steps for row in moved}
    assert [rows[r].output for r in requests] == plain
    assert len(told) == 1
    assert "the drafter 'bad' failed: " in told[0]
    assert "committed tokens, which are read-only" in told[0]
    drafted = Counter[int]()
    for step, _ in steps[3:]:
        drafted.update(dict(zip(step.slots, step.draft.num_draft_tokens.tolist(), strict=True)))
    assert sum(count > 0 for count in drafted.values()) == 2, "the neighbours are drafted for as ever"


@pytest.mark.parametrize("method", ["update", "start"])
def test_a_drafter_that_changes_the_text_later_is_found_out_too(method: str) -> None:
    class Vandal(Wrong):
        taps = (0,)

        def start(self, slot: int, tokens: Sequence[int], first: int, features: torch.Tensor) -> None:
            if method == "start":
                tokens[1] = 7  # pyright: ignore[reportIndexIssue]

        def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
            if method == "update" and len(context.tokens[0]) > 8:
                context.tokens[0][2] = (context.tokens[0][2] + 1) % VOCAB
                context.tokens[0] = [1, 2]

    requests = [request([first, 1, 2], SamplingParams(max_tokens=20, ignore_eos=True)) for first in (3, 5)]
    told: list[str] = []
    roster = planned({"mine": Vandal()}, (), Budget(2), True, tell=told.append)
    rows = decoder(TARGET, roster, budget=Budget(2), rows=2).generate(requests)
    assert [row.output for row in rows] == plain_texts(TARGET, requests)
    assert [row.tokens[:3] for row in rows] == [r.prompt for r in requests]
    if method == "start":  # it was shown a copy
        assert not told
    else:
        assert len(told) == 1
        assert "update changed the committed tokens, which are read-only" in told[0]


def test_what_is_no_drafter_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'mine' is of type object, which is no drafter: it lacks taps"):
        planned({"mine": object()})  # type: ignore[dict-item]


def test_a_users_drafter_in_the_library() -> None:
    class Fails(Wrong):
        def propose(self, context: DraftContext) -> Draft:
            raise RuntimeError("no")

    params = SamplingParams(max_tokens=12, temperature=0)
    plain = LLM("builtin:code", device="cpu").generate("def f(", params)[0].outputs[0].text
    fixed = {"controller": "fixed"}  # on a busy machine, the planner may find that the drafter is not worth its seconds
    llm = LLM("builtin:code", device="cpu", drafter=Fails(), speculative_config=fixed)
    with pytest.warns(RuntimeWarning, match="the drafter 'Fails' failed: it raised RuntimeError: no"):
        assert llm.generate("def f(", params)[0].outputs[0].text == plain
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLM("builtin:code", device="cpu", drafter=Wrong(1), speculative_config=fixed)
        good = llm.generate("def f(", params)
    assert good[0].outputs[0].text == plain
