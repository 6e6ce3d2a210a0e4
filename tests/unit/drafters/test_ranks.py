"""Acceptance by rank, measured; and the trees that drafters make of it."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers import VOCAB, decoder, request
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters.lookup.token_recycling import Ranks, TokenRecyclingDrafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.shapes import BY_RANK, optimal_shape
from outrider.testing.toy import ToyModel
from outrider_lab.gain import expected_accepted

FULL = Budget(1, 8)  # eight siblings


def visit(ranks: Ranks, truth: list[float], draw: random.Random, shape: Budget = FULL) -> None:
    """A tree of that budget is walked by these chances."""
    tree, path = optimal_shape(shape), [0]
    while True:
        rank = draw.choices(range(len(truth) + 1), [*truth, 1 - sum(truth)])[0]
        if (path[-1], rank) not in tree.children:
            break
        path.append(tree.children[path[-1], rank])
    ranks.observe(tree.parents, path)


def test_nothing_seen_is_the_usual() -> None:
    assert Ranks().chances() == pytest.approx(BY_RANK)
    assert Ranks(3).chances() == pytest.approx(BY_RANK[:3])


@pytest.mark.parametrize("truth", [[0.9, 0.02, 0.01], [0.3, 0.25, 0.2, 0.05], [0.0, 0.0], [0.5] + [0.05] * 7])
def test_what_is_seen_is_believed(truth: list[float]) -> None:
    ranks, draw = Ranks(memory=1000), random.Random(0)
    for _ in range(2000):
        visit(ranks, truth, draw, Budget(4, 8, 20))
    for found, true in zip(ranks.chances(), [*truth, *[0.0] * 8], strict=False):
        assert found == pytest.approx(true, abs=0.05)
    budget = Budget(5, 4, 8)
    best = expected_accepted(optimal_shape(budget, truth), truth)
    assert expected_accepted(optimal_shape(budget, ranks.chances()), [*truth, *[0.0] * 8]) == pytest.approx(
        best, abs=0.05
    )


def test_what_was_seen_long_ago_is_forgotten() -> None:
    ranks, draw = Ranks(), random.Random(0)
    for truth in ([0.1, 0.1], [0.9, 0.05]):
        for _ in range(300):
            visit(ranks, truth, draw)
    assert ranks.chances()[0] == pytest.approx(0.9, abs=0.1)


@given(st.integers(1, 12), st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=30), st.integers(0, 20))
@settings(max_examples=100)
def test_chances_never_increase_and_shapes_obey(width: int, walks: list[list[int]], nodes: int) -> None:
    ranks, tree = Ranks(width, 8), optimal_shape(Budget(4, 8, 40))
    for walk in walks:
        path = [0]
        for rank in walk:
            if (path[-1], rank) in tree.children:
                path.append(tree.children[path[-1], rank])
        ranks.observe(tree.parents, path)
        chances = ranks.chances()
        assert all(0 <= b <= a <= 1 for a, b in itertools.pairwise(chances))
    shape = optimal_shape(Budget(3, 4, nodes), ranks.chances())
    assert len(shape.parents) - 1 <= nodes
    assert max(shape.widths) <= min(width, 4)


def test_recycling_learns_how_wide_its_trees_should_be() -> None:
    drafter = TokenRecyclingDrafter(VOCAB, 4)
    params = SamplingParams(temperature=1.5, max_tokens=200, ignore_eos=True)
    budget = Budget(4, 4, 8)
    decoder(ToyModel(VOCAB), drafter, budget=budget).generate([request([1, 2], params)])
    usual, found = optimal_shape(budget), optimal_shape(budget, drafter.ranks.chances())
    assert found.widths[0] > usual.widths[0]  # hardly anything is certain here
    drafter.reset()
    assert optimal_shape(budget, drafter.ranks.chances()) == usual


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_what_was_accepted_shapes_no_text_under_a_law(verifier: str) -> None:
    """Rules that read the law keep it, not the tokens; but a text must not depend on the rows beside it, nor on whether its row
    was taken out and seated again, with all that its drafter had counted lost."""
    target, budget = ToyModel(VOCAB), Budget(4, 4, 8)
    requests = [
        request([1, n], SamplingParams(temperature=t, max_tokens=50, ignore_eos=True), n)
        for n, t in enumerate((0.2, 1.0, 3.0))
    ]

    def texts(rows: int, resumed: bool) -> list[list[int]]:
        drafter = ModelDrafter(ToyModel(VOCAB, error=1.0), rows, target.max_length)
        engine = decoder(target, drafter, rows=rows, budget=budget, verifier=verifier)
        done = dict[int, list[int]]()
        for count, (_, moved) in enumerate(engine.steps(requests)):
            done |= {row.seed: row.output for row in moved}
            if resumed and count % 10 == 9:
                for row in [r for r in engine.sequences.values() if r.finish is None]:
                    engine.release(row.slot)
                    engine.admit(row)
        return [done[r.seed] for r in requests]

    alone = texts(1, False)
    assert texts(3, False) == alone
    assert texts(1, True) == alone
