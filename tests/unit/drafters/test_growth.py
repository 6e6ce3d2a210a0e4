"""Shapes are optimal, and what a growing tree keeps is a tree."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from helpers import VOCAB, decoder, request
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams
from outrider.core.tree import tree
from outrider.core.types import Budget, Draft
from outrider.drafters.base import draft_of
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.grower import Growth
from outrider.drafters.shapes import BY_RANK, Shape, optimal_shape
from outrider.testing.toy import ToyModel
from outrider_lab.gain import expected_accepted


def all_shapes(nodes: int, budget: Budget) -> list[Shape]:
    """Every tree of ranks with that many nodes below the root: brute force."""
    found = {((-1, 0),)}
    for _ in range(nodes):
        grown = set()
        for shape in found:
            levels = [0]
            for parent, _ in shape[1:]:
                levels.append(levels[parent] + 1)
            for n, level in enumerate(levels):
                ranks = {rank for parent, rank in shape[1:] if parent == n}
                rank = len(ranks)
                if level < budget.depth and rank < budget.width:
                    grown.add((*shape, (n, rank)))
        found = grown
    return [Shape(*zip(*shape, strict=True)) for shape in found]  # pyright: ignore


@pytest.mark.parametrize("budget", [Budget(3, 2, 5), Budget(2, 3, 4), Budget(5, 1, 4), Budget(1, 4, 3)])
def test_no_tree_of_that_size_is_worth_more(budget: Budget) -> None:
    draw = random.Random(0)
    for _ in range(5):
        by_rank = sorted((draw.random() / 2 for _ in range(4)), reverse=True)
        best = optimal_shape(budget, by_rank)
        assert len(best.parents) == budget.max_nodes + 1
        worth = max(expected_accepted(s, by_rank) for s in all_shapes(budget.max_nodes, budget))
        assert expected_accepted(best, by_rank) == pytest.approx(worth)


def test_a_shape_stays_within_its_budget() -> None:
    for depth, width, nodes in itertools.product((0, 1, 3), (1, 2, 9), (0, 1, 4, 10_000)):
        shape = optimal_shape(Budget(depth, width, nodes))
        levels = [0]
        for parent in shape.parents[1:]:
            levels.append(levels[parent] + 1)
        assert max(levels) <= depth
        assert max(shape.widths) <= min(width, len(BY_RANK))
        assert len(shape.parents) - 1 <= nodes
        assert len(shape.children) == len(shape.parents) - 1  # no child twice
    with pytest.raises(ValueError, match="must not increase"):
        optimal_shape(Budget(2, 2), (0.2, 0.5))


@given(st.integers(0, 4), st.integers(1, 3), st.integers(0, 9), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_what_is_kept_is_a_tree_of_the_likeliest(depth: int, width: int, nodes: int, draw: random.Random) -> None:
    growth = Growth(7, Budget(depth, width, nodes))
    for level in range(depth):
        for node in growth.open(level):
            count = draw.randrange(width + 1)
            growth.add(
                node,
                [draw.randrange(50) for _ in range(count)],
                sorted((-draw.random() for _ in range(count)), reverse=True),
            )
    kept = growth.kept()
    assert kept[0] == 0
    assert len(kept) <= nodes + 1
    assert all(growth.parents[n] in kept for n in kept[1:])
    left_out = set(range(len(growth.tokens))) - set(kept)
    assert all(growth.weights[n] <= min(growth.weights[k] for k in kept) for n in left_out)
    assert max(growth.levels) <= depth
    for n in kept[1:]:
        assert growth.path(n) == [*growth.path(growth.parents[n]), growth.tokens[n]]


def test_a_shape_gives_every_node_its_role() -> None:
    shape = Shape((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0))
    growth = Growth(0, Budget(2, 2, 4), shape)
    growth.add(0, [5], [0.0])  # the distribution had one token only: rank 1 and what hangs on it fall away
    assert growth.open(1) == [1]
    growth.add(1, [6, 7], [0.0, 0.0])
    assert growth.tokens == [0, 5, 6]
    assert growth.parents == [-1, 0, 1]
    assert growth.open(2) == []


TREES = st.lists(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1, width=32)), max_size=6), min_size=1, max_size=4)


@given(TREES, st.booleans(), st.randoms(use_true_random=False))
def test_a_draft_of_lists_is_the_draft_of_its_tensors(
    some: list[list[tuple[int, float]]], states: bool, draw: random.Random
) -> None:
    """Whichever is read first: lists, arrays, or a copy with notes."""
    trees = [[(7, -1), *((token, draw.randrange(n)) for n, (token, _) in enumerate(nodes, 1))] for nodes in some]
    chances = {
        b: [1.0, *(chance for _, chance in nodes)] for b, nodes in enumerate(some) if states and draw.random() < 0.7
    }
    stated = [chances.get(b) or [0.0] * len(nodes) for b, nodes in enumerate(trees)] if chances else None
    listed = draft_of(trees, chances, ["a note"] * len(trees))
    tokens, parents = tree(trees)
    whole = Draft(tokens, parents, confidence=listed.confidence, notes=("a note",) * len(trees))
    for draft in draw.sample([listed, draft_of(trees, chances).noted(whole.notes), listed.noted(whole.notes)], 3):
        assert np.array_equal(draft.tokens, tokens)
        assert np.array_equal(draft.parents, parents)
        assert (draft.host, draft.stated, draft.notes) == (whole.host, stated, whole.notes)
        assert whole.stated == stated
        assert draft.nodes == tokens.shape[1]


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
