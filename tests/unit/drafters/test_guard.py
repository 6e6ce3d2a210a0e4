"""A drafter that fails loses its row and nothing else: the text goes on, the neighbours never notice, and it is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import VOCAB, decoder, plain_texts, planned, request

from outrider import LLM, SamplingParams
from outrider.core.types import Budget, Commit, Draft
from outrider.drafters import BaseDrafter, Drafter
from outrider.drafters.base import DraftContext, TargetPass
from outrider.testing.stubs import Echo, Wrong
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB)


class Bad(BaseDrafter):
    """Right for every row but those that start with token 0; for these something is wrong."""

    def __init__(self, wrong: Callable[[DraftContext, Draft, int], Draft], good: Drafter) -> None:
        self.wrong, self.good = wrong, good

    def propose(self, context: DraftContext) -> Draft:
        draft = self.good.propose(context)
        for b, tokens in enumerate(context.tokens):
            if tokens[0] == 0 and len(tokens) > 6:
                draft = self.wrong(context, draft, b)
        return draft


def _raises(context: DraftContext, draft: Draft, b: int) -> Draft:
    raise KeyError("lost my table")


def _changes(context: DraftContext, draft: Draft, b: int) -> Draft:
    context.tokens[b][-1] = 1 - context.tokens[b][-1] % 2
    context.tokens[b].append(2)
    return draft


def _grown(draft: Draft, b: int, extra: list[tuple[int, int]]) -> Draft:
    tokens, parents = (
        torch.nn.functional.pad(t, (0, len(extra)), value=v) for t, v in ((draft.tokens, 0), (draft.parents, -2))
    )
    at = int((draft.parents[b] >= -1).sum())
    for n, (token, parent) in enumerate(extra):
        tokens[b, at + n], parents[b, at + n] = token, parent
    return Draft(tokens, parents)


WRONGS: dict[str, tuple[Callable[[DraftContext, Draft, int], Draft], str]] = {
    "raises": (_raises, "it raised KeyError: 'lost my table'"),
    "children first": (lambda _, d, b: _grown(d, b, [(1, 60), (1, 0)]), "a parent comes before its children"),
    "no such token": (lambda _, d, b: _grown(d, b, [(VOCAB + 3, 0)]), f"outside the target's {VOCAB} tokens"),
    "too many nodes": (lambda _, d, b: _grown(d, b, [(1, 0)] * 9), "nodes where the sequence's budget allows 4"),
    "another root": (lambda _, d, b: Draft(d.tokens + 1 - (d.tokens == VOCAB - 1).long() * 2, d.parents), "node 0 is the last"),
    "too wide": (lambda _, d, b: _grown(Draft(d.tokens[:, :2], d.parents[:, :2]), b, [(1, 0)]), "2 children of a node"),
    "too deep": (lambda _, d, b: _grown(d, b, [(1, n) for n in range(4, 9)]), "levels where the sequence's budget allows 4"),
    "changes the text": (_changes, "committed tokens, which are read-only"),
    "not a draft": (lambda *_: None, "returned a NoneType, not a Draft"),  # pyright: ignore
    "too few rows": (lambda _, d, b: Draft(d.tokens[:0], d.parents[:0]), "drafts for"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONGS)
def test_the_row_is_lost_and_no_other(name: str) -> None:
    wrong, words = WRONGS[name]
    params = SamplingParams(max_tokens=30, temperature=0.7, ignore_eos=True)
    requests = [request([first, 1, 2], params, seed=first) for first in (3, 0, 5)]
    plain = plain_texts(TARGET, requests)
    texts = {(r.prompt[0], 1, 2): [*r.prompt, *out] for r, out in zip(requests, plain, strict=True)}
    told: list[str] = []
    roster = planned({"bad": Bad(wrong, Echo(texts))}, (), Budget(4), True, tell=told.append)
    steps = []
    run = decoder(TARGET, roster, budget=Budget(4), rows=3)
    rows = {row.request: row for step, moved in run.steps(requests) if steps.append(step) is None for row in moved}
    assert [rows[r].output for r in requests] == plain
    assert len(told) == 1
    assert "the drafter 'bad' failed: " in told[0]
    assert words in told[0]
    drafted = dict.fromkeys(range(3), 0)
    for step in steps[3:]:
        for row, count in zip(step.slots, step.draft.num_draft_tokens.tolist(), strict=True):
            drafted[row] += count
    guessed = [count > 0 for count in drafted.values()]
    assert guessed.count(True) == 2, "the neighbours are drafted for as ever"


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
