"""A draft model reads long texts in pieces, and the texts stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
from engines import LONG, TARGET, engine, read, run, settled
from helpers import VOCAB, plain_texts, request
from vocabularies import TOY_DRAFT, pairing

from outrider.control import Adaptive, Fixed
from outrider.core.types import Budget
from outrider.drafters import ModelDrafter, SuffixDrafter
from outrider.drafters.combine.guard import PerRequestDrafter
from outrider.drafters.combine.router import DrafterRouter
from outrider.drafters.model.cross_tokenizer import CrossTokenizerDrafter
from outrider.engine import draft_prefill as reading
from outrider.testing.toy import ToyModel


class Counting(ToyModel):
    """A draft that counts the tokens it reads, and keeps the count of each turn whose step had several rows."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        super().__init__(vocab_size, seed=5, max_length=600)
        self.count, self.turns = 0, list[int]()

    def forward(self, nodes, **options):
        self.count += int((nodes.tree[:, nodes.held :] >= -1).sum())
        return super().forward(nodes, **options)


class Turning(ToyModel):
    """A target that tells its draft when a step has come."""

    def __init__(self, draft: Counting) -> None:
        super().__init__(VOCAB, seed=0, max_length=400)
        self.draft = draft

    def forward(self, nodes, **options):
        if options.get("want") != "none":  # a step, not a piece of a prompt
            self.draft.turns += [self.draft.count] * (len(nodes.slots) > 1)
            self.draft.count = 0
        return super().forward(nodes, **options)


def pair() -> tuple[Turning, Counting]:
    draft = Counting()
    return Turning(draft), draft


@pytest.mark.parametrize("kind", ["draft_model", "routed", "tli", "slem"])
@pytest.mark.parametrize("depth", [1, 4])
def test_no_step_waits_for_a_drafter_to_read_a_prompt(monkeypatch: pytest.MonkeyPatch, kind: str, depth: int) -> None:
    monkeypatch.setattr(reading, "PIECE", 96)  # much less than a prompt
    monkeypatch.setattr(reading, "WITHIN", 16)
    target, draft = pair()
    drafter: Any = ModelDrafter(draft, 4, 400)
    if kind == "routed":
        drafter = DrafterRouter({"suffix": SuffixDrafter(), "draft_model": drafter}, {"draft_model": 0.01})
    elif kind in ("tli", "slem"):  # a tokenizer of its own
        draft = target.draft = Counting(len(TOY_DRAFT))
        drafter = CrossTokenizerDrafter(draft, pairing(), 4, kind)
    eng = engine(target, drafter, depth=depth, prefix_bytes=0)
    requests = [request([1, 2], LONG.with_(max_tokens=60))]
    requests += [request([i + 1, 3] * 160, LONG.with_(max_tokens=40), i) for i in range(5)]
    results = run(eng, [read(r) for r in requests])
    assert [r.output for r in results] == plain_texts(TARGET, requests)
    guessing = 4 * (1 + depth * (1 + (kind == "slem")))  # a root and the guesses of each row
    assert max(draft.turns) <= 96 + 16 + guessing
    assert max(draft.turns) > 16 + guessing  # pieces are read
    assert all(r.speculative is not None and r.speculative.num_draft_tokens > 0 for r in results)
    settled(eng)
    assert not eng.scheduler.reading.spent


def test_a_row_alone_is_drafted_for_from_its_first_step() -> None:
    target, draft = pair()
    eng = engine(target, ModelDrafter(draft, 4, 400), prefix_bytes=0)
    alone = read(request([1, 3] * 150, LONG.with_(max_tokens=20)))
    run(eng, [alone])
    assert alone.sequence.drafted[0] == 4
    settled(eng)


def test_a_drafter_that_cannot_read_loses_the_row_and_not_the_text() -> None:
    class Failing(Counting):
        def forward(self, nodes, **options):
            if options.get("want") == "none":
                raise RuntimeError("/secret")
            return super().forward(nodes, **options)

    eng = engine(TARGET, ModelDrafter(Failing(), 4, 400), prefix_bytes=0)
    requests = [request([1, 2], LONG.with_(max_tokens=60)), request([4, 3] * 150, LONG.with_(max_tokens=30), 1)]
    results = run(eng, [read(r) for r in requests])
    assert [r.output for r in results] == plain_texts(TARGET, requests)
    assert results[0].undrafted is None
    assert results[1].undrafted is not None
    assert "secret" not in results[1].undrafted
    settled(eng)


def test_the_controller_is_told_what_reading_cost() -> None:
    target, draft = pair()
    eng = engine(target, ModelDrafter(draft, 4, 400), prefix_bytes=0)
    adaptive = Adaptive(Budget(4))
    eng.scheduler.lengths.inner = adaptive
    requests = [request([i + 1, 3] * 150, LONG.with_(max_tokens=90), i) for i in range(6)]
    results = run(eng, [read(r) for r in requests])
    assert [r.output for r in results] == plain_texts(TARGET, requests)
    assert adaptive.losses.looks
    settled(eng)


def test_a_request_with_a_draft_length_of_its_own_keeps_the_tree() -> None:
    """Eight levels on a server of trees four wide with 16 nodes: still 16 nodes, not 32."""
    reads = reading.DraftPrefill(PerRequestDrafter({}, "none", VOCAB), {})
    budgets = reading.RequestBudgets(Fixed(4, 4, 16), reads)
    budgets.depth |= {1: 8, 2: 0}
    assert budgets.budgets([0, 1, 2]) == [Budget(4, 4, 16), Budget(8, 4, 16), Budget(0)]
