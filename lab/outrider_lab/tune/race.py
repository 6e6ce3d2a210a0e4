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

from outrider.core.intervals import Interval
from outrider.engine.decoder import Decoder
from outrider.engine.llm import LLM
from outrider.engine.request import Request, Sequence
from outrider.models.load import Loaded
from outrider_lab.bench import stats
from outrider_lab.bench.local import SampleRecorder, request_of
from outrider_lab.bench.prompts import Prompt
from outrider_lab.bench.report.analysis import summary
from outrider_lab.bench.run import Run, Sample, Setting

# Tokens of a turn.
STRETCH = 16


@dataclass(eq=False)
class TimedText:
    """One text that is written in stretches."""

    decoder: Decoder
    row: Sequence
    recorder: SampleRecorder  # receives every step, with the seconds that this text has taken
    seconds: float = 0.0

    def write(self, tokens: int) -> None:
        """Read the prompt, if it was not read. Then step until the text has this many tokens, or ends."""
        began = perf_counter() - self.seconds
        for step in self.decoder.run([self.row], tokens):
            self.recorder.add(step, 0, self.row, perf_counter() - began)
        self.seconds = perf_counter() - began


def interleave(writers: abc.Iterable[tuple[Decoder, SampleRecorder]], request: Request, stretch: int = STRETCH) -> None:
    """Let all write the text of a request, `stretch` tokens at a time. Their order is reversed with every stretch.

    Frees all slots, also after an interrupt. Raises what `Decoder.start` raises.
    """
    texts, tokens = list[TimedText](), 0
    try:
        for decoder, recorder in writers:
            texts.append(TimedText(decoder, decoder.start(request), recorder))
        while any(text.row.finish is None for text in texts):
            for text in texts:
                text.write(tokens)
            texts.reverse()
            tokens += stretch
    finally:
        for text in texts:
            text.decoder.release(text.row.slot)


@dataclass(eq=False)
class Candidate:
    """A setting that can be measured."""

    name: str
    config: dict[str, Any]
    drafters: tuple[str, ...] = ()  # the names of its drafters in the recording, none for plain decoding
    length: int | None = None  # of every draft, None if the planner chooses
    predicted: float | None = None  # speed over plain decoding in the replay
    samples: list[Sample] = field(default_factory=list)  # its measurements
    dropped: str = ""  # why it is not measured any longer
    llm: LLM | None = None  # set when it is first measured

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


class Racer:
    """Measures candidates with one target. sampling: fields of `SamplingParams`."""

    def __init__(self, target: Loaded, sampling: Mapping[str, Any]) -> None:
        self.target, self.sampling, self.turn = target, sampling, 0
        self.plain = LLM(target, max_num_seqs=1)

    def race(self, candidates: abc.Sequence[Candidate], prompt: Prompt, repeat: int) -> None:
        """Each candidate answers the prompt, and gets one more sample. Raises ValueError for a setting that cannot be made."""
        request = self.request(prompt, repeat)
        recorders = {
            c.name: SampleRecorder(prompt=prompt.id, setting=c.name, repeat=repeat, turn=self.turn, seed=request.seed)
            for c in candidates
        }
        order = candidates if self.turn % 2 else candidates[::-1]
        self.turn += 1
        interleave([(self.llm(c).decoder, recorders[c.name]) for c in order], request)
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

    def request(self, prompt: Prompt, repeat: int = 0) -> Request:
        return request_of(self.plain, self.sampling, prompt, repeat)


def as_run(
    model: str,
    prompts: abc.Sequence[Prompt],
    candidates: abc.Sequence[Candidate],
    sampling: dict[str, Any],
    complete: bool,
) -> Run:
    """The candidates that were measured, as a run of `outrider bench`, for `outrider bench --report`."""
    measured = [c for c in candidates if c.answered]
    configs = [None if c.config["method"] == "none" else c.config for c in measured]
    settings = [Setting(name=c.name, speculative_config=config) for c, config in zip(measured, configs, strict=True)]
    samples = [sample for c in measured for sample in c.samples]
    repeats = 1 + max(sample.repeat for sample in samples)
    run = Run.begun(model, settings, prompts, sampling, repeats=repeats, samples=samples, complete=complete)
    run.summary = summary(run)
    return run
