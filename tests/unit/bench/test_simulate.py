"""What one run tells of settings that were never run."""

import pytest

from outrider.bench.tune.simulate import (
    DraftedText,
    DraftStatistics,
    best_depths,
    observe_drafts,
    simulate_trees,
    steps_seconds,
)
from outrider.control import CostModel
from outrider.core.types import Budget
from outrider.llm import LLM
from outrider.params import SamplingParams

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


def watch(found, llm, temperature, budget):
    for request in requests(llm, temperature):
        found.observe(llm.decoder, request, budget)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shorter_chains_are_played_through_exactly(llm, temperature):
    found = DraftStatistics(TREE)
    watch(found, llm, temperature, Budget(8))
    for depth in (0, 1, 2, 3, 5):
        real = DraftStatistics(TREE)
        watch(real, llm, temperature, Budget(depth))
        unknown = sum(r is None for text in found.texts for r in text.correct)
        assert abs(len(real.chain_steps(depth)) - len(found.chain_steps(depth))) <= unknown
        assert real.tokens == found.tokens == 3 * 48


def test_a_chain_that_ended_with_its_budget_says_nothing_of_what_was_left():
    """Always right, five tokens a step: by twos and ones too, nothing is short anywhere."""
    text = DraftedText(10)
    for _ in range(8):
        text.add(4, 4, 4, 5)
    found = DraftStatistics(Budget(4))
    found.texts.append(text)
    assert [len(found.chain_steps(depth)) for depth in (0, 1, 2, 4)] == [40, 20, 14, 8]


def test_smaller_trees_are_part_of_large_ones(llm):
    found = DraftStatistics(TREE)
    watch(found, llm, 0.0, Budget(8))
    watch(found, llm, 0.0, TREE)
    for budget in (Budget(2, 3, 4), Budget(3, 3, 6)):
        real = DraftStatistics(TREE)
        watch(real, llm, 0.0, budget)
        steps = len(real.tree_drafts) + 3  # the last step of a text is not counted
        assert len(found.chain_steps(budget.depth)) / found.tree_gain(budget) == pytest.approx(steps, rel=0.15)


def nodes(found, budget):
    """Guesses a step."""
    return sum(n * share for n, share in found.tree_sizes(budget).items())


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_trees_from_texts_are_predicted_too(method):
    """Their nodes come in the order of their likelihood, which is all that is asked for."""
    llm = LLM("builtin:code", speculative_config={"method": method, "controller": "fixed"}, max_num_seqs=1)
    limit, asked = Budget(12, 4, 16), requests(llm, 0.0)

    def real_run(*budgets):
        found = DraftStatistics(limit)
        for budget in budgets:
            llm.drafter.reset()
            for request in asked:
                found.observe(llm.decoder, request, budget)
        return found

    found = real_run(Budget(12), limit)
    for budget in (Budget(3, 4, 4), Budget(7, 4, 8), Budget(11, 4, 12)):
        real = real_run(budget)
        steps = len(real.tree_drafts) + 3  # the last step of a text is not counted
        assert len(found.chain_steps(budget.depth)) / found.tree_gain(budget) == pytest.approx(steps, rel=0.15)
        assert sum(found.tree_sizes(budget).values()) == pytest.approx(1)
        assert nodes(found, budget) == pytest.approx(nodes(real, budget), rel=0.3)
    # what stands deeper does not count
    assert nodes(found, Budget(1, 4, 16)) < nodes(found, Budget(2, 4, 16)) < nodes(found, limit)


def test_a_run_is_read_position_by_position():
    text = DraftedText(10)
    text.add(budget=4, drafted=4, accepted=2, committed=3)  # right, right, wrong
    text.add(budget=4, drafted=4, accepted=4, committed=5)  # all right, and a token that nobody guessed
    text.add(budget=4, drafted=1, accepted=1, committed=2)  # a drafter that had one guess, and no more
    assert text.correct == [True, True, False, True, True, True, True, None, True, False]
    assert text.available == [4] * 8 + [1, 0]


