"""Reads traces: a file of `outrider.engine.trace`, its texts, their steps, and sums over them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from outrider.core.origins import letters
from outrider.core.outputs import SpeculativeMetrics
from outrider.core.params import SamplingParams
from outrider.core.suggest import faults
from outrider.core.types import PHASES
from outrider.engine.trace import FORMAT, EndRecord, RequestRecord, RunRecord, StepRecord

NO_TOKENS = (
    "this trace has counts only; --trace-detail tokens or Recorder(path, Detail.TOKENS) also writes tokens, "
    "which show the text of the prompts"
)
_HOW = "write one with: outrider generate PROMPT --trace FILE"


def sampling(request: RequestRecord) -> SamplingParams:
    """The sampling parameters. Raises ValueError for values that they cannot have."""
    fields = dict(request.params)
    try:
        if fields.get("logit_bias"):
            fields["logit_bias"] = {int(token): float(bias) for token, bias in fields["logit_bias"].items()}
        params = SamplingParams(**fields)
        params.check_vocab(2**63)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the sampling parameters cannot be read: {error}") from error
    return params


class TracedRequest(RequestRecord):
    """A request, as it was read. Its fields fit together."""

    @model_validator(mode="after")
    def _consistent(self) -> TracedRequest:
        if self.prompt is not None and len(self.prompt) != self.prompt_tokens:
            raise ValueError(f"the prompt has {len(self.prompt)} tokens, not {self.prompt_tokens}")
        if self.continued >= max(1, self.prompt_tokens):
            raise ValueError(f"{self.continued} of {self.prompt_tokens} prompt tokens are said to be text already")
        sampling(self)
        return self


class TracedStep(StepRecord):
    """A step, as it was read. Its fields fit together."""

    @model_validator(mode="after")
    def _consistent(self) -> TracedStep:
        if not self.accepted <= self.depth <= self.drafted or not self.accepted <= self.committed <= self.accepted + 1:
            raise ValueError("accepted <= depth <= drafted and accepted <= committed <= accepted + 1 must hold")
        if self.tokens is None:
            return self
        tokens, parents, path = self.tokens, self.parents or [], self.path or []
        if len(tokens) != len(parents) or len(tokens) != self.drafted + 1 or parents[0] != -1:
            raise ValueError(f"tokens and parents are {self.drafted + 1} nodes, the root first, with parent -1")
        if any(not 0 <= up < n for n, up in enumerate(parents[1:], 1)):
            raise ValueError(f"a parent comes before its children, got parents {parents}")
        if path[:1] != [0] or any(n >= len(tokens) or parents[n] != up for up, n in pairwise(path)):
            raise ValueError(f"the path does not follow the tree: path {path}, parents {parents}")
        if self.token is None or self.siblings is None or self.budget is None:
            raise ValueError("token, siblings and budget are missing")
        if any(
            per_node is not None and len(per_node) != len(tokens)
            for per_node in (self.target_probs, self.draft_probs, self.confidence)
        ):
            raise ValueError("target_probs, draft_probs and confidence need one entry for each node")
        return self

    @property
    def written(self) -> list[int]:
        """The tokens that this step added to the text. Raises ValueError for a trace with counts only."""
        if self.tokens is None or self.path is None or self.token is None:
            raise ValueError(NO_TOKENS)
        return [*(self.tokens[n] for n in self.path[1:]), self.token][: self.committed]

    @property
    def origins(self) -> str:
        """One letter per new token; see `outrider.core.origins`."""
        return letters(self.drafted, self.accepted, self.refused > 0, self.committed)


AnyLine = Annotated[RunRecord | TracedRequest | TracedStep | EndRecord, Field(discriminator="line")]
_LINES: TypeAdapter[AnyLine] = TypeAdapter(AnyLine)


@dataclass(frozen=True)
class DepthAcceptance:
    """One level of the drafts. drafted: steps with a draft token there. accepted: steps that accepted one there."""

    depth: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """The share of steps that accepted a token at this depth."""
        return self.accepted / self.drafted


@dataclass(eq=False)
class TracedText:
    """One request of a trace and its text. end: None if the run or the trace stopped earlier."""

    request: TracedRequest
    steps: list[TracedStep] = field(default_factory=list)
    end: EndRecord | None = None

    @property
    def id(self) -> int:
        return self.request.request

    @property
    def finish(self) -> str | None:
        return None if self.end is None else self.end.finish

    @property
    def output_tokens(self) -> int:
        return sum(step.committed for step in self.steps)

    @property
    def tokens(self) -> list[int]:
        """The generated tokens. Raises ValueError for a trace with counts only."""
        return [token for step in self.steps for token in step.written]

    @property
    def origins(self) -> str:
        """One letter per generated token; see `TracedStep.origins`."""
        return "".join(step.origins for step in self.steps)

    @property
    def metrics(self) -> SpeculativeMetrics:
        """The numbers of `RequestOutput.metrics.speculative_decoding`. num_spec_tokens is the depth of the deepest draft."""
        return metrics(self.steps)

    def step(self, number: int) -> TracedStep:
        """Step `number`. Raises ValueError if there is no such step."""
        if not 0 <= number < len(self.steps):
            there = f"steps 0 to {len(self.steps) - 1}" if self.steps else "no steps"
            raise ValueError(f"request {self.id} has {there}, not step {number}")
        return self.steps[number]

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens. Raises ValueError for a trace with counts only."""
        if self.request.prompt is None:
            raise ValueError(NO_TOKENS)
        return self.request.prompt


