"""Requests with different drafters on one engine: one planner for all, and the texts stay what they are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from time import sleep

import pytest
from engines import LONG, TARGET, engine, read, run, settled
from helpers import VOCAB, costs, plain_texts, planned, request

from outrider.control import CostModel, Costs, Planner
from outrider.control.plan import PLAIN, Plan, View
from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters import ModelDrafter
from outrider.engine import Engine
from outrider.engine.decoder import Sequence as Text
from outrider.engine.llm import LLM
from outrider.testing.stubs import Wrong
from outrider.testing.toy import ToyModel


class SlowAndWrong(Wrong):
    """Never right, and no step is fast enough to make it nearly free."""

    def propose(self, context):
        sleep(0.02)
        return super().propose(context)


def ask(llm: LLM, eng: Engine, prediction: list[int] | None = None, method: str | None = None) -> Text:
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, prediction=prediction)
    [asked] = llm.requests(llm.encode("def area(r):\n"), params)
    return run(eng, [read(asked, method=method)])[0]


def test_a_prediction_is_used_on_a_server_whose_draft_model_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are given, because a busy machine may measure a step of two nodes at twice one of one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "outrider.engine.calibrate.measure", lambda model, models, key, *_: CostModel(dict(key), {1: 0.003, 17: 0.005})
    )
    config = {"method": "draft_model", "model": "builtin:code-draft"}
    llm = LLM("builtin:code", speculative_config=config, drafter=SlowAndWrong(), max_num_seqs=2, any_method=True)
    eng = Engine(llm.runtime)
    try:
        plain = ask(llm, eng, method="none")
        for _ in range(3):  # drafting is given up
            given_up = ask(llm, eng)
        assert sum(given_up.counts.accepted) == 0
        assert sum(given_up.counts.drafted) < 30
        told = ask(llm, eng, prediction=plain.output)
        assert told.output == plain.output
        assert sum(told.counts.accepted) > 60
    finally:
        eng.close()
    assert eng.scheduler.problems() == []


def test_a_prediction_under_auto_is_one_drafter_among_others() -> None:
    llm = LLM("builtin:code", speculative_config={"method": "auto"}, max_num_seqs=2, any_method=True)
    eng = Engine(llm.runtime)
    try:
        plain = ask(llm, eng, method="none")
        told = ask(llm, eng, prediction=plain.output)
        assert (told.output, told.counts.method) == (plain.output, "auto")
        assert sum(told.counts.accepted) > 10  # how many depends on what steps cost here
        assert ask(llm, eng, method="prediction", prediction=plain.output).counts.method == "prediction"
        assert ask(llm, eng, method="suffix").output == plain.output
    finally:
        eng.close()


class Reads(Planner):
    """Reads what is missing in pieces, one sequence a step, then drafts."""

    def plan(self, views: Sequence[View], waiting: int = 0) -> list[Plan]:
        super().plan(views)  # beliefs are made as ever
        behind = [view.slot for view in views if view.missing and view.missing["mine"] > 16]
        return [
            Plan(None, PLAIN, read=("mine", min(view.missing["mine"] - 1, 96)) if view.slot == behind[0] else None)
            if view.slot in behind
            else Plan("mine" if view.missing and view.left > 1 else None, view.budget.clipped(view.left - 1))
            for view in views
        ]


def reading(drafter: ModelDrafter) -> Engine:
    """An engine whose drafter reads in pieces."""
    eng = engine(TARGET, drafter, prefix_bytes=0)
    eng.roster.planner = eng.decoder.controller = Reads(Budget(4), Costs(costs(["mine"])))
    return eng


def test_long_prompts_are_read_in_pieces_while_others_decode() -> None:
    pieces: list[int] = []

    class Counting(ModelDrafter):
        def read(self, slot: int, tokens: list[int], count: int) -> None:
            pieces.append(count)
            super().read(slot, tokens, count)

    eng = reading(Counting(ToyModel(VOCAB, error=0.2, max_length=600), 4, 400))
    requests = [request([1, 2], LONG.with_(max_tokens=60))]
    requests += [request([i + 1, 3] * 150, LONG.with_(max_tokens=60), i) for i in range(4)]
    results = run(eng, [read(r) for r in requests])
    assert [r.output for r in results] == plain_texts(TARGET, requests)
    assert len(pieces) >= 4 * 3
    assert max(pieces) == 96
    assert sum(sum(r.counts.drafted) for r in results) > 0
    settled(eng)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_length_of_ones_own(length: int) -> None:
    eng = engine(prefix_bytes=0)
    asked = [request([1, 2], LONG.with_(max_tokens=40)), request([3, 2], LONG.with_(max_tokens=40), 1)]
    results = run(eng, [read(asked[0], num_speculative_tokens=length), read(asked[1])])
    assert [r.output for r in results] == plain_texts(TARGET, asked)
    assert max(results[0].counts.drafted) == length
    assert max(results[1].counts.drafted) == 4
    settled(eng)


def test_every_method_of_a_combination_is_a_method() -> None:
    used = planned({"a": Wrong(1), "b": Wrong(2)}, (), Budget(2))
    assert set(used.methods) == {"a", "b", "a+b"}


def test_an_engine_and_its_model_step_in_turns() -> None:
    """They share one decoder. Each step moves the sequences of both, and no text changes."""
    llm = LLM("builtin:code", speculative_config={"method": "suffix"}, max_num_seqs=3)
    params, prompt = SamplingParams(temperature=0.8, seed=3, max_tokens=48, ignore_eos=True), "def area(r):\n"
    [plain] = llm.generate(prompt, params)
    with closing(Engine(llm.runtime)) as eng, ThreadPoolExecutor(2) as pool:
        served = [pool.submit(ask, llm, eng) for _ in range(6)]
        for _ in range(6):
            assert llm.generate(prompt, params)[0].outputs[0].token_ids == plain.outputs[0].token_ids
        texts = [one.result().output for one in served]
    assert texts == [texts[0]] * 6
