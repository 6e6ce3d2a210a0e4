"""Traces: a file with each step of a run, as records. `Recorder` writes it (`LLM(..., trace=...)`, `--trace FILE`).

The laboratory reads it, sums it up and computes steps again (`outrider replay`). The loop does not know a trace: a recorder is a
reader of steps, and copies what its `Detail` names. Each line is one JSON object; its field `line` names the record.

The file has whole lines only: a line is one write, and a line that a full disk cut off is removed. An error while writing ends
the trace with one warning. It never ends a request.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import abc
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from outrider._version import __version__
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsDistribution, LogitsWarper, SequenceState, largest
from outrider.core.tree import levels
from outrider.core.types import Array, Draft, Step
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.method import NONE
from outrider.drafters.planned import PlannedDrafter
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request, Sequence
from outrider.kernels import cpu as native
from outrider.kernels.machine import machine
from outrider.models.load import Loaded

FORMAT: Literal[2] = 2  # increased when a field changes its name or meaning
TOP_TOKENS = 5  # tokens of a distribution that `Detail.PROBS` writes

# sampling parameters that a request's line has in another form, or lacks
_ELSEWHERE = ("seed", "prediction", "bad_words")
_DEFAULTS = SamplingParams()

Id = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
TopProbs = list[tuple[Id, float]]  # the most likely tokens and their probabilities, most likely first


def top(probs: Array) -> TopProbs:
    """The most likely tokens of a distribution [vocab], without tokens of probability 0."""
    [tokens], [best] = largest(probs[None], min(TOP_TOKENS, len(probs)))
    return [(t, p) for t, p in zip(tokens.tolist(), best.tolist(), strict=True) if not p <= 0]


class PhaseSeconds(TypedDict):
    """Seconds of each of `PHASES`."""

    draft: float
    target: float
    verify: float
    commit: float


class BudgetLimits(TypedDict):
    """What a draft may have, at most. Without nodes they are depth times width."""

    depth: Count
    width: Count
    nodes: NotRequired[Count | None]


class Detail(Enum):
    """How much of a run a trace holds. Token ids are text: a trace with tokens shows the prompts."""

    COUNTS = "counts"  # numbers of draft and accepted tokens, and times; no tokens and no text
    TOKENS = "tokens"  # also prompts, drafts and decisions as token ids, enough to compute each step again
    PROBS = "probs"  # also the most likely tokens of the target's and the draft's distribution at each node


class TraceLine(BaseModel):
    """One line. Unknown fields are an error. The fields have the names of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings", defer_build=True)

    def json_line(self) -> bytes:
        """The line as it is in the file, with its line break."""
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


class RunRecord(TraceLine):
    """The first line: the version that wrote the trace, and how the run was configured."""

    line: Literal["header"] = "header"
    kind: Literal["outrider-trace"] = "outrider-trace"
    format: Literal[2] = FORMAT
    outrider: str  # its version
    date: str  # ISO 8601, UTC
    detail: Detail
    model: str
    dtype: str  # precision of the weights: float32, bfloat16, float16, int8, int4
    kv_cache_dtype: str | None = None  # precision of keys and values: bfloat16, int8; None: as they are computed
    device: str
    vocab_size: Count
    max_length: Count  # tokens of prompt and output
    batch_invariant: bool  # True: a replay has the same bits, because logits do not depend on the other rows
    end_ids: list[Id]
    method: str  # how it drafts; none is plain decoding
    drafters: list[str] = []  # that may be asked, by name; a request can choose others than the method
    verifier: str
    guarantee: str
    speculative_config: dict[str, Any] = {}  # values other than the defaults
    machine: dict[str, str]  # processor, cores, versions


class RequestRecord(TraceLine):
    """A request at its start. With `Detail.COUNTS` there is no prompt, and `params` has numbers only."""

    line: Literal["request"] = "request"
    request: Id
    prompt_tokens: Count
    seed: int
    params: dict[str, Any]  # `SamplingParams` other than the defaults
    prompt: list[Id] | None = None
    bad_words: list[list[Id]] | None = None
    continued: Count = 0  # how many tokens of the prompt are text already, written by an earlier run
    grammar: bool = False  # whether a grammar constrained the request; the trace does not hold it


class StepRecord(TraceLine):
    """One request in one draft-verify round. Requests of the same round share `round` and `seconds`.

    docs/guides/trace.md describes the fields of all lines in one table.
    """

    line: Literal["step"] = "step"
    request: Id
    round: Count  # of the run
    step: Count  # of the request; the noise is keyed by it
    position: Count  # committed tokens before
    drafted: Count  # draft tokens
    depth: Count  # levels of the draft
    accepted: Count  # draft tokens that became text
    refused: Count  # children of the last accepted node; the verifier rejected all of them
    committed: Count  # new tokens of the text
    rows: Count  # requests in the round
    seconds: PhaseSeconds  # of the whole round
    # with Detail.TOKENS and Detail.PROBS
    tokens: list[Id] | None = None  # of the draft; node 0 is the last committed token
    parents: list[int] | None = None
    siblings: str | None = None
    path: list[Id] | None = None  # accepted nodes from the root down, also those after the end of the text
    token: int | None = None  # drawn at the last accepted node; -1 where no token was possible
    budget: BudgetLimits | None = None  # the most that the draft could have
    note: str | None = None  # the drafter's explanation of its draft
    # with Detail.PROBS
    target_probs: list[TopProbs] | None = None  # after each node
    # of the distribution that the children of each node were drawn from
    draft_probs: list[TopProbs] | None = None
    # that each node is accepted, by the drafter's own estimate
    confidence: list[float] | None = None


