"""What one run tells of settings that were never run."""

import pytest

from outrider.bench.local import forget
from outrider.bench.tune.replay_target import play, watched
from outrider.bench.tune.simulate import Seen, Text, by_rows, steps_seconds
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


def watch(seen, llm, temperature, budget):
    for request in requests(llm, temperature):
        seen.watch(llm.decoder, request, budget)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shorter_chains_are_played_through_exactly(llm, temperature):
    seen = Seen(TREE)
    watch(seen, llm, temperature, Budget(8))
    for depth in (0, 1, 2, 3, 5):
        real = Seen(TREE)
        watch(real, llm, temperature, Budget(depth))
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
    watch(seen, llm, 0.0, Budget(8))
    watch(seen, llm, 0.0, TREE)
    for budget in (Budget(2, 3, 4), Budget(3, 3, 6)):
        real = Seen(TREE)
        watch(real, llm, 0.0, budget)
        steps = len(real.drafted) + 3  # the last step of a text is not counted
        assert len(seen.chain(budget.depth)) / seen.better(budget) == pytest.approx(steps, rel=0.15)


def nodes(seen, budget):
    """Guesses a step."""
    return sum(n * share for n, share in seen.made(budget).items())


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_trees_from_texts_are_predicted_too(method):
    """Their nodes come in the order of their likelihood, which is all that is asked for."""
    llm = LLM("builtin:code", speculative_config={"method": method, "controller": "fixed"}, max_num_seqs=1)
    limit, asks = Budget(12, 4, 16), requests(llm, 0.0)

    def real_run(*budgets):
        seen = Seen(limit)
        for budget in budgets:
            forget(llm.drafter)
            for request in asks:
                seen.watch(llm.decoder, request, budget)
        return seen

    seen = real_run(Budget(12), limit)
    for budget in (Budget(3, 4, 4), Budget(7, 4, 8), Budget(11, 4, 12)):
        real = real_run(budget)
        steps = len(real.drafted) + 3  # the last step of a text is not counted
        assert len(seen.chain(budget.depth)) / seen.better(budget) == pytest.approx(steps, rel=0.15)
        assert sum(seen.made(budget).values()) == pytest.approx(1)
        assert nodes(seen, budget) == pytest.approx(nodes(real, budget), rel=0.3)
    # what stands deeper does not count
    assert nodes(seen, Budget(1, 4, 16)) < nodes(seen, Budget(2, 4, 16)) < nodes(seen, limit)


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


@pytest.mark.parametrize("method", ["draft_model", "suffix", "token_recycling", "layer_skip", "quantized_self"])
def test_along_a_text_that_is_known_guesses_are_worth_what_they_are_worth_to_the_target(method):
    """Greedy and sampled texts in one run.

    Without the target's forwards where the drafter does not look into it, with them where it does.
    """
    more = {"draft_model": {"model": "builtin:code-draft"}, "layer_skip": {"layers": [0, 1, 3, 5]}}.get(method, {})
    config = {"method": method, "controller": "fixed", **more}
    llm = LLM("builtin:code", speculative_config=config, max_num_seqs=1)
    asks = [*requests(llm, 0.0)[:2], *requests(llm, 1.0)[2:]]
    answers = [row.output for row in LLM(llm.loaded, max_num_seqs=1).decoder.generate(asks)]
    seen = watched(llm.loaded, llm.drafter, asks, answers, Budget(6), TREE)
    real = Seen(seen.limit)
    for budget in (Budget(6), TREE):
        forget(llm.drafter)
        for request in asks:
            real.watch(llm.decoder, request, budget)
    assert [(t.right, t.there) for t in seen.texts] == [(t.right, t.there) for t in real.texts]
    assert seen.drafted == real.drafted
    assert seen.straight == real.straight
    assert seen.tokens == 3 * 48
    tree = Budget(3, 4, 6)
    if not play(seen, llm.loaded, llm.drafter, asks, answers, tree):  # by themselves, trees are known step by step
        assert method in ("token_recycling", "layer_skip", "quantized_self")
        return
    forget(llm.drafter)
    for request in asks:
        real.play(llm.decoder, request, tree)
    assert seen.played == real.played
    assert sum(seen.played[tree][0]) > 0
    flat = CostModel({}, [[1, n, 0, 1.0] for n in (1, 17)], [[1, 4, 1, 0, 0.0]], 0.0, 0.0)
    assert steps_seconds(seen, flat, tree) == len(real.played[tree])


def test_a_tree_costs_what_its_steps_cost_one_by_one():
    """A node beyond the first eight costs more: half the steps with none and half with sixteen are dearer than all with eight."""
    steep = CostModel({}, [[1, n, 0, s] for n, s in ((1, 1.0), (9, 1.0), (17, 9.0))], [[1, 4, 1, 0, 0.0]], 0.0, 0.0)
    seen = Seen(Budget(16, 4, 16))
    seen.texts.append(Text(10, [False] * 8, [16] * 8))
    seen.straight[0], seen.drafted = 8, [(1, [0] * 16), (1, [16] * 16)] * 4
    assert seen.made(Budget(16, 4, 16)) == {0: 0.5, 16: 0.5}
    assert steps_seconds(seen, steep, Budget(16, 4, 16)) == pytest.approx(len(seen.chain(16)) * 5, rel=0.2)
