"""What is believed of lookups and models, from what was committed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.beliefs import LookupBelief, ModelBelief, Offer, match_cell, priors
from outrider.control.price import DraftForecast

PRIOR = DraftForecast(1.0, 3.0, 2.5, 1.5)


def chain(tokens: list[int], mass: float = 0.9, match: int = 4) -> Offer:
    nodes = [(0, -1), *((token, n) for n, token in enumerate(tokens))]
    return Offer(nodes, [mass**n for n in range(len(nodes))], match)


def test_the_shipped_priors_are_whole() -> None:
    found = priors()
    assert {"sibling", "small", "head", "self"} == set(found["chains"])
    assert all(0 <= chance <= 100 for chains in found["chains"].values() for chain_ in chains for chance in chain_)
    assert all(len(chains) > 100 for chains in found["chains"].values())
    assert all(
        0 <= row < 6 and 0 <= column < 5 and 0 < hits < tries <= 20 for row, column, hits, tries in found["lookups"]
    )


def test_longer_matches_are_believed_more() -> None:
    belief = LookupBelief()
    first = [belief.survival(0, chain([1, 2, 3], match=match))[1] for match in (1, 2, 4, 12)]
    assert max(first[:1]) < 0.6 < min(first[1:]) <= max(first[1:]) == first[-1]
    assert first[-1] > 0.9
    assert [match_cell(n) for n in (0, 1, 2, 3, 4, 5, 6, 9, 10, 99)] == [0, 0, 1, 2, 3, 3, 4, 4, 5, 5]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0.05, 1.0)), max_size=9), st.integers(0, 20))
def test_a_node_is_never_likelier_than_its_parent(shape: list[tuple[int, int, float]], match: int) -> None:
    nodes, masses = [(0, -1)], [1.0]
    for token, pick, share in shape:
        parent = pick % len(nodes)
        nodes.append((token, parent))
        masses.append(masses[parent] * share)
    found = LookupBelief().survival(0, Offer(nodes, masses, match))
    assert found[0] == 1
    assert all(0 <= found[n] <= found[parent] for n, (_, parent) in enumerate(nodes) if n)


def test_a_text_that_copies_is_recognised_after_a_few_tokens_and_others_are_not_blamed() -> None:
    belief, offer = LookupBelief(), chain([5, 6, 7], mass=0.5, match=2)
    before = belief.survival(0, offer)[1]
    for _ in range(3):
        belief.learn(0, offer, [5, 6, 7, 1], False)
        belief.learn(1, offer, [9], False)
    assert belief.survival(0, offer)[1] > before + 0.05
    assert belief.survival(1, offer)[1] < before - 0.1
    belief.release(1)
    assert belief.survival(1, offer)[1] == pytest.approx(belief.survival(2, offer)[1])


def test_the_end_of_a_text_is_no_rejection() -> None:
    belief, offer = LookupBelief(), chain([5, 6, 7])
    before = [list(cell) for cell in belief.cells]
    belief.learn(0, offer, [9], True)
    assert belief.cells == before
    belief.learn(0, offer, [9], False)
    assert belief.cells != before


def test_what_a_text_does_not_show_teaches_nothing() -> None:
    """One token was committed and it was right: nothing is known of the second."""
    belief, offer = LookupBelief(), chain([5, 6, 7], match=12)
    before = sum(tries for _, tries in belief.cells)
    belief.learn(0, offer, [5], False)
    assert sum(tries for _, tries in belief.cells) - before <= 1


def test_a_store_full_of_wrong_text_is_soon_worth_nothing() -> None:
    belief, offer, draw = LookupBelief(), chain([5, 6, 7], match=12), random.Random(0)
    for slot in range(12):
        for _ in range(20):
            belief.learn(slot, offer, [draw.randint(8, 99)], False)
        belief.release(slot)
    assert belief.survival(99, offer)[1] < 0.35


def test_a_model_starts_from_its_chains_and_is_soon_what_the_text_shows() -> None:
    belief = ModelBelief("sibling")
    assert belief.means(0, PRIOR)[:3] == pytest.approx((1.0, 3.0, 2.5))
    for _ in range(40):
        belief.passed(0, False)
        belief.learn(0, [0.9, 0.8, 0.7], 2.4, 3, 3, 3)
    tokens, levels, nodes, weight = belief.means(0, PRIOR)
    assert tokens > 2.3
    assert levels == pytest.approx(3.0, abs=0.1)
    assert nodes == pytest.approx(3.0, abs=0.2)
    assert 15 < weight < 25
    other = belief.means(1, PRIOR)
    assert PRIOR.tokens < other[0] < tokens, "another text starts from what all have shown"
    assert other[3] == 0


def test_chances_that_promise_too_much_are_found_out() -> None:
    belief, draw = ModelBelief("head"), random.Random(1)
    for _ in range(60):
        belief.passed(0, False)
        belief.learn(0, [0.8, 0.64], 1.44, 2, 2, sum(draw.random() < 0.3 for _ in range(1)))
    assert belief.truth(0) < 0.35
    assert belief.means(0, PRIOR)[0] == pytest.approx(0.3, abs=0.15)
    assert 0.2 < belief.truth(1) < 0.6, "another text expects it, but less"


def test_what_was_learned_long_ago_fades_to_the_prior() -> None:
    belief = ModelBelief("sibling")
    for _ in range(30):
        belief.learn(0, [0.2], 0.2, 1, 1, 0)
    bad = belief.means(1, PRIOR)[0]
    belief.release(0)
    for _ in range(4000):
        belief.passed(2, False)
    assert bad < 0.5
    assert belief.means(3, PRIOR)[0] > 0.8


def test_a_drafter_of_an_unknown_kind_has_chains_too() -> None:
    assert ModelBelief("").chains == ModelBelief("sibling").chains
    assert ModelBelief("head").chains != ModelBelief("sibling").chains
