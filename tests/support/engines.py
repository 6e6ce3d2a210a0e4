"""What the tests of the engine share: engines over toy models, readers of jobs, mixed requests."""

from __future__ import annotations

import logging
import queue
import random
import threading
from dataclasses import dataclass, field, replace

from helpers import VOCAB, request, toy_drafters
from patience import PATIENCE

from outrider.control import Fixed
from outrider.core.outputs import Delta
from outrider.core.params import SamplingParams
from outrider.drafters import Drafter
from outrider.drafters.config import SpeculativeConfig
from outrider.engine import Engine
from outrider.engine.request import Request, Sequence
from outrider.engine.runtime import build
from outrider.models.load import Loaded
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB, seed=0, max_length=400)
LONG = SamplingParams(max_tokens=380, ignore_eos=True)


@dataclass
class Reader:
    """Collects the deltas of a sequence. sequence: once it is submitted."""

    request: Request = field(init=False)
    sequence: Sequence = field(init=False)
    deltas: queue.Queue = field(default_factory=queue.Queue)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def __call__(self, delta: Delta) -> None:
        self.deltas.put(delta)

    def next(self) -> Delta:
        delta = self.deltas.get(timeout=PATIENCE)
        self.tokens += delta.token_ids
        self.ended |= delta.ended
        return delta

    def result(self) -> Sequence:
        while not self.ended:
            self.next()
        assert self.deltas.empty(), "a delta after the last"
        return self.sequence


def engine(
    target=TARGET, drafter: Drafter | None = None, *, rows: int = 4, depth: int = 4, width: int = 1, **options
) -> Engine:
    drafters = {"mine": drafter or toy_drafters(target, rows)["draft_model"]()}
    verifier = options.pop("verifier", "match")
    config = SpeculativeConfig(num_speculative_tokens=depth, tree_width=width, verifier=verifier)
    loaded = Loaded(target, "toy", None, (0,), "float32", "toy")
    runtime = build(
        loaded,
        config,
        num_slots=rows,
        drafters=drafters,
        controller=Fixed(depth, width),
        warn=logging.getLogger("outrider.engine").warning,
        any_method=True,
    )
    return Engine(runtime, **options)


class Gated(ToyModel):
    """Stops before its sixth forward until the gate is opened: a job that is surely still running."""

    def __init__(self) -> None:
        super().__init__(VOCAB, seed=0, max_length=400)
        self.gate, self.count = threading.Event(), 0

    def forward(self, nodes, **options):
        self.count += 1
        if self.count > 5:
            assert self.gate.wait(PATIENCE)
        return super().forward(nodes, **options)


def read(asked: Request, **options) -> Reader:
    """A reader of a request. options: fields of the request in place of its own."""
    reader = Reader()
    reader.request = replace(asked, sink=reader, **options)
    return reader


def submit(eng: Engine, readers: list[Reader]) -> list[Reader]:
    for reader, sequence in zip(readers, eng.submit([reader.request for reader in readers]), strict=True):
        reader.sequence = sequence
    return readers


def run(eng: Engine, readers: list[Reader]) -> list[Sequence]:
    return [reader.result() for reader in submit(eng, readers)]


def settled(eng: Engine) -> None:
    """Stop the engine; nothing may be left in its tables."""
    eng.close()
    assert eng.scheduler.problems() == []
    assert not eng.decoder.sequences
    assert not eng.scheduler.running
    assert sum(eng.decoder.cache.length) == 0


def mixed(count: int, seed: int) -> list[Request]:
    """Requests of every kind: parameters, lengths, seeds."""
    draw = random.Random(seed)
    out = []
    for number in range(count):
        params = SamplingParams(
            temperature=draw.choice([0, 0.7, 1, 2]),
            top_k=draw.choice([0, 0, 3]),
            top_p=draw.choice([1, 0.8]),
            min_p=draw.choice([0, 0.1]),
            repetition_penalty=draw.choice([1, 1.3]),
            frequency_penalty=draw.choice([0, 0.5]),
            logit_bias=draw.choice([None, {3: 1.5}]),
            min_tokens=draw.choice([0, 5]),
            stop_token_ids=draw.choice([(), (4,)]),
            ignore_eos=draw.random() < 0.7,
            logprobs=draw.choice([None, None, 1]),
            max_tokens=draw.randrange(5, 60),
        )
        start = [1, 2, 3] * 20 if draw.random() < 0.4 else []
        prompt = start + [draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 100))]
        out.append(request(prompt, params, number))
    return out
