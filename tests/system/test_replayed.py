"""Recorded guesses, replayed on simulated costs: the guesses are the drafter's, and the time is that of the steps."""

from __future__ import annotations

import pytest
from helpers import VOCAB, decoder, request

from benchmarks import replayed
from outrider.control import Adaptive, Fixed
from outrider.core.types import Budget
from outrider.drafters import ModelDrafter
from outrider.params import SamplingParams
from outrider.testing.toy import ToyModel

COSTS = replayed.Costs({1: 1.0, 8: 1.7, 9: 2.2, 17: 4.6}, level=0.05, bytes=0.1)
WORDS = list(range(80))
TEXT = replayed.Recorded(3, WORDS, {"draft_model": [WORDS[n : n + 16] for n in WORDS], "suffix": [[99] * 16] * 80})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_recorded_is_what_would_have_been_guessed(temperature: float) -> None:
    target = ToyModel(VOCAB)
    recorder = replayed._Recorder({"self": ModelDrafter(ToyModel(VOCAB), 1, 512)})
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    [row] = decoder(target, recorder, depth=16, rows=1).generate([request([1, 2], params)])
    for at, guess in enumerate(recorder.guesses["self"][:-1]):  # the last step may write no guess
        right = row.output[at:][:16]
        assert guess[: len(right)] == right
    assert len(recorder.guesses["self"]) >= 29


def test_the_time_is_that_of_the_steps() -> None:
    assert [COSTS.forward(n) for n in (0, 7, 8, 16)] == pytest.approx([1.0, 1.7, 2.2, 4.6])
    right = replayed.Machine(COSTS, "draft_model").write(Fixed(4), [TEXT, TEXT], 20)
    assert right == pytest.approx(2 * 4 * (1.4 + 4 * 0.05))  # five tokens a step
    wrong = replayed.Machine(COSTS, "suffix").write(Fixed(4), [TEXT], 20)
    assert wrong == pytest.approx(16 * 1.4 + 1.3 + 1.2 + 1.1 + 1.0)  # no guess behind the end


def test_auto_finds_the_one_that_is_right() -> None:
    costs = replayed.fixed(COSTS, [TEXT], 60)
    assert min(costs, key=costs.__getitem__).startswith("draft_model")
    assert costs["plain"] == 60
    machine, controller = replayed.Machine(COSTS, "auto", 1.3, 0.05), Adaptive(Budget(16))
    machine.write(controller, [TEXT], 30)
    assert machine.write(controller, [TEXT], 60) < 1.5 * min(costs.values())


def test_a_line_for_each_text_and_the_mean_of_all() -> None:
    made = replayed.measure("0.5B", "code", 1.0, [TEXT] * 5, 20, 1.0, 0.0, 1, None)
    assert made["texts"] == 5
    assert made["best"] >= made["auto"] > 1
    told = replayed.measure("0.5B", "code", 1.0, [TEXT] * 5, 20, 1.0, 0.0, 1, 0.0)
    assert made["best"] >= told["auto"] > 0.95 * made["auto"]  # three first looks find out nearly all that it is told
    assert replayed.table([made, {**made, "auto": made["best"]}]).count("| 1.000 |") == 1