def test_seconds_of_a_chain():
    """Ten tokens, guesses always right: with 4 a step, 5 and 5 tokens, of which the last step may guess 4."""
    found = DraftStatistics(TREE)
    text = DraftedText(0)
    text.correct, text.available = [True] * 10, [8] * 10
    found.texts = [text]
    assert found.chain_steps(4) == [(4, 0), (4, 5)]
    assert found.chain_steps(0) == [(0, n) for n in range(10)]
    assert steps_seconds(found, cost(), Budget(4)) == pytest.approx(2 * (1 + 4 * 0.05 + 0.4))
    assert steps_seconds(found, cost(), Budget(0)) == pytest.approx(10)
    with pytest.raises(ValueError, match="no tree was observed"):
        steps_seconds(found, cost(), Budget(2, 3, 4))


def test_more_texts_side_by_side_want_fewer_guesses():
    found = DraftStatistics(TREE)
    text = DraftedText(0)
    text.correct, text.available = [True, True, False] * 20, [8] * 60
    found.texts = [text]
    best = best_depths(found, cost(node=0.12, row=0.0), (1, 8), 6)
    assert best[1] == 2
    assert best[8] == 0


@pytest.mark.parametrize("method", ["draft_model", "suffix", "token_recycling", "layer_skip", "quantized_self"])
def test_along_a_text_that_is_known_guesses_are_worth_what_they_are_worth_to_the_target(method):
    """Greedy and sampled texts in one run.

    Without the target's forwards where the drafter does not look into it, with them where it does.
    """
    more = {"draft_model": {"model": "builtin:code-draft"}, "layer_skip": {"layers": [0, 1, 3, 5]}}.get(method, {})
    config = {"method": method, "controller": "fixed", **more}
    llm = LLM("builtin:code", speculative_config=config, max_num_seqs=1)
    asked = [*requests(llm, 0.0)[:2], *requests(llm, 1.0)[2:]]
    answers = [row.output for row in LLM(llm.loaded, max_num_seqs=1).scheduler.generate(asked)]
    found = observe_drafts(llm.loaded, llm.drafter, asked, answers, Budget(6), TREE)
    real = DraftStatistics(found.limit)
    for budget in (Budget(6), TREE):
        llm.drafter.reset()
        for request in asked:
            real.observe(llm.decoder, request, budget)
    assert [(t.correct, t.available) for t in found.texts] == [(t.correct, t.available) for t in real.texts]
    assert found.tree_drafts == real.tree_drafts
    assert found.chain_hits == real.chain_hits
    assert found.tokens == 3 * 48
    tree = Budget(3, 4, 6)
    # A tree that was simulated itself is known step by step.
    if not simulate_trees(found, llm.loaded, llm.drafter, asked, answers, tree):
        assert method in ("token_recycling", "layer_skip", "quantized_self")
        return
    llm.drafter.reset()
    for request in asked:
        real.observe_tree(llm.decoder, request, tree)
    assert found.tree_steps == real.tree_steps
    assert sum(found.tree_steps[tree][0]) > 0
    flat = CostModel({}, [[1, n, 0, 1.0] for n in (1, 17)], [[1, 4, 1, 0, 0.0]], 0.0, 0.0)
    assert steps_seconds(found, flat, tree) == len(real.tree_steps[tree])


def test_a_tree_costs_what_its_steps_cost_one_by_one():
    """A node beyond the first eight costs more: half the steps with none and half with sixteen are dearer than all with eight."""
    steep = CostModel({}, [[1, n, 0, s] for n, s in ((1, 1.0), (9, 1.0), (17, 9.0))], [[1, 4, 1, 0, 0.0]], 0.0, 0.0)
    found = DraftStatistics(Budget(16, 4, 16))
    found.texts.append(DraftedText(10, [False] * 8, [16] * 8))
    found.chain_hits[0], found.tree_drafts = 8, [(1, [0] * 16), (1, [16] * 16)] * 4
    assert found.tree_sizes(Budget(16, 4, 16)) == {0: 0.5, 16: 0.5}
    assert steps_seconds(found, steep, Budget(16, 4, 16)) == pytest.approx(len(found.chain_steps(16)) * 5, rel=0.2)
