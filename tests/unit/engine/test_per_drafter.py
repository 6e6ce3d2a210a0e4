"""Requests with different drafters on one engine: what one drafter has shown is not held against another."""

from __future__ import annotations

from time import sleep

from engines import read, run

from outrider.decode import Sequence
from outrider.drafters.stubs import Wrong
from outrider.engine import Engine
from outrider.llm import LLM
from outrider.params import SamplingParams


class SlowAndWrong(Wrong):
    """Never right, and no step is fast enough to make it nearly free."""

    def propose(self, context):
        sleep(0.02)
        return super().propose(context)


def ask(eng: Engine, prediction: list[int] | None = None, method: str | None = None) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, prediction=prediction)
    [asked] = eng.llm.requests("def area(r):\n", params)
    return run(eng, [read(asked, method=method)])[0]


def test_a_prediction_is_used_on_a_server_whose_draft_model_does_not_pay() -> None:
    config = {"method": "draft_model", "model": "builtin:code-draft"}
    llm = LLM("builtin:code", speculative_config=config, drafter=SlowAndWrong(), max_num_seqs=2)
    eng = Engine(llm)
    try:
        plain = ask(eng, method="none")
        for _ in range(3):  # drafting is given up
            given_up = ask(eng)
        assert sum(given_up.accepted) == 0
        assert sum(given_up.drafted) < 30
        told = ask(eng, prediction=plain.output)
        assert told.output == plain.output
        assert sum(told.accepted) > 60
    finally:
        eng.close()
    assert eng.scheduler.problems() == []
