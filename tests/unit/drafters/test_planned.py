"""Drafters under a planner: the text stays whatever is planned, the better one is taken, and the reason is told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from crossed import crossed
from helpers import VOCAB, costs, decoder, plain_texts, planned, request
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control import Costs, Planner
from outrider.control.plan import PLAIN, Choice, Plan, View
from outrider.core.params import SamplingParams
from outrider.core.tree import validate
from outrider.core.types import Budget, Draft, Siblings
from outrider.drafters import BaseDrafter, ModelDrafter, NgramDrafter, PlannedDrafter, SuffixDrafter
from outrider.drafters.base import DraftContext
from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter
from outrider.drafters.proposal import Proposal, join
from outrider.testing.contract import context
from outrider.testing.stubs import Echo, Wrong
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB)


def model(error: float = 0.3) -> ModelDrafter:
    return ModelDrafter(ToyModel(VOCAB, error=error), 4, 512)


def company(name: str) -> tuple[dict, list[str]]:
    """Drafters, and which of them are lookups."""
    if name == "texts":
        return {"suffix": SuffixDrafter(least=0.01), "ngram": NgramDrafter(1, 3), "recycling": TokenRecyclingDrafter(VOCAB, 4)}, [
            "suffix", "ngram", "recycling",
        ]  # fmt: skip
    if name == "mixed":
        return {"suffix": SuffixDrafter(least=0.01), "draft": model()}, ["suffix"]
    return {"wrong": Wrong(3), "draft": model(5.0)}, []


@pytest.mark.parametrize(
    ("budget", "verifier", "name", "fixed"),
    crossed(
        [Budget(4), Budget(3, 3, 7)], ["match", "rejection"], ["texts", "mixed", "hopeless"], [False, True], share=0.0
    ),
)
def test_text_or_distribution_is_kept_with_any_company(budget: Budget, verifier: str, name: str, fixed: bool) -> None:
    params = [SamplingParams(temperature=t, max_tokens=40, ignore_eos=True) for t in (0.0, 0.8, 1.2)]
    requests = [request([i, 1, 2], p, seed=i) for i, p in enumerate(params)]
    plain = plain_texts(TARGET, requests)
    drafters, lookups = company(name)
    rows = decoder(TARGET, planned(drafters, lookups, budget, fixed), rows=3, verifier=verifier).generate(requests)
    if verifier == "match":
        assert [r.output for r in rows] == plain
    else:
        assert all(len(r.output) == 40 for r in rows)
        assert rows[0].output == plain[0]  # greedy: one distribution, one text


class Dice(Planner):
    """Plans that are drawn: any drafter, any length, any part of what was drafted."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(Budget(6), Costs(costs(["draft"])))
        self.draw = draw

    def plan(self, views: Sequence[View], waiting: int = 0) -> list[Plan]:
        super().plan(views)
        return [self._any(view) for view in views]

    def _any(self, view: View) -> Plan:
        names = [None, *(n for n, o in view.offers.items() if len(o.nodes) > 1), *view.missing]
        name, depth = self.draw.choice(names), self.draw.randint(1, 6)
        part = Choice("any", least=self.draw.random())
        read = (
            ("draft", self.draw.randint(1, 3))
            if view.missing.get("draft", 0) > 4 and self.draw.random() < 0.5
            else None
        )
        if name is None or view.left < 2 or read:
            return Plan(None, PLAIN, read=read)
        if name in view.offers:
            count = len(view.offers[name].nodes) - 1
            return Plan(name, view.budget, chosen=part._replace(survival=[self.draw.random() for _ in range(count)]))
        return Plan(name, view.budget.clipped(min(depth, view.left - 1)), chosen=part)


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_no_plan_changes_a_text(seed: int) -> None:
    params = [SamplingParams(temperature=t, max_tokens=24, ignore_eos=True) for t in (0.0, 0.9)]
    requests = [request([i, 1, 2, 1, 2], p, seed=i) for i, p in enumerate(params)]
    drafters = {"suffix": SuffixDrafter(least=0.01), "ngram": NgramDrafter(1, 3), "draft": model()}
    dice = Dice(random.Random(seed))
    used = PlannedDrafter(drafters, dice, VOCAB, ["suffix", "ngram"])
    rows = decoder(TARGET, used, rows=2).generate(requests)
    assert [r.output for r in rows] == plain_texts(TARGET, requests)