@dataclass(eq=False)
class Trace:
    """A recorded run.

    texts: by request id, in the order of their start. problem: file, line and reason if the file is damaged; then the
    trace holds all lines before that line.
    """

    path: Path
    header: RunRecord
    texts: dict[int, TracedText] = field(default_factory=dict)
    problem: str | None = None

    @property
    def steps(self) -> list[TracedStep]:
        """All steps of all requests, in time order."""
        return sorted((s for text in self.texts.values() for s in text.steps), key=lambda s: s.round)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in draft, target, verify and commit. Each round counts once."""
        rounds = {s.round: s.seconds for text in self.texts.values() for s in text.steps}
        return {phase: sum(parts[phase] for parts in rounds.values()) for phase in PHASES if rounds}

    @property
    def acceptance(self) -> list[DepthAcceptance]:
        """One entry per depth, from 1 to the deepest draft."""
        steps = self.steps
        deepest = max((s.depth for s in steps), default=0)
        return [
            DepthAcceptance(d, sum(s.depth >= d for s in steps), sum(s.accepted >= d for s in steps))
            for d in range(1, deepest + 1)
        ]

    @property
    def metrics(self) -> SpeculativeMetrics:
        """The numbers over all requests."""
        return metrics(self.steps)

    def text(self, request: int | None = None) -> TracedText:
        """One request. None: the only one. Raises ValueError for an unknown id, and for None with several requests."""
        names = ", ".join(map(str, list(self.texts)[:20])) + (", ..." if len(self.texts) > 20 else "")
        if request is None and len(self.texts) == 1:
            return next(iter(self.texts.values()))
        if request is None:
            raise ValueError(f"{self.path} holds {len(self.texts)} requests; name one of them: {names or 'none'}")
        if request not in self.texts:
            raise ValueError(f"{self.path} has no request {request}; it has {names or 'none'}")
        return self.texts[request]


def metrics(steps: list[TracedStep]) -> SpeculativeMetrics:
    """vLLM's speculative decoding numbers for some steps."""
    return SpeculativeMetrics.of(
        [s.drafted for s in steps], [s.accepted for s in steps], max((s.depth for s in steps), default=0)
    )


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file. A damaged file is read up to the damage, and `Trace.problem` says where that is.

    Raises OSError if the file cannot be opened. Raises ValueError with file, line and reason if the first line is not a
    header of this format.
    """
    where = Path(path)
    with where.open("rb") as file:
        trace = Trace(where, _header(where, next(file, b"")))
        for number, raw in enumerate(file, 2):
            try:
                _add(trace, _parse(raw))
            except ValueError as error:
                trace.problem = f"{where}, line {number}: {error}"
                break
    return trace


def _header(where: Path, raw: bytes) -> RunRecord:
    if not raw:
        raise ValueError(f"{where} is empty: the run wrote nothing, or this is no trace; {_HOW}")
    try:
        line = _parse(raw)
    except ValueError as error:
        raise ValueError(
            f"{where}, line 1: {_other_format(raw) or f'this is no trace of outrider ({error}); {_HOW}'}"
        ) from None
    if line.line != "header":
        raise ValueError(
            f"{where}, line 1: the first line of a trace is its header, and this line is a {line.line}; {_HOW}"
        )
    return line


def _other_format(raw: bytes) -> str | None:
    """What to say of the header of another version; None for anything else."""
    with suppress(ValueError):
        header = TypeAdapter(dict).validate_json(raw)
        if header.get("kind") == "outrider-trace" and header.get("format") != FORMAT:
            return (
                f"this trace has format {header.get('format')}, this outrider reads format {FORMAT}; use the version that wrote "
                f"it, or {_HOW}"
            )
    return None


def _parse(raw: bytes) -> AnyLine:
    """One line. Raises ValueError with a short reason."""
    if not raw.endswith(b"\n"):
        raise ValueError("it is cut off in the middle")
    try:
        raw.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    try:
        return _LINES.validate_json(raw)
    except ValidationError as error:
        raise ValueError(faults(error)[0]) from None


def _add(trace: Trace, line: AnyLine) -> None:
    """Add a line. Raises ValueError if it does not follow from the lines before."""
    if line.line == "header":
        raise ValueError("a second header; one file holds one run")
    if line.line == "request":
        if line.request in trace.texts:
            raise ValueError(f"request {line.request} joins a second time")
        trace.texts[line.request] = TracedText(line)
        return
    text = trace.texts.get(line.request)
    if text is None or text.end is not None:
        raise ValueError(f"a {line.line} of request {line.request}, which {'has ended' if text else 'never joined'}")
    if line.line == "end":
        text.end = line
        return
    last = text.steps[-1] if text.steps else None
    due, at = (
        text.request.continued + len(text.steps),
        text.request.prompt_tokens if last is None else last.position + last.committed,
    )
    if (line.step, line.position) != (due, at):
        raise ValueError(
            f"step {line.step} at position {line.position} of request {line.request}, where step {due} at position {at} is due"
        )
    text.steps.append(line)
