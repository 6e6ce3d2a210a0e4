"""Writes a trace: a reader of steps that copies what its `Detail` names. Without one nothing is copied and nothing costs.

Every line is whole: lines leave in one write, and what a full disk cut off is taken back. Whatever goes wrong while
writing ends the trace, with one warning, and never the text.
"""

from __future__ import annotations

import os
import platform
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider._version import __version__
from outrider.config import SpeculativeConfig
from outrider.core.sampling import LogitsDistribution, LogitsWarper, SequenceState
from outrider.core.types import Draft, Step
from outrider.decode import Decoder, Row
from outrider.kernels import cpu as native
from outrider.models.load import Loaded
from outrider.params import SamplingParams
from outrider.trace import records
from outrider.trace.records import PHASES, TOP, Detail, Header, Law, Line

_NUMBERS = (  # of the sampling parameters, those that say nothing about a text
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "max_tokens", "ignore_eos", "n",
)  # fmt: skip
_DEFAULTS = SamplingParams()


class Recorder:
    """A trace file that is being written. problem: why it ended early, or None.

    Give it to `LLM(..., trace=...)`, or to a loop of your own:

        with Recorder("run.jsonl", Detail.COUNTS) as trace:
            trace.begin(describe(...))
            for step, rows in decoder.steps(requests):
                if step is not None:
                    trace.keep(step, rows)
    """

    def __init__(self, path: str | os.PathLike[str], detail: Detail | str = Detail.TOKENS) -> None:
        """path: is overwritten. detail: what is kept, see `Detail`. Raises ValueError for an unknown detail and OSError
        where the file cannot be opened."""
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

    def begin(self, header: Header) -> None:
        """The first line; `describe` makes it. The trace's own detail is what counts. Raises ValueError for a second one."""
        if self._whole:
            raise ValueError(f"{self.path} holds a run already; a second one needs a Recorder of its own")
        self._write([header.model_copy(update={"detail": self.detail})])

    def keep(self, step: Step, rows: Sequence[Row]) -> None:
        """A step and the rows it moved, in its order. Copies what is kept: the step's tensors may be reused after."""
        if self._file is None:
            return
        try:
            lines = list[Line]()
            read = [t.tolist() for t in (step.draft.tokens, step.draft.parents, step.verdict.path, step.verdict.token)]
            for b, row in enumerate(rows):
                at, asked = step.positions[b], row.request
                if asked.id not in self._due and at == len(asked.prompt):
                    self._due[asked.id] = at
                    lines.append(self._request(row))
                if self._due.get(asked.id) != at:  # it began before the trace did, or was moved without a step
                    if asked.id in self._due:
                        lines.append(self._end(row, "abort"))
                    continue
                lines.append(self._step(step, b, row, *(rows_of[b] for rows_of in read)))
                self._due[asked.id] = at + len(step.commits[b].tokens)
                if row.end is not None:
                    lines.append(self._end(row, row.end.finish))
            self._round += 1
        except Exception as error:  # a trace must not cost anybody a text
            self._fail(f"a step could not be written down: {error!r}")
        else:
            self._write(lines)

    def end(self, row: Row, finish: str) -> None:
        """A request that ended outside of a step: cancelled, late, failed. Nothing, if its end was written already."""
        if row.request.id in self._due:
            self._write([self._end(row, finish)])

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- lines ------------------------------------------------------------------------------------------------------

    def _request(self, row: Row) -> Line:
        asked, tokens = row.request, self.detail is not Detail.COUNTS
        return records.Request(
            request=asked.id,
            prompt_tokens=len(asked.prompt),
            seed=asked.seed,
            params=_params(asked.params, tokens),
            prompt=list(asked.prompt) if tokens else None,
            bad_words=[list(w) for w in asked.bad_words] if tokens and asked.bad_words else None,
            grammar=asked.mask is not None,
        )

    def _step(
        self, step: Step, b: int, row: Row, tokens: list[int], parents: list[int], path: list[int], token: int
    ) -> Line:
        kept, draft, nodes = step.commits[b], step.draft, sum(up >= -1 for up in parents)
        parents, path = parents[:nodes], [n for n in path if n >= 0]
        levels = [0] * nodes
        for n, up in enumerate(parents[1:], 1):
            levels[n] = levels[up] + 1
        counts: dict[str, Any] = {
            "request": row.request.id,
            "round": self._round,
            "step": row.steps - 1,
            "position": step.positions[b],
            "drafted": nodes - 1,
            "depth": max(levels),
            "accepted": kept.num_accepted,
            "refused": parents.count(path[-1]),
            "committed": len(kept.tokens),
            "rows": len(step.slots),
            "seconds": tuple(step.seconds[phase] for phase in PHASES),
        }
        if self.detail is Detail.COUNTS:
            return records.Step(**counts)
        told: dict[str, Any] = {
            "tokens": tokens[:nodes],
            "parents": parents,
            "siblings": draft.siblings.name,
            "path": path,
            "token": token,
            "budget": step.budgets[b].parts,
            "note": (draft.notes[b] if draft.notes else None) or None,
        }
        if self.detail is Detail.PROBS:
            told |= self._laws(step, b, row, nodes)
        return records.Step(**counts, **told)

    def _laws(self, step: Step, b: int, row: Row, nodes: int) -> dict[str, Any]:
        draft, out = step.draft, dict[str, Any]()
        if draft.confidence is not None:
            out["chances"] = draft.confidence[b, :nodes].tolist()
        if draft.probs is not None:
            out["draft_law"] = [top(law) for law in draft.probs[b, :nodes]]
        if step.logits is not None:
            old, at = row.history, step.positions[b]  # as it stood before the step
            before = SequenceState(old.params, old.end_ids, old.bad_words, old.tokens[:at], old.prompt_length, old.mask)
            own = Draft(draft.tokens[b : b + 1, :nodes], draft.parents[b : b + 1, :nodes])
            out["target_law"] = target_laws(
                LogitsDistribution(step.logits[b : b + 1], own, LogitsWarper([before], step.logits.device)), nodes
            )
        return out

    def _end(self, row: Row, finish: str) -> Line:
        self._due.pop(row.request.id, None)
        return records.End(
            request=row.request.id,
            finish=finish,
            output_tokens=len(row.output),
            steps=row.steps,
            first=None if row.first is None else row.first - row.arrived,
            seconds=None if row.done is None else row.done - row.arrived,
        )

    # -- the file ---------------------------------------------------------------------------------------------------

    def _write(self, lines: Sequence[Line]) -> None:
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
                with suppress(OSError):  # what is no file on a disk cannot be cut
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


