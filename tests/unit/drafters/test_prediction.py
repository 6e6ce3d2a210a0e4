"""Predicted outputs: found again after every change, shifted token borders or not, and left alone when they do not fit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.types import Budget
from outrider.drafters.lookup.prediction import Alignment, PredictionDrafter
from outrider.testing.contract import check_drafter, context
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB)
DEPTH = 16


def written(prediction: list[int], answer: list[int], depth: int = DEPTH, width: int = 1) -> tuple[int, int]:
    """(steps) it takes to write an answer with this prediction."""
    drafter, text, steps, drafted = PredictionDrafter(prediction), [9999], 0, 0
    while len(text) - 1 < len(answer):
        ask = context([0], [list(text)], [Budget(depth, width)], SamplingParams())
        nodes, at = drafter.propose(ask).host[0], 0
        steps, drafted = steps + 1, drafted + len(nodes) - 1
        following = answer[len(text) - 1 :]
        for token in following:
            text.append(token)
            at = next((n for n, node in enumerate(nodes) if node == (token, at)), -1)
            if at < 0:
                break
    return steps, drafted


def test_the_prediction_itself_takes_as_few_steps_as_the_budget_allows() -> None:
    text = [*range(340)]
    assert written(text, text) == (20, 16 * 20)
    assert written(text, text[:170])[0] == 10
    assert written(text, [*text, *range(2000, 2020)])[0] == 20 + 20


def edited(seed: int) -> tuple[list[int], list[int], int, int]:
    """(prediction, answer, changes, new tokens): random changes of a random text of few different tokens."""
    draw = random.Random(seed)
    text = [draw.randrange(60) for _ in range(300)]
    answer, changes, new = list(text), draw.randrange(1, 5), 0
    for _ in range(changes):
        at, kind = draw.randrange(len(answer)), draw.choice(["insert", "delete", "change"])
        fresh = [draw.randrange(60) for _ in range(draw.randrange(1, 12))] if kind != "delete" else []
        gone = draw.randrange(1, 40) if kind != "insert" else 0
        new += len(fresh)
        answer[at : at + gone] = fresh
    return text, answer, changes, new


def extra(seed: int) -> float:
    """Steps a change costs, beside full steps and one for each new token."""
    text, answer, changes, new = edited(seed)
    return (written(text, answer)[0] - len(answer) / (DEPTH + 1) - new) / changes


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_it_is_found_again_after_any_edit(seed: int) -> None:
    text, answer, changes, new = edited(seed)
    steps, drafted = written(text, answer)
    assert extra(seed) <= 10
    assert drafted - (len(answer) - steps) <= DEPTH * (new + 6 * changes + 1), "too many wrong guesses"


def test_a_change_costs_two_or_three_steps() -> None:
    assert sum(map(extra, range(100))) / 100 < 2.8


def test_a_moved_passage_is_found_before_the_old_place() -> None:
    text = [*range(400)]
    steps, _ = written(text, [*text[200:], *text[:200]])
    assert steps <= 400 / 17 + 12


def test_shifted_token_borders_cost_a_few_steps() -> None:
    text = [*range(100, 400)]
    for start in ([7], [7, 8], [7, 101], [100, 7, 8]):  # the first tokens merge otherwise behind the prompt
        assert written(text, [*start, *text[2:]])[0] <= 300 / 17 + 6
    shifted = [*text[:100], 5, 6, *text[101:200], 7, *text[202:]]
    assert written(text, shifted)[0] <= 300 / 17 + 8


def test_a_single_token_that_changed_costs_one_step() -> None:
    text = [*range(340)]
    answer = [t if t % 34 != 20 else 900 + t for t in text]
    assert written(text, answer)[0] <= 20 + 10 + 2  # not two


def test_a_name_that_changed_once_is_expected_to_change_again() -> None:
    draw = random.Random(0)
    between = [[draw.randrange(100, 2000) for _ in range(20)] for _ in range(12)]
    text = [t for select in between for t in (7, 8, *select)]
    answer = [t for select in between for t in (70, 80, 90, *select)]
    steps, drafted = written(text, answer)
    assert steps <= len(answer) / 17 + 7
    assert drafted - (len(answer) - steps) < 40
    once = [70, 80, 90, *text[2:]]
    assert written(text, once)[0] <= len(once) / 17 + 7, "a change that does not come again is let go"
    removed = [t for select in between for t in select]
    assert written(text, removed)[0] <= len(removed) / 17 + 8


def test_a_prediction_in_another_language_costs_next_to_nothing() -> None:
    draw = random.Random(1)
    text = [draw.randrange(10) if draw.random() < 0.3 else draw.randrange(100, 500) for _ in range(1000)]
    answer = [draw.randrange(10) if draw.random() < 0.3 else draw.randrange(500, 900) for _ in range(1000)]
    steps, drafted = written(text, answer)
    assert steps > 980
    assert drafted < 100
    back, _ = written(text, [*answer, *text])  # and is taken up again when it fits
    assert back - steps < 1000 / 17 + 12


def test_with_width_a_doubtful_replacement_is_offered_beside_the_old_text() -> None:
    alignment = Alignment([7, *range(10, 20), 7, *range(20, 30)])
    alignment.extend([70, *range(10, 20)])
    [found] = alignment.contexts()
    assert [(t, n) for t, n, _ in found.source.following(found.state)[1]] == [(70, 9), (7, 1)]
    drafter = PredictionDrafter([7, *range(10, 20), 7, *range(20, 30)], least=0.05)
    ask = context([0], [[99, 70, *range(10, 20)]], [Budget(3, 2, 6)], SamplingParams())
    assert {t for t, p in drafter.propose(ask).host[0] if p == 0} == {70, 7}


def test_rows_have_predictions_of_their_own() -> None:
    drafter = PredictionDrafter([1, 2, 3, 4])
    ask = context([0, 1, 2], [[50], [50], [50, 7]], [Budget(2)] * 3, SamplingParams())
    object.__setattr__(ask, "predictions", [(), (5, 6, 7), (7, 8, 9)])
    draft = drafter.propose(ask)
    assert [[t for t, _ in draft.host[b][1:]] for b in range(3)] == [[1, 2], [5, 6], [8, 9]]
    check_drafter(lambda: PredictionDrafter([*range(40)] * 2), 100, 0, draws=False)
    assert written([], [1, 2, 3]) == (3, 0)


def test_a_request_brings_its_prediction_as_text() -> None:
    prompt, params = "def add(a, b):\n", SamplingParams(temperature=0, max_tokens=32)
    plain = LLM("builtin:code-draft").generate(prompt, params)[0].outputs[0]
    config: dict[str, Any] = {"method": "prediction", "num_speculative_tokens": 8}
    llm = LLM("builtin:code-draft", speculative_config=config, controller=Fixed(8))
    for prediction in (plain.text, plain.token_ids, " x" + plain.text[5:], "etwas ganz anderes", "", None):
        out = llm.generate(prompt, params.with_(prediction=prediction))[0]
        assert out.outputs[0].token_ids == plain.token_ids
        metrics = out.metrics.speculative_decoding
        assert metrics is not None
        if prediction == plain.token_ids:
            assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens >= 28
    config["prediction"] = plain.text
    whole = LLM("builtin:code-draft", speculative_config=config, controller=Fixed(8))
    out = whole.generate(prompt, params)[0]
    assert out.outputs[0].token_ids == plain.token_ids
    assert out.metrics.speculative_decoding is not None
    assert out.metrics.speculative_decoding.num_accepted_draft_tokens > 20
    with pytest.raises(ValueError, match=r"prediction holds \[9999"):
        llm.generate(prompt, params.with_(prediction=[9999]))
    with pytest.raises(ValueError, match="the prediction contains token 9999, outside"):
        LLM("builtin:code-draft", speculative_config={"method": "prediction", "prediction": [9999]})
