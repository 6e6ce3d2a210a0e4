"""A measurement as data: settings, prompts, the machine, and every answer. One JSON file holds it."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.core.files import write_whole
from outrider.core.suggest import faults
from outrider.kernels.machine import machine
from outrider_lab.bench.prompts import Prompt

# Increase this when a field changes its meaning.
FORMAT = 1


class RunPart(BaseModel):
    """Base of all parts of the file. An unknown field is an error, so that a misspelt name is not lost."""

    model_config = ConfigDict(extra="forbid")


class Setting(RunPart):
    """A way to decode. The first setting of a run is the baseline: the others are compared with it."""

    name: str  # short and unique in the run; tables and pages show it
    speculative_config: dict[str, Any] | None = None  # None is plain decoding
    base_url: str | None = None  # the server that was asked, None for a model in this process
    guarantee: str | None = None  # exact-tokens or exact-distribution; None if unknown


class PromptRecord(RunPart):
    """A prompt as the file keeps it."""

    id: str  # unique in the run
    category: str = "all"
    text: str  # the prompt, or the last message of a chat
    tokens: int | None = None  # its length, if known


class Sample(RunPart):
    """One answer. Times are in seconds, from the request on."""

    prompt: str  # its id
    setting: str  # its name
    repeat: int
    turn: int  # index of this measurement in the run
    seconds: float = 0.0  # to the last token
    ttft: float | None = None  # to the first token
    gaps: list[
        tuple[float, int]
    ] = []  # of each later arrival: seconds since the one before, tokens that arrived together
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    seed: int | None = None
    text: str = ""
    token_ids: list[int] | None = None
    pieces: list[str] | None = None  # the text of each token
    origins: str | None = None  # a letter for each token, see `outrider.core.origins`
    drafted: list[int] | None = None  # draft tokens of each step
    accepted: list[int] | None = None  # of these, by step
    phases: dict[str, float] = {}  # seconds in draft, target, verify and commit; `rest` is the time outside of steps
    error: str | None = None  # why there is no answer


@dataclass
class Arrivals:
    """When the tokens of an answer came: fields of a `Sample`."""

    seconds: float = 0.0
    ttft: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def add(self, now: float, tokens: int) -> None:
        """Tokens came. now: seconds since the request."""
        if self.ttft is None:
            self.ttft = now
        else:
            self.gaps.append((now - self.seconds, tokens))
        self.seconds = now


class Run(RunPart):
    """A whole measurement."""

    format: int = FORMAT
    kind: Literal["outrider-bench"] = "outrider-bench"
    date: str  # ISO 8601, UTC
    command: str
    model: str
    machine: dict[str, str]  # processor, cores, versions
    sampling: dict[str, Any]  # parameters of every request; repeat r adds r to the seed
    repeats: int = 1
    concurrency: int = 1  # requests that are sent together
    settings: list[Setting] = Field(min_length=1)
    prompts: list[PromptRecord] = Field(min_length=1)
    samples: list[Sample] = []
    summary: dict[str, Any] = {}  # by setting, in the field names of `vllm bench serve`; computed from the samples
    complete: bool = False  # False after an interrupt: the samples are valid, and the run can be resumed

    @classmethod
    def begun(
        cls,
        model: str,
        settings: Sequence[Setting],
        prompts: Sequence[Prompt],
        sampling: Mapping[str, Any],
        lengths: Sequence[int | None] | None = None,
        **more: Any,
    ) -> Self:
        """A measurement by this command on this machine, now.

        Args:
            lengths: Of the prompts, in tokens.
            more: Other fields.
        """
        return cls(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=shlex.join(["outrider", *sys.argv[1:]]),
            model=model,
            machine={key: str(value) for key, value in machine().items()},
            sampling=dict(sampling),
            settings=list(settings),
            prompts=[
                PromptRecord(id=p.id, category=p.category, text=p.text, tokens=n)
                for p, n in zip(prompts, lengths or [None] * len(prompts), strict=True)
            ],
            **more,
        )

    def forget_failed(self) -> None:
        """Drop the turns that have a failed answer."""
        failed = {s.turn for s in self.samples if s.error is not None}
        self.samples = [s for s in self.samples if s.turn not in failed]

    def save(self, path: Path) -> None:
        """Write the file. It is replaced as a whole, so a reader never sees half of it."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a file that `save` wrote. Raises ValueError for any other file, and for another format number."""
        content = path.read_bytes()
        try:
            run = cls.model_validate_json(content)
        except ValidationError as error:
            raise ValueError(
                f"{path} is not a measurement of this outrider version ({faults(error)[0]}). "
                "Create one with: outrider bench --json RUN.json"
            ) from None
        if run.format != FORMAT:
            raise ValueError(f"{path} has format {run.format}. This version reads format {FORMAT}. Measure again.")
        return run
