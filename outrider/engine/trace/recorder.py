"""Writes a trace. A recorder reads steps and copies what its `Detail` names. Without a recorder there is no cost.

The file has whole lines only: a line is one write, and a line that a full disk cut off is removed. An error while
writing ends the trace with one warning. It never ends a request.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import abc
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider._version import __version__
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsDistribution, LogitsWarper, SequenceState
from outrider.core.tree import levels
from outrider.core.types import Draft, Step
from outrider.drafters.combine.planned import PlannedDrafter
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.method import NONE
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request, Sequence
from outrider.engine.trace.records import (
    BudgetLimits,
    Detail,
    EndRecord,
    RequestRecord,
    RunRecord,
    StepRecord,
    TraceLine,
    top,
)
from outrider.kernels.machine import machine
from outrider.models.load import Loaded

# sampling parameters that a request's line has in another form, or lacks
_ELSEWHERE = ("seed", "prediction", "bad_words")
_DEFAULTS = SamplingParams()


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
            read = [t.tolist() for t in (step.draft.tokens, step.draft.parents, step.verdict.path, step.verdict.token)]
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
                lines.append(self._step(step, b, sequence, *(rows_of[b] for rows_of in read)))
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

    def _step(
        self, step: Step, b: int, sequence: Sequence, tokens: list[int], parents: list[int], path: list[int], token: int
    ) -> TraceLine:
        commit, draft, nodes = step.commits[b], step.draft, sum(up >= -1 for up in parents)
        parents, path = parents[:nodes], [n for n in path if n >= 0]
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
            "tokens": tokens[:nodes],
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
            at = torch.arange(nodes, device=step.logits.device)[:, None]
            out["target_probs"] = [top(target.probs(node)[0]) for node in at]
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
        machine={name: str(fact) for name, fact in {**machine(), "threads": torch.get_num_threads()}.items()},
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
    return LogitsDistribution(step.logits[b : b + 1], draft, LogitsWarper([before], step.logits.device))


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
