"""Reads a trace: typed lines, and what they add up to."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from outrider.outputs import SpeculativeMetrics
from outrider.trace.records import FORMAT, NO_TOKENS, PHASES, AnyLine, End, Header, Request, Step

_LINES: TypeAdapter[AnyLine] = TypeAdapter(AnyLine)
_HOW = "write one with: outrider generate PROMPT --trace FILE"


@dataclass(frozen=True)
class Depth:
    """One level of the drafts. drafted: steps whose draft reached it; accepted: those in which a guess of it was kept."""

    depth: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted


@dataclass(eq=False)
class Text:
    """One request of a trace and the text that was written for it. end: None where the trace or the run stopped before."""

    request: Request
    steps: list[Step] = field(default_factory=list)
    end: End | None = None

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
        """The tokens that were written. Raises ValueError where only counts were kept."""
        return [token for step in self.steps for token in step.written]

    @property
    def origins(self) -> str:
        """A letter per written token: where it came from, see `Step.origins`."""
        return "".join(step.origins for step in self.steps)

    @property
    def metrics(self) -> SpeculativeMetrics:
        """The numbers that `RequestOutput.metrics.speculative_decoding` holds; num_spec_tokens is the deepest draft."""
        return metrics(self.steps)

    def step(self, number: int) -> Step:
        """One of its steps. Raises ValueError for one that is not there."""
        if not 0 <= number < len(self.steps):
            there = f"steps 0 to {len(self.steps) - 1}" if self.steps else "no steps"
            raise ValueError(f"request {self.id} has {there}, not step {number}")
        return self.steps[number]

    @property
    def prompt(self) -> list[int]:
        """Raises ValueError where only counts were kept."""
        if self.request.prompt is None:
            raise ValueError(NO_TOKENS)
        return self.request.prompt


@dataclass(eq=False)
class Trace:
    """A run as it was written down. texts: by request id, in the order they joined. problem: file, line and reason where
    reading ended before the file did; what stands before that is whole."""

    path: Path
    header: Header
    texts: dict[int, Text] = field(default_factory=dict)
    problem: str | None = None

    @property
    def steps(self) -> list[Step]:
        """All steps of all requests, in the order they were made."""
        return sorted((s for text in self.texts.values() for s in text.steps), key=lambda s: s.round)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in draft, target, verify and commit; a round counts once, however many rows it had."""
        rounds = {s.round: s.seconds for text in self.texts.values() for s in text.steps}
        return dict(zip(PHASES, (sum(part) for part in zip(*rounds.values(), strict=True)), strict=False))

    @property
    def acceptance(self) -> list[Depth]:
        """Level by level, from 1 to the deepest that was drafted."""
        steps = self.steps
        deepest = max((s.depth for s in steps), default=0)
        return [
            Depth(d, sum(s.depth >= d for s in steps), sum(s.accepted >= d for s in steps))
            for d in range(1, deepest + 1)
        ]

    @property
    def metrics(self) -> SpeculativeMetrics:
        """Over all requests."""
        return metrics(self.steps)

    def text(self, request: int | None = None) -> Text:
        """One request; the only one, if none is named. Raises ValueError if that is not clear."""
        known = ", ".join(map(str, list(self.texts)[:20])) + (", ..." if len(self.texts) > 20 else "")
        if request is None and len(self.texts) == 1:
            return next(iter(self.texts.values()))
        if request is None:
            raise ValueError(f"{self.path} holds {len(self.texts)} requests; name one of them: {known or 'none'}")
        if request not in self.texts:
            raise ValueError(f"{self.path} has no request {request}; it has {known or 'none'}")
        return self.texts[request]


def metrics(steps: list[Step]) -> SpeculativeMetrics:
    """vLLM's numbers for some steps."""
    return SpeculativeMetrics.of(
        [s.drafted for s in steps], [s.accepted for s in steps], max((s.depth for s in steps), default=0)
    )


def read(path: str | os.PathLike[str]) -> Trace:
    """A trace file. One that was cut off, or is broken further down, is read as far as it is whole, and `Trace.problem` says
    where that ends.

    Raises OSError for a file that cannot be opened, and ValueError, with file, line and reason, where not even the header
    can be read: an empty file, another kind of file, another format.
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


def _header(where: Path, raw: bytes) -> Header:
    if not raw:
        raise ValueError(f"{where} is empty: the run ended before anything was written, or it is no trace; {_HOW}")
    try:
        line = _parse(raw)
    except ValueError as error:
        other = _format(raw)
        if other not in (None, FORMAT):
            raise ValueError(
                f"{where}, line 1: this trace has format {other}, this outrider reads format {FORMAT}; use the version "
                f"that wrote it, or {_HOW}"
            ) from None
        raise ValueError(f"{where}, line 1: this is no trace of outrider ({error}); {_HOW}") from None
    if not isinstance(line, Header):
        raise ValueError(f"{where}, line 1: a trace begins with its header, this line is a {line.line}; {_HOW}")
    if line.format != FORMAT:
        raise ValueError(
            f"{where}, line 1: this trace has format {line.format}, this outrider reads format {FORMAT}; use the version "
            f"that wrote it ({line.outrider}), or {_HOW}"
        )
    return line


def _format(raw: bytes) -> object:
    """The format that a header of another version names."""
    try:
        found = TypeAdapter(dict).validate_json(raw)
    except ValidationError:
        return None
    return found.get("format") if found.get("kind") == "outrider-trace" else None


def _parse(raw: bytes) -> AnyLine:
    """Raises ValueError with a short reason."""
    if not raw.endswith(b"\n"):
        raise ValueError("it is cut off in the middle")
    try:
        raw.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    try:
        return _LINES.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else str(first["msg"])) from None


def _add(trace: Trace, line: AnyLine) -> None:
    if isinstance(line, Header):
        raise ValueError("a second header; one file holds one run")
    if isinstance(line, Request):
        if line.request in trace.texts:
            raise ValueError(f"request {line.request} joins a second time")
        trace.texts[line.request] = Text(line)
        return
    text = trace.texts.get(line.request)
    if text is None or text.end is not None:
        raise ValueError(f"a {line.line} of request {line.request}, which {'has ended' if text else 'never joined'}")
    if isinstance(line, End):
        text.end = line
        return
    due, at = len(text.steps), text.request.prompt_tokens + text.output_tokens
    if (line.step, line.position) != (due, at):
        raise ValueError(
            f"step {line.step} at position {line.position} of request {line.request}, where step {due} at position {at} is due"
        )
    text.steps.append(line)
