"""What one run tells of settings that were never run."""

import pytest

from outrider.llm import LLM
from outrider.measure.local import forget
from outrider.measure.predict import Seen, Text, by_rows, steps_seconds
from outrider.params import SamplingParams
from outrider.tune import CostModel
from outrider.types import Budget

TREE = Budget(4, 3, 8)


def cost(node=0.05, level=0.1, wide=1.5, row=0.3):
    """In plain steps."""
    target = [[r, n, 0, (1 + row * (r - 1)) * (1 + node * r * (n - 1))] for r in (1, 8) for n in (1, 9)]
    draft = [[r, w, d, 0, d * level * (wide if w > 1 else 1)] for r in (1, 8) for w in (1, 3) for d in (0, 8)]
    return CostModel({}, target, draft, 0.0, 0.0)


@pytest.fixture(scope="module")
def llm():
    config = {"method": "draft_model", "model": "builtin:code-draft", "controller": "fixed"}
    return LLM("builtin:code", speculative_config=config, max_num_seqs=1)


def requests(llm, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=48, seed=3, ignore_eos=True)
    return [llm.requests(p, params)[0] for p in ("def area(r):\n", "class Stack:\n", "import os\n\nfor name in")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shorter_chains_are_played_through_exactly(llm, temperature):
    seen = Seen(TREE)
    seen.watch(llm, requests(llm, temperature), Budget(8))
    for depth in (0, 1, 2, 3, 5):
        real = Seen(TREE)
        real.watch(llm, requests(llm, temperature), Budget(depth))
        unknown = sum(r is None for text in seen.texts for r in text.right)
        assert abs(len(real.chain(depth)) - len(seen.chain(depth))) <= unknown
        assert real.tokens == seen.tokens == 3 * 48


def test_a_chain_that_ended_with_its_budget_says_nothing_of_what_was_left():
    """Always right, five tokens a step: by twos and ones too, nothing is short anywhere."""
    text = Text(10)
    for _ in range(8):
        text.add(4, 4, 4, 5)
    seen = Seen(Budget(4))
    seen.texts.append(text)
    assert [len(seen.chain(depth)) for depth in (0, 1, 2, 4)] == [40, 20, 14, 8]


def test_smaller_trees_are_part_of_large_ones(llm):
    seen = Seen(TREE)
    seen.watch(llm, requests(llm, 0.0), Budget(8))
    seen.watch(llm, requests(llm, 0.0), TREE)
    for budget in (Budget(2, 3, 4), Budget(3, 3, 6)):
        real = Seen(TREE)
        real.watch(llm, requests(llm, 0.0), budget)
        steps = len(real.drafted) + 3  # the last step of a text is not counted
        assert len(seen.chain(budget.depth)) / seen.better(budget) == pytest.approx(steps, rel=0.15)


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_trees_from_texts_are_predicted_too(method):
    """Their nodes come in the order of their likelihood, which is all that is asked for."""
    llm = LLM("builtin:code", speculative_config={"method": method, "controller": "fixed"}, max_num_seqs=1)
    limit, asks = Budget(12, 4, 16), requests(llm, 0.0)

    def watched(*budgets):
        seen = Seen(limit)
        for budget in budgets:
            forget(llm.drafter)
            seen.watch(llm, asks, budget)
        return seen

    seen = watched(Budget(12), limit)
    for budget in (Budget(3, 4, 4), Budget(7, 4, 8), Budget(11, 4, 12)):
        real = watched(budget)
        steps = len(real.drafted) + 3  # the last step of a text is not counted
        assert len(seen.chain(budget.depth)) / seen.better(budget) == pytest.approx(steps, rel=0.15)
        assert seen.made(budget) == pytest.approx(real.made(budget), rel=0.3)
    # what stands deeper does not count
    assert seen.made(Budget(1, 4, 16)) < seen.made(Budget(2, 4, 16)) < seen.made(limit)


def test_a_run_is_read_position_by_position():
    text = Text(10)
    text.add(asked=4, drafted=4, kept=2, tokens=3)  # right, right, wrong
    text.add(asked=4, drafted=4, kept=4, tokens=5)  # all right, and a token that nobody guessed
    text.add(asked=4, drafted=1, kept=1, tokens=2)  # a drafter that had one guess, and no more
    assert text.right == [True, True, False, True, True, True, True, None, True, False]
    assert text.there == [4] * 8 + [1, 0]


def test_seconds_of_a_chain():
    """Ten tokens, guesses always right: with 4 a step, 5 and 5 tokens, of which the last step may guess 4."""
    seen = Seen(TREE)
    text = Text(0)
    text.right, text.there = [True] * 10, [8] * 10
    seen.texts = [text]
    assert seen.chain(4) == [(4, 0), (4, 5)]
    assert seen.chain(0) == [(0, n) for n in range(10)]
    assert steps_seconds(seen, cost(), Budget(4)) == pytest.approx(2 * (1 + 4 * 0.05 + 0.4))
    assert steps_seconds(seen, cost(), Budget(0)) == pytest.approx(10)
    with pytest.raises(ValueError, match="no tree was seen"):
        steps_seconds(seen, cost(), Budget(2, 3, 4))


def test_more_texts_side_by_side_want_fewer_guesses():
    seen = Seen(TREE)
    text = Text(0)
    text.right, text.there = [True, True, False] * 20, [8] * 60
    seen.texts = [text]
    best = by_rows(seen, cost(node=0.12, row=0.0), (1, 8), 6)
    assert best[1] == 2
    assert best[8] == 0