def test_the_better_one_is_taken_and_the_reason_is_told() -> None:
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    [truth] = plain_texts(TARGET, [request([1, 2], params)])
    for names in (("wrong", "echo"), ("echo", "wrong")):
        drafters = {"wrong": Wrong(1), "echo": Echo({(1, 2): [1, 2, *truth]})}
        run = decoder(TARGET, told_costs(planned({n: drafters[n] for n in names}, (), Budget(5))), rows=1)
        steps = [s for s, _ in run.steps([request([1, 2], params)]) if s]
        assert len(steps) < 60
        last = [str(s.draft.notes[0]) for s in steps if s.draft.notes][-8:]
        assert any(words.startswith("echo drafts; ") for words in last)
        assert any("; wrong: " in words for words in last)


def test_of_a_lookups_offer_only_what_pays_is_verified() -> None:
    used = planned({"suffix": SuffixDrafter(shared=0)}, ["suffix"], Budget(8))
    text = [1, 2, 3, 4, 5, 6, 7] * 3
    draft = used.propose(context([0], [text], [Budget(8)], SamplingParams()))
    assert 1 < draft.nodes <= 9
    assert str(draft.notes[0]).startswith("suffix drafts; ")
    flat = used.planner.costs
    for _ in range(60):
        flat.observe_forward(6, 30.0)  # a node becomes very expensive
        flat.observe_forward(1, 1.0)
    assert used.propose(context([0], [text], [Budget(8)], SamplingParams())).nodes == 1


def test_a_sequence_that_drafts_nothing_says_so() -> None:
    used = planned({"ngram": NgramDrafter(2, 3)}, ["ngram"])
    draft = used.propose(context([0], [[1, 2, 3]], [Budget(4)], SamplingParams()))
    assert draft.host[0] == [(3, -1)]
    assert [*map(str, draft.notes)] == ["no draft; nothing to weigh"]


def test_methods_of_several_drafters_and_none() -> None:
    made = {"suffix": SuffixDrafter(), "draft": model(), "ngram": NgramDrafter()}
    used = planned(made, ["suffix", "ngram"], methods={"auto": ["suffix", "draft"]}, default="auto")
    assert used.of_slot(0) == ("suffix", "draft")
    used.assigned |= {0: "ngram", 2: "none"}
    assert [used.of_slot(slot) for slot in range(3)] == [("ngram",), ("suffix", "draft"), ()]
    with pytest.raises(
        ValueError, match="there is no drafter 'magic' here; use one of: none, suffix, draft, ngram, auto"
    ):
        used.method("magic")
    used.tell = lambda said: None
    used.lose("ngram", [0], RuntimeError("no"))
    assert used.of_slot(0) == ()
    used.release(0)
    assert used.of_slot(0) == ("suffix", "draft"), "the next text of the slot has drafts again"
    with pytest.raises(ValueError, match="several methods need drafters"):
        planned({})


@pytest.mark.parametrize("fixed", [False, True])
def test_the_first_token_waits_for_no_draft(fixed: bool) -> None:
    """Not for a lookup either: it reads the whole prompt. Drafts of one length are asked for, so they come at once."""
    used = planned({"suffix": SuffixDrafter(shared=0), "draft": Wrong(1)}, ["suffix"], Budget(4), fixed)
    text = [1, 2, 3, 4, 5, 6, 7] * 3
    ask = context([0], [text], [Budget(4)], SamplingParams())
    first = replace(ask, prompt_lengths=[len(text)])
    draft = used.propose(first)
    assert (draft.nodes > 1) == fixed
    assert fixed or str(draft.notes[0]) == "no draft"
    assert used.propose(replace(ask, prompt_lengths=[len(text) - 1])).nodes > 1


class Forgetful(BaseDrafter):
    """Must read, and counts what it is told to read."""

    def __init__(self) -> None:
        self.held, self.pieces = dict[int, int](), list[int]()

    def missing(self, slot: int, tokens: list[int]) -> int:
        return len(tokens) - 1 - self.held.get(slot, 0)

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        self.pieces.append(count)
        self.held[slot] = self.held.get(slot, 0) + count

    def propose(self, context: DraftContext) -> Draft:
        for slot, tokens in zip(context.slots, context.tokens, strict=True):
            self.pieces.append(self.missing(slot, tokens))
            self.held[slot] = len(tokens) - 1
        return Wrong(1).propose(context)

    def release(self, slot: int) -> None:
        self.held.pop(slot, None)


def told_costs(used: PlannedDrafter) -> PlannedDrafter:
    """The same, but it learns nothing from the clock of this machine."""
    used.planner.costs.observe_forward = lambda nodes, seconds: None  # type: ignore[method-assign]
    used.planner.costs.observe_draft = lambda *told: None  # type: ignore[method-assign]
    return used


