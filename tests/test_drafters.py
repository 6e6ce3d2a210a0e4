"""Every drafter keeps the contract, and each does what it is for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from contract import batch, check_drafter, guesses
from helpers import VOCAB, decoder, plain_texts, request, toy_drafters
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.base import BaseDrafter, Batch
from outrider.drafters.lookup import NgramDrafter, SuffixAutomaton, SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.models.toy import ToyModel
from outrider.params import SamplingParams
from outrider.types import Budget, Draft

TARGET = ToyModel(VOCAB)
DRAWN = ("draft_model", "self", "shape", "unsure")


@pytest.mark.parametrize("name", [n for n in toy_drafters(TARGET) if n not in ("random_tree", "target_tree")])
def test_contract(name: str) -> None:
    for seed in range(3):
        check_drafter(toy_drafters(TARGET)[name], VOCAB, seed, draws=name in DRAWN)


class _Greedy(BaseDrafter):
    """Breaks the budget."""

    def propose(self, batch: Batch) -> Draft:
        return Draft(torch.tensor([[t[-1], 1, 2] for t in batch.tokens]), torch.tensor([[-1, 0, 1]] * len(batch.rows)))


class _Rootless(BaseDrafter):
    def propose(self, batch: Batch) -> Draft:
        return Draft(torch.zeros(len(batch.rows), 1, dtype=torch.long), torch.full((len(batch.rows), 1), -1))


class _Forgetful(NgramDrafter):
    """Keeps a row's index after release."""

    def release(self, row: int) -> None: ...


@pytest.mark.parametrize("broken", [_Greedy, _Rootless, _Forgetful])
def test_the_contract_catches_those_who_break_it(broken: type) -> None:
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(10):
            check_drafter(broken, VOCAB, seed)


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_a_declared_law_is_the_law_that_was_drawn_from(error: float) -> None:
    draft = ToyModel(VOCAB, seed=0, error=error)
    ask = batch([0, 1], [[1, 2, 3], [4]], [Budget(3), Budget(2)], SamplingParams(temperature=0.8, top_k=6), law=True)
    made = ModelDrafter(draft, 2, 100).propose(ask)
    assert made.probs is not None
    for b, tokens in enumerate(ask.tokens):
        for node, (token, parent) in enumerate(guesses(made, b)):
            if node:
                before = [*tokens, *(t for t, _ in guesses(made, b)[1:node])]
                logits = draft.forward(torch.tensor([before]), draft.new_cache(1, 50), [0], want="last").logits[:, 0]
                law = ask.warp.select([b]).scores(logits, [before[len(tokens) :]]).softmax(-1)[0]
                torch.testing.assert_close(made.probs[b, parent], law)
                assert law[token] > 0


def test_a_drafter_that_cannot_see_far_stops_drafting_and_no_more() -> None:
    target = ToyModel(VOCAB, max_length=200)
    near = ModelDrafter(ToyModel(VOCAB, max_length=30), 1, 30)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine = decoder(target, near, rows=1)
    steps = [s for s, _ in engine.steps([request([1, 2], params)]) if s]
    assert sum(s.draft.nodes == 1 for s in steps) > 20
    assert [t for s in steps for t in s.kept[0].tokens] == plain_texts(target, [request([1, 2], params)])[0]


def test_prompt_lookup_takes_the_longest_match_and_the_latest_place() -> None:
    drafter = NgramDrafter(1, 3)

    def guess(tokens: list[int], depth: int = 3) -> list[int]:
        return [
            t for t, p in guesses(drafter.propose(batch([0], [tokens], [Budget(depth)], SamplingParams())), 0) if p >= 0
        ]

    assert guess([1, 2, 3, 4, 9, 2, 3]) == [4, 9, 2]
    drafter.release(0)
    assert guess([5, 6, 1, 7, 6, 2, 5, 6]) == [1, 7, 6]  # "5 6" beats the later "6"
    drafter.release(0)
    assert guess([6, 1, 6, 2, 6]) == [2, 6]
    drafter.release(0)
    assert guess([1, 2, 3]) == []
    assert guess([1, 2, 3, 1], 0) == []
    with pytest.raises(ValueError, match="1 <= min <= max"):
        NgramDrafter(3, 2)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
@settings(max_examples=150, deadline=None)
def test_the_automaton_counts_every_substring(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for cut in range(len(tokens) + 1):
        automaton.extend(tokens[:cut])
    expected = Counter(tuple(tokens[i:j]) for i in range(len(tokens)) for j in range(i + 1, len(tokens) + 1))
    for word, count in expected.items():
        at = 0
        for token in word:
            at = automaton.states[at].next[token]
        assert automaton.states[at].count == count


def test_suffix_drafts_follow_the_counts() -> None:
    def guess(tokens: list[int], depth: int = 8, **options: float) -> list[int]:
        ask = batch([0], [tokens], [Budget(depth)], SamplingParams())
        return [t for t, p in guesses(SuffixDrafter(**options).propose(ask), 0) if p >= 0]

    assert guess([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2], factor=1)[0] == 3  # 3 followed twice, 4 once
    assert guess([7, 8, 9, 1, 2, 3, 4, 7, 8, 9], factor=2) == [1, 2, 3, 4, 7, 8]
    assert guess([1, 2, 3, 4, 5]) == []
    draw = random.Random(0)
    noise = [draw.randrange(10**6) for _ in range(300)]
    assert guess(noise) == []


def test_long_texts_stay_cheap() -> None:
    draw = random.Random(1)
    tokens = [draw.choice([1, 1, 1, 2]) for _ in range(3000)] + [1] * 2000  # the automaton's worst kind
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    assert len(automaton.states) <= 2 * len(tokens)
    assert automaton.guess(8, 2, 0.1)[0] == [1] * 8