class EndRecord(TraceLine):
    """The end of a request. Times in seconds since it arrived."""

    line: Literal["end"] = "end"
    request: Id
    finish: str  # stop | length | error | abort
    output_tokens: Count
    steps: Count
    first: float | None = None  # to the first token
    seconds: float | None = None  # to the last


class Recorder:
    """Writes a trace file. problem: why the trace ended early, or None.

    Give it to `LLM(..., trace=...)`, or call it in your own loop:

        with Recorder("run.jsonl", Detail.COUNTS) as trace:
            trace.begin(describe(...))
            for step, sequences in scheduler.run(scheduler.add(requests)):
                if step is not None:
                    trace.keep(step, sequences)
    """

    def __init__(self, path: str | os.PathLike[str], detail: Detail | str = Detail.TOKENS) -> None:
        """path: an existing file is overwritten. detail: how much is written; see `Detail`.

        Raises ValueError for an unknown detail, and OSError if the file cannot be opened.
        """
        try:
            self.detail = Detail(detail)
        except ValueError:
            names = ", ".join(d.value for d in Detail)
            raise ValueError(f"a trace's detail is one of {names}, got {detail!r}") from None
        self.path, self.problem = Path(path), None
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._whole, self._round = 0, 0
        self._due: dict[int, int] = {}  # by request: the position its next step begins at
        self._lock = threading.Lock()

    def begin(self, header: RunRecord) -> None:
        """Write the first line, which `describe` makes; `detail` is the recorder's own. Raises ValueError the second time."""
        if self._whole:
            raise ValueError(f"{self.path} already has a run, and a file has one run; give each run its own Recorder")
        self._write([header.model_copy(update={"detail": self.detail})])

    def keep(self, step: Step, sequences: abc.Sequence[Sequence]) -> None:
        """Write a step of these sequences. It copies what it needs: the step's tensors may change later."""
        if self._file is None:
            return
        try:
            lines = list[TraceLine]()
            for b, sequence in enumerate(sequences):
                at = step.positions[b]
                if sequence.id not in self._due and at == len(sequence.prompt) + len(sequence.request.continued):
                    self._due[sequence.id] = at
                    lines.append(request_record(sequence.request, self.detail is not Detail.COUNTS))
                # Another place: the request started before the trace, or moved without this recorder.
                if self._due.get(sequence.id) != at:
                    if sequence.id in self._due:
                        lines.append(self._end(sequence, "abort"))
                    continue
                lines.append(self._step(step, b, sequence))
                self._due[sequence.id] = at + len(step.commits[b].tokens)
                if sequence.finish is not None:
                    lines.append(self._end(sequence, sequence.finish.finish))
            self._round += 1
        except Exception as error:  # an error in a trace must not end a request
            self._fail(f"a step could not be written: {error!r}")
        else:
            self._write(lines)

    def end(self, sequence: Sequence, finish: str) -> None:
        """Write the end of a request that did not end in a step: cancelled, late or failed. The second time does nothing."""
        if sequence.id in self._due:
            self._write([self._end(sequence, finish)])

    def close(self) -> None:
        """Close the file. The second time does nothing."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- lines ------------------------------------------------------------------------------------------------------

    def _step(self, step: Step, b: int, sequence: Sequence) -> TraceLine:
        commit, draft, (path, token) = step.commits[b], step.draft, step.verdict.host[b]
        parents, nodes = [parent for _, parent in draft.host[b]], len(draft.host[b])
        counts: dict[str, Any] = {
            "request": sequence.id,
            "round": self._round,
            "step": sequence.steps - 1,
            "position": step.positions[b],
            "drafted": nodes - 1,
            "depth": max(levels(parents)),
            "accepted": commit.num_accepted,
            "refused": parents.count(path[-1]),
            "committed": len(commit.tokens),
            "rows": len(step.slots),
            "seconds": step.seconds,
        }
        if self.detail is Detail.COUNTS:
            return StepRecord(**counts)
        more: dict[str, Any] = {
            "tokens": [token for token, _ in draft.host[b]],
            "parents": parents,
            "siblings": draft.siblings.name,
            "path": path,
            "token": token,
            "budget": dict(zip(BudgetLimits.__annotations__, step.budgets[b].parts, strict=True)),
            # a note is any object, and str words it
            "note": str(draft.notes[b]) if draft.notes and draft.notes[b] is not None else None,
        }
        if self.detail is Detail.PROBS:
            more |= self._probs(step, b, sequence, nodes)
        return StepRecord(**counts, **more)

    def _probs(self, step: Step, b: int, sequence: Sequence, nodes: int) -> dict[str, Any]:
        draft, out = step.draft, dict[str, Any]()
        if draft.confidence is not None:
            out["confidence"] = draft.confidence[b, :nodes].tolist()
        if draft.probs is not None:
            out["draft_probs"] = [top(probs) for probs in draft.probs[b, :nodes]]
        if step.logits is not None:
            target = target_distribution(step, b, sequence)
            out["target_probs"] = [top(target.probs(np.array([node]))[0]) for node in range(nodes)]
        return out

    def _end(self, sequence: Sequence, finish: str) -> TraceLine:
        self._due.pop(sequence.id, None)
        return EndRecord(
            request=sequence.id,
            finish=finish,
            output_tokens=len(sequence.written),
            steps=len(sequence.counts.drafted),
            first=sequence.clock.time_to_first_token,
            seconds=None if sequence.clock.done is None else sequence.clock.total,
        )

    # -- the file ---------------------------------------------------------------------------------------------------

    def _write(self, lines: abc.Sequence[TraceLine]) -> None:
        data = b"".join(line.json_line() for line in lines)
        with self._lock:
            if self._file is None:
                return
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
                self._whole += len(data)
            except OSError as error:
                with suppress(OSError):  # a pipe cannot be cut
                    os.ftruncate(self._file, self._whole)
                os.close(self._file)
                self._file = None
                problem = error.strerror or str(error)
            else:
                return
        self._fail(problem)

    def _fail(self, why: str) -> None:
        self.close()
        self.problem = why
        warnings.warn(
            f"the trace {self.path} ends here ({why}); the texts are not affected", RuntimeWarning, stacklevel=4
        )


def describe(loaded: Loaded, config: SpeculativeConfig, decoder: Decoder) -> RunRecord:
    """The first line of a trace: the model, the configuration and the loop that runs them."""
    texts = {"prediction", "corpus", "draft_vocab_corpus"}  # may be private, and a replay does not need them
    drafter, drafters = decoder.drafter, list(decoder.drafter.inner())
    other = drafter.default if isinstance(drafter, PlannedDrafter) else type(drafter).__name__
    chosen = config.model_dump(mode="json", exclude_defaults=True, exclude=texts, fallback=lambda x: type(x).__name__)
    threads = native.num_threads() if native.available() else "all"
    return RunRecord(
        outrider=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        detail=Detail.TOKENS,
        model=loaded.name,
        dtype=loaded.weights,
        kv_cache_dtype=None if decoder.cache.dtype == "auto" else decoder.cache.dtype,
        device=str(decoder.target.device),
        vocab_size=decoder.target.vocab_size,
        max_length=decoder.max_length,
        batch_invariant=decoder.target.batch_invariant,
        end_ids=list(decoder.end_ids),
        method="+".join(config.methods) if config.enabled else NONE if decoder.plain else other,
        drafters=drafters,
        verifier=decoder.verifier.name,
        guarantee=decoder.guarantee.value,
        speculative_config=chosen,
        machine={name: str(fact) for name, fact in (machine() | {"threads": threads}).items()},
    )


def request_record(asked: Request, tokens: bool) -> RequestRecord:
    """What is asked. tokens: whether the record has tokens and strings, or numbers only."""
    return RequestRecord(
        request=asked.id,
        prompt_tokens=len(asked.prompt) + len(asked.continued),
        continued=len(asked.continued),
        seed=asked.seed,
        params=_params(asked.params, tokens),
        prompt=[*asked.prompt, *asked.continued] if tokens else None,
        bad_words=[list(w) for w in asked.bad_words] if tokens and asked.bad_words else None,
        grammar=asked.mask is not None,
    )


def target_distribution(step: Step, b: int, sequence: Sequence) -> LogitsDistribution:
    """The target's distribution at the nodes of a row's draft, after all sampling parameters. b: the row's place in the step."""
    assert step.logits is not None
    old = sequence.state  # as it stood before the step
    tokens = old.tokens[: step.positions[b]]
    before = SequenceState(old.params, old.end_ids, old.bad_words, tokens, old.prompt_length, old.mask)
    draft = Draft(step.draft.tokens[b : b + 1], step.draft.parents[b : b + 1])
    return LogitsDistribution(step.logits[b : b + 1], draft, LogitsWarper([before]))


def _params(params: SamplingParams, tokens: bool) -> dict[str, Any]:
    """Parameters other than the defaults; numbers only if `tokens` is False."""
    out = dict[str, Any]()
    for name in sorted(f.name for f in fields(params) if f.init and f.name not in _ELSEWHERE):
        value: Any = getattr(params, name)
        if value == getattr(_DEFAULTS, name) or not (tokens or type(value) in (bool, int, float)):
            continue
        if name == "logit_bias":
            value = {int(t): float(bias) for t, bias in value.items()}
        out[name] = [int(t) for t in value] if name in ("stop_token_ids", "allowed_token_ids") and value else value
    return out
