"""A measurement as a value: what was asked, of whom, on what machine, and every single answer. One JSON file holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

FORMAT = 1  # raised when a field changes its meaning


class Part(BaseModel):
    """Fields are what the file holds; others are an error, so that a misspelt one is not lost."""

    model_config = ConfigDict(extra="forbid")


class Setting(Part):
    """A way to decode. The first setting of a run is the one the others are compared with."""

    name: str  # short, unique in its run; what tables and pages show
    speculative_config: dict[str, Any] | None = None  # None: plain decoding
    base_url: str | None = None  # of the server that was asked, None for a model in this process
    guarantee: str | None = None  # what was promised: exact-tokens, exact-distribution, approximate; None: unknown


class Prompt(Part):
    """What was asked."""

    id: str  # unique in its run
    category: str = "all"
    text: str  # as the model read it, or the last message of a chat
    tokens: int | None = None


class Sample(Part):
    """One answer. Times in seconds."""

    prompt: str  # its id
    setting: str  # its name
    repeat: int
    turn: int  # the how-manieth measurement of the run this was: what drifts, drifts along it
    seconds: float  # from asking to the last token
    ttft: float | None = None  # to the first token
    gaps: list[
        tuple[float, int]
    ] = []  # after the first tokens: seconds until the next ones came, and how many came at once
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    seed: int | None = None
    text: str = ""
    token_ids: list[int] | None = None
    pieces: list[str] | None = None  # the text of each token
    origins: str | None = None  # a letter per token, see `outrider.core.origins`
    drafted: list[int] | None = None  # guesses of each step
    accepted: list[int] | None = None  # and how many of them were kept
    phases: dict[str, float] = {}  # seconds in draft, target, verify, commit; `rest` is what no step accounts for
    error: str | None = None  # why there is no answer


class Limits(Part):
    """What the machine allows, as far as it was measured. Seconds."""

    plain_step: float | None = None  # one token, one row
    target: dict[str, float] = {}  # forward of the target by number of tokens ("1", "2", ...)
    draft_token: float | None = None  # one token of the draft model
    weight_bytes: int | None = None
    read_bytes_per_second: float | None = None


class Run(Part):
    """A whole measurement. complete=False: it was interrupted; what is there is whole and can be gone on with."""

    format: int = FORMAT
    kind: Literal["outrider-bench"] = "outrider-bench"
    date: str  # ISO 8601, UTC
    command: str
    model: str
    machine: dict[str, str]  # processor, cores, versions
    sampling: dict[str, Any]  # parameters every request was sent with; in repeat r with seed + r
    repeats: int = 1
    concurrency: int = 1  # requests that are sent together
    settings: list[Setting] = Field(min_length=1)
    prompts: list[Prompt] = Field(min_length=1)
    samples: list[Sample] = []
    limits: Limits = Limits()
    predicted: dict[str, float] = {}  # by setting: tokens/s that the cost model expected
    summary: dict[str, Any] = {}  # by setting, in the field names of `vllm bench serve`; made from the samples
    complete: bool = False

    def save(self, path: Path) -> None:
        """Write to `path`; a reader never sees half a file."""
        part = path.with_name(path.name + ".part")
        part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a file that `save` wrote. Raises ValueError for anything else, and for a newer format."""
        text = path.read_text(encoding="utf-8")
        try:
            run = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                f"{path} is no measurement of this version of outrider ({where}: {first['msg']}); "
                "write one with: outrider bench --json RUN.json"
            ) from None
        if run.format != FORMAT:
            raise ValueError(f"{path} has format {run.format}, this outrider reads format {FORMAT}; measure again")
        return run
