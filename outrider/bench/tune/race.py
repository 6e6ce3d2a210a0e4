"""Candidates of a search, and their measurement: they answer the same prompts in turns of a few tokens."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.interleave import TimedRun, interleave
from outrider.bench.local import SampleRecorder, sampling_params
from outrider.bench.prompts import Prompt
from outrider.bench.run import Sample
from outrider.bench.tune.simulate import DraftStatistics
from outrider.control import Adaptive, Calibrated, Controller, CostModel, Fixed
from outrider.core.types import Budget
from outrider.decode import Decoder, Sequence
from outrider.drafters import ModelDrafter, NoDraft
from outrider.llm import LLM
from outrider.models.load import Loaded

# Tokens of a turn.
STRETCH = 16


@dataclass(eq=False)
class MethodTrial:
    """A drafting method, and what is known about it.

    problem: why it cannot be used here. llm: with its drafter. statistics: None until its drafts were observed.
    best: the candidate with the highest prediction.
    """

    name: str
    config: dict[str, Any]
    problem: str = ""
    llm: LLM | None = None
    statistics: DraftStatistics | None = None
    cost: CostModel | None = None
    best: Candidate | None = None


@dataclass(eq=False)
class Candidate:
    """A setting that can be measured.

    method: None for plain decoding. predicted: tokens per second. samples: its measurements. dropped: why it is not measured
    any longer. decoder, controller: set when it is first measured.
    """

    name: str
    config: dict[str, Any]
    budget: Budget
    method: MethodTrial | None = None
    predicted: float | None = None
    samples: list[Sample] = field(default_factory=list)
    dropped: str = ""
    decoder: Decoder | None = None
    controller: Controller | None = None

    @property
    def adaptive(self) -> bool:
        return self.config.get("controller") == "calibrated"

    @property
    def speed(self) -> float:
        """Measured tokens per second of all answers together. NaN without samples."""
        seconds = sum(s.seconds for s in self.samples)
        return sum(s.output_tokens for s in self.samples) / seconds if seconds else math.nan


def plain_candidate() -> Candidate:
    """Plain decoding."""
    return Candidate("plain", {"method": "none"}, Budget(0))


class Racer:
    """Measures candidates with one target. sampling: fields of `SamplingParams`."""

    def __init__(self, target: Loaded, sampling: Mapping[str, Any]) -> None:
        self.target, self.sampling, self.turn = target, sampling, 0
        self.plain = LLM(target, max_num_seqs=1)

    def race(self, candidates: abc.Sequence[Candidate], prompt: Prompt, repeat: int) -> None:
        """Each candidate answers the prompt, and gets one more sample."""
        runs = dict[str, TimedRun]()
        [request] = self.requests([prompt], repeat)
        samples = {
            c.name: Sample(
                prompt=prompt.id, setting=c.name, repeat=repeat, turn=self.turn, seconds=0, seed=request.seed
            )
            for c in candidates
        }
        for c in candidates if self.turn % 2 else candidates[::-1]:
            runs[c.name] = TimedRun(self._decoder(c), request, self._controller(c), SampleRecorder(samples[c.name]))
        self.turn += 1
        interleave(runs, STRETCH)
        for c in candidates:
            c.samples.append(samples[c.name])

    def reset(self, candidates: abc.Sequence[Candidate]) -> None:
        """Make their drafters forget the answers they have seen."""
        for candidate in candidates:
            if candidate.decoder is not None:
                candidate.decoder.drafter.reset()

    def requests(self, prompts: abc.Sequence[Prompt], repeat: int = 0) -> list[Sequence]:
        return [
            request
            for p in prompts
            for request in self.plain.requests(p.content, sampling_params(self.sampling, p, repeat))
        ]

    def _decoder(self, candidate: Candidate) -> Decoder:
        """A drafter that learns from answers exists once for each candidate. All other drafters exist once for their method,
        with a slot for each candidate."""
        if candidate.decoder is None:
            shared = candidate.method.llm if candidate.method else None
            llm = shared or self.plain
            if not isinstance(llm.drafter, (NoDraft, ModelDrafter)):  # it may learn from answers
                llm = LLM(self.target, speculative_config=llm.config, max_num_seqs=1)
            candidate.decoder = llm.decoder
        return candidate.decoder

    def _controller(self, candidate: Candidate) -> Controller:
        """One for all answers of a candidate, as in use."""
        if candidate.controller is None:
            cost = candidate.method.cost if candidate.method else None
            if candidate.adaptive and cost is not None:
                candidate.controller = Adaptive(candidate.budget, Calibrated(cost))
            else:
                candidate.controller = Fixed(*candidate.budget.parts)
        return candidate.controller
