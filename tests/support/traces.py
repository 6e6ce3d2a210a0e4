"""Runs of the toy model that leave a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from helpers import VOCAB, RandomTree, decoder, request, toy_drafters

from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters.config import SpeculativeConfig
from outrider.engine.decoder import Decoder
from outrider.engine.request import Sequence
from outrider.engine.trace import Detail, Recorder, describe
from outrider.testing.toy import ToyModel
from outrider_lab.replay import Replay, replay
from outrider_lab.traces import Trace

TARGET = ToyModel(VOCAB, seed=0, max_length=200)
LOADED = SimpleNamespace(name="toy", weights="float64")
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, max_tokens=20, ignore_eos=True)
RICH = SamplingParams(
    temperature=0.8, top_k=6, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2,
    logit_bias={3: 1.5, 5: -2.0}, stop_token_ids=[4], min_tokens=3, max_tokens=30, bad_words=[[2, 5]], logprobs=2,
)  # fmt: skip


def loop(drafter: str = "draft_model", verifier: str = "match", width: int = 1, rows: int = 3) -> Decoder:
    made = RandomTree(VOCAB, 3) if drafter == "random" else toy_drafters(TARGET, rows)[drafter]()
    return decoder(TARGET, made, rows=rows, verifier=verifier, budget=Budget(4, width))


def record(path: Path, run: Decoder, requests: list[Sequence], detail: Detail = Detail.TOKENS) -> list[Sequence]:
    """Run the requests with a trace; the finished rows in the order of the requests."""
    done: dict[int, Sequence] = {}
    with Recorder(path, detail) as trace:
        trace.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        for step, rows in run.steps(requests):
            if step is not None:
                trace.keep(step, rows)
                done.update({row.id: row for row in rows if row.finish is not None})
        assert trace.problem is None
    return [done[r.id] for r in requests]


def traced(path: Path, run: Decoder, requests: list[Sequence], seen=lambda rows: rows) -> str | None:
    """Run the requests with a trace that may fail; why it did."""
    with Recorder(path) as trace:
        trace.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        for step, rows in run.steps(requests):
            assert step is not None
            trace.keep(step, seen(rows))
    return trace.problem


def three(params: SamplingParams = SAMPLED) -> list[Sequence]:
    return [request([1, 2, 3, n], params.with_(max_tokens=12 + 4 * n), seed=n) for n in range(3)]


def replays(trace: Trace, run: Decoder) -> Iterator[Replay]:
    for text in trace.texts.values():
        for step in range(len(text.steps)):
            yield replay(trace, run, step, text.id)