def describe(loaded: Loaded, config: SpeculativeConfig, decoder: Decoder, detail: Detail = Detail.TOKENS) -> Header:
    """The header for a model, a configuration and the loop that runs them."""
    texts = {"prediction", "corpus"}  # may be somebody's, and no replay needs them
    chosen = config.model_dump(mode="json", exclude_defaults=True, exclude=texts, fallback=lambda x: type(x).__name__)
    return Header(
        outrider=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        detail=detail,
        model=loaded.name,
        dtype=loaded.weights,
        device=str(decoder.target.device),
        vocab_size=decoder.target.vocab_size,
        max_length=decoder.max_length,
        batch_invariant=decoder.target.batch_invariant,
        end_ids=list(decoder.end_ids),
        drafter=type(decoder.drafter).__name__,
        verifier=decoder.verifier.name,
        guarantee=decoder.guarantee.value,
        speculative_config=chosen,
        machine={
            "system": f"{platform.system()} {platform.machine()}",
            "cores": str(os.cpu_count()),
            "threads": str(torch.get_num_threads()),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "native": "yes" if native.available() else str(native.why()),
        },
    )


def target_laws(laws: LogitsDistribution, nodes: int) -> list[Law]:
    """The likeliest tokens after each of the nodes of a one-row draft, all sampling parameters applied."""
    return [top(laws.probs(torch.tensor([n], device=laws.logits.device))[0]) for n in range(nodes)]


def top(law: torch.Tensor) -> Law:
    """The likeliest tokens of a law [vocab], without those that have no mass."""
    best = law.topk(min(TOP, len(law)))
    return [(t, p) for t, p in zip(best.indices.tolist(), best.values.tolist(), strict=True) if not p <= 0]


def _params(params: SamplingParams, tokens: bool) -> dict[str, Any]:
    """What differs from the defaults; numbers only where tokens are not to be told. What was drawn with it is the seed's."""
    told = {f.name for f in fields(params) if f.init} - {"seed", "prediction", "bad_words"} if tokens else set(_NUMBERS)
    found = {name: getattr(params, name) for name in sorted(told)}
    if found.get("logit_bias"):
        found["logit_bias"] = {int(t): float(bias) for t, bias in found["logit_bias"].items()}
    for name in ("stop_token_ids", "allowed_token_ids"):
        if found.get(name):
            found[name] = [int(t) for t in found[name]]
    return {name: value for name, value in found.items() if value != getattr(_DEFAULTS, name)}
