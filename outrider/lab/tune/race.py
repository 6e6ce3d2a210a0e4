"""Candidates of a search, and their measurement: they answer the same prompts in turns of a few tokens.

On a machine with neighbours the speed can change by a factor of two within seconds (docs/performance.md). A comparison that
is precise to a few percent must measure all candidates in the same moments, not one whole text after the other.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from outrider.control import Controller
from outrider.core.intervals import Interval
from outrider.engine.decoder import Decoder
from outrider.engine.llm import LLM
from outrider.engine.request import Request, Sequence
from outrider.lab.bench import stats
from outrider.lab.bench.local import SampleRecorder, sampling_params
from outrider.lab.bench.prompts import Prompt
from outrider.lab.bench.run import Run, Sample, Setting
from outrider.lab.bench.summary import summary
from outrider.models.load import Loaded


@dataclass(eq=False)
class TimedRun:
    """One text, written in stretches of tokens, with the time of each.

    controller: for runs that share a decoder; None uses the decoder's own. recorder: receives every step.
    prefill: seconds for the prompt. seconds: of each stretch, the drafter's own prefill included. All runs of a comparison
    have the same number of stretches. forwards: seconds in the target and the draft model.
    """

    decoder: Decoder
    request: Request
    controller: Controller | None = None
    recorder: SampleRecorder | None = None
    prefill: float = 0.0
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    forwards: float = 0.0
    _row: Sequence | None = None

    @property
    def row(self) -> Sequence:
        """The text and its state. Only after `start`."""
        assert self._row is not None
        return self._row

    @property
    def total(self) -> float:
        """Seconds of all stretches."""
        return sum(self.seconds)

    @property
    def finished(self) -> bool:
        return self.row.finish is not None

    def start(self) -> None:
        """Take a slot and read the prompt. Raises what `Decoder.admit` raises."""
        self._row = self.decoder.start(self.request)
        began = perf_counter()
        while self.row in self.decoder.waiting:
            self.decoder.prefill(self.row)
        self.prefill = perf_counter() - began

    def write(self, tokens: int) -> None:
        """Step until the text has this many tokens, or ends."""
        self._own_controller()
        before, began = self.prefill + self.total, perf_counter()
        while not self.finished and len(self.row.output) < tokens:
            step = self.decoder.round([self.row])
            self.steps += 1
            self.drafted += int(step.draft.num_draft_tokens)
            self.forwards += step.seconds["draft"] + step.seconds["target"]
            if self.recorder is not None:
                self.recorder.add(step, 0, self.row, before + perf_counter() - began)
        self.seconds.append(perf_counter() - began)

    def release(self) -> None:
        """Free the slot, if there is one."""
        if self._row is not None:
            self._own_controller()
            self.decoder.release(self._row.slot)

    def _own_controller(self) -> None:
        if self.controller is not None:
            self.decoder.controller = self.controller


def interleave(runs: Mapping[str, TimedRun], stretch: int = 8) -> Mapping[str, TimedRun]:
    """Write all texts, `stretch` tokens at a time, and return the runs. Their order is reversed with every stretch.

    Frees all slots, also after an interrupt. Raises what `Decoder.admit` raises.
    """
    order, tokens = list(runs.values()), 0
    try:
        for run in order:
            run.start()
        while not all(run.finished for run in order):
            tokens += stretch
            for run in order:
                run.write(tokens)
            order.reverse()
    finally:
        for run in runs.values():
            run.release()
    return runs


# Tokens of a turn.
STRETCH = 16


@dataclass(eq=False)
class Candidate:
    """A setting that can be measured.

    drafters: the names of its drafters in the recording, none for plain decoding. length: of every draft, None if the planner
    chooses. predicted: speed over plain decoding in the replay. samples: its measurements. dropped: why it is not measured any
    longer. llm: set when it is first measured.
    """

    name: str
    config: dict[str, Any]
    drafters: tuple[str, ...] = ()
    length: int | None = None
    predicted: float | None = None
    samples: list[Sample] = field(default_factory=list)
    dropped: str = ""
    llm: LLM | None = None

    def drop(self, why: str) -> None:
        """Measure it no longer."""
        self.dropped = why

    @property
    def answered(self) -> list[Sample]:
        return [s for s in self.samples if s.error is None]

    @property
    def speed(self) -> float:
        """Measured tokens per second of all answers together; 0 without one."""
        seconds = stats.wall(self.answered)
        return sum(s.output_tokens for s in self.answered) / seconds if seconds else 0.0

    def gain(self, base: Candidate) -> Interval | None:
        """Its speed over that of another. None without a common prompt."""
        return stats.ratio(self.answered, base.answered)

    @property
    def told(self) -> dict[str, Any]:
        """What is known of its drafts beside the samples, in the field names of `vllm bench serve`."""
        return {}


class Racer:
    """Measures candidates with one target. sampling: fields of `SamplingParams`."""

    def __init__(self, target: Loaded, sampling: Mapping[str, Any]) -> None:
        self.target, self.sampling, self.turn = target, sampling, 0
        self.plain = LLM(target, max_num_seqs=1)

    def race(self, candidates: abc.Sequence[Candidate], prompt: Prompt, repeat: int) -> None:
        """Each candidate answers the prompt, and gets one more sample. Raises ValueError for a setting that cannot be made."""
        runs = dict[str, TimedRun]()
        [request] = self.requests([prompt], repeat)
        recorders = {
            c.name: SampleRecorder(prompt=prompt.id, setting=c.name, repeat=repeat, turn=self.turn, seed=request.seed)
            for c in candidates
        }
        for c in candidates if self.turn % 2 else candidates[::-1]:
            runs[c.name] = TimedRun(self.llm(c).decoder, request, recorder=recorders[c.name])
        self.turn += 1
        interleave(runs, STRETCH)
        for c in candidates:
            c.samples.append(recorders[c.name].sample())

    def llm(self, candidate: Candidate) -> LLM:
        """A candidate's own drafters: what one learns from answers helps no other. The target is shared.

        Raises ValueError for a setting that cannot be made.
        """
        if candidate.llm is None:
            plain = candidate.config["method"] == "none"
            candidate.llm = (
                self.plain if plain else LLM(self.target, speculative_config=candidate.config, max_num_seqs=1)
            )
        return candidate.llm

    def reset(self, candidates: abc.Sequence[Candidate]) -> None:
        """Make their drafters forget the answers they have seen."""
        for candidate in candidates:
            if candidate.llm is not None:
                candidate.llm.decoder.drafter.reset()

    def requests(self, prompts: abc.Sequence[Prompt], repeat: int = 0) -> list[Request]:
        return [
            request
            for p in prompts
            for request in self.plain.requests(self.plain.encode(p.content), sampling_params(self.sampling, p, repeat))
        ]


def as_run(
    model: str,
    prompts: abc.Sequence[Prompt],
    candidates: abc.Sequence[Candidate],
    sampling: dict[str, Any],
    complete: bool,
    concurrency: int = 1,
) -> Run:
    """The candidates that were measured, as a run of `outrider bench`: for `outrider report` and `outrider plan --acceptance`.

    An engine tells of draft tokens in sums, so these are in the summary only.
    """
    measured = [c for c in candidates if c.answered]
    configs = [None if c.config["method"] == "none" else c.config for c in measured]
    settings = [Setting(name=c.name, speculative_config=config) for c, config in zip(measured, configs, strict=True)]
    samples = [sample for c in measured for sample in c.samples]
    repeats = 1 + max(sample.repeat for sample in samples)
    more: dict[str, Any] = {"repeats": repeats, "concurrency": concurrency, "samples": samples, "complete": complete}
    run = Run.begun(model, settings, prompts, sampling, **more)
    run.summary = summary(run)
    for candidate in measured:
        run.summary[candidate.name] |= candidate.told
    return run