def test_a_long_prompt_is_read_after_the_first_token_and_in_pieces() -> None:
    reads = Forgetful()
    used = told_costs(planned({"draft": reads}, (), Budget(3)))
    asked = request([1, 2] * 200, SamplingParams(max_tokens=150, temperature=0, ignore_eos=True))
    run = decoder(ToyModel(VOCAB, max_length=900), used, rows=1, max_length=900)
    steps = [s for s, _ in run.steps([asked]) if s]
    assert steps[0].draft.nodes == 1
    assert not steps[0].draft.notes[0].charges, "nothing is read before the first token"
    long = [piece for piece in reads.pieces if piece > 20]
    assert sum(long) > 350, "the answer is long, so the prompt is worth reading"
    assert max(long) <= 201, "but never all at once"


def test_a_drafter_that_cannot_read_loses_the_sequence_and_not_the_text() -> None:
    class Failing(Forgetful):
        def read(self, slot: int, tokens: list[int], count: int) -> None:
            raise RuntimeError("no")

    told: list[str] = []
    used = told_costs(planned({"draft": Failing()}, (), Budget(3), tell=told.append))
    asked = request([1, 2] * 200, SamplingParams(max_tokens=150, temperature=0, ignore_eos=True))
    target = ToyModel(VOCAB, max_length=900)
    run = decoder(target, used, rows=1, max_length=900)
    [row] = run.generate([asked])
    assert [row.output] == plain_texts(target, [asked])
    assert told == ["the drafter 'draft' failed: it raised RuntimeError: no; the text goes on without drafts"]


def test_without_a_listener_a_failure_is_raised() -> None:
    class Fails(Wrong):
        def propose(self, context: DraftContext) -> Draft:
            raise RuntimeError("no")

    run = decoder(TARGET, planned({"fails": Fails()}, (), Budget(3), True), rows=1)
    with pytest.raises(RuntimeError, match="no"):
        run.generate([request([1, 2], SamplingParams(max_tokens=9))])


def test_a_drafter_without_chances_is_asked_for_what_its_record_earns() -> None:
    """It states no chance, so a short draft comes first; one that is always right gets long drafts soon."""
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    [truth] = plain_texts(TARGET, [request([1, 2], params)])
    used = told_costs(planned({"echo": Echo({(1, 2): [1, 2, *truth]})}, (), Budget(16)))
    steps = [s for s, _ in decoder(TARGET, used, rows=1).steps([request([1, 2], params)]) if s]
    sizes = [s.draft.nodes - 1 for s in steps if s.draft.nodes > 1]
    assert 1 <= sizes[0] <= 4
    assert max(sizes) == 8


def test_rows_with_and_without_a_distribution_join() -> None:
    ask = context([0, 1, 2], [[1], [2], [3]], [Budget(2)] * 3, SamplingParams(), needs_probs=True)
    drawn = Draft(np.array([[2, 5]]), np.array([[-1, 0]]), np.full((1, 2, VOCAB), 1 / VOCAB, np.float32), Siblings.IID)
    chosen = Draft(np.array([[3, 7, 8]]), np.array([[-1, 0, 1]]))
    out = join(ask, {1: Proposal(drawn, 0), 2: Proposal(chosen, 0)})
    validate(out, VOCAB)
    assert out.probs is not None
    assert out.siblings is Siblings.IID
    assert out.host[0] == [(1, -1)]
    assert out.host[1] == [(2, -1), (5, 0)]
    assert out.probs[2, 0, 7] == 1
    assert out.probs[2, 1, 8] == 1
    other = Draft(drawn.tokens, drawn.parents, drawn.probs, Siblings.WITHOUT_REPLACEMENT)
    with pytest.raises(ValueError, match="drawn in 2 ways"):
        join(ask, {0: Proposal(drawn, 0), 1: Proposal(other, 0)})


def test_a_plan_knows_how_long_its_texts_are() -> None:
    drafter, seen = planned({"model": model()}), list[int]()
    plan = drafter.planner.plan
    drafter.planner.plan = lambda views, waiting=0: (seen.extend(view.length for view in views), plan(views, waiting))[
        1
    ]
    ask = request([1, 2, 3] * 10, SamplingParams(max_tokens=12, ignore_eos=True))
    decoder(ToyModel(VOCAB), drafter, rows=1).generate([ask])
    assert seen[0] == 30
    assert seen == sorted(seen)
    assert 30 < drafter.planner.costs.behind < 42
