"""Python functions and classes as subjects, named `module:name`: a verifier, a generate function, or a `Subject` of one's own."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.core.types import Guarantee
from outrider.lab.certify.exact import VerifierFunction
from outrider.verify import VERIFIERS
from outrider_certify.causes import warped
from outrider_certify.subjects.base import Job, Prompt, Row, Subject, Unsupported, Way, Writing, failed

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_PROMPTS: tuple[Prompt, ...] = ((1, 2), (2, 3, 1), (3,), (1, 1, 2), (2,), (3, 2))
EXAMPLE = (
    "a verifier is f(tokens, parents, target, drafter, choose); an engine is f(prompt, params, speculate), or a class derived "
    "from outrider_certify.subjects.base.Subject"
)


def is_python_name(name: str) -> bool:
    """Whether a subject's name is `module:name`."""
    return bool(_NAME.fullmatch(name)) and not name.startswith("builtin:")


def find(name: str) -> Subject | VerifierFunction:
    """The subject that `module:name` names. Modules of the current folder are found too. Raises ValueError."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name} cannot be imported ({error}); name a module and what is in it: my_engine:verify"
        ) from None
    if isinstance(found, Subject):
        return found
    if inspect.isclass(found) and issubclass(found, Subject):
        return found()
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}; {EXAMPLE}")
    names = list(inspect.signature(found).parameters)
    if len(names) >= 5 and names[:2] == ["tokens", "parents"]:
        own = next((v.trees for v in VERIFIERS.values() if v.reference is found), None)
        return VerifierFunction(found, name, trees=own)
    if not names:
        return _made(found, name)
    if {"prompt", "params", "speculate"} <= set(names):
        return FunctionSubject(found, name)
    raise ValueError(f"{name} takes ({', '.join(names)}); {EXAMPLE}")


def _made(factory: Callable[[], Any], name: str) -> Subject:
    made = factory()
    if not isinstance(made, Subject):
        raise ValueError(f"{name}() gives a {type(made).__name__}; {EXAMPLE}")
    return made


class FunctionSubject(Subject):
    """An engine in one function: `f(prompt, params, speculate)` gives token ids or a `Writing`.

    prompt: token ids. params: `SamplingParams` with a seed. Attributes of the function tell more, all optional: `logits(tokens)`,
    the target's scores of the next token; `exact_tokens`, whether sampled texts are promised too; `prompts`; `end_ids`.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name
        self.exact_numbers = True
        self.end_ids = tuple(getattr(function, "end_ids", ()))
        if getattr(function, "exact_tokens", False):
            self.promise = Guarantee.EXACT_TOKENS
        self.properties = {"function": name, "promise": self.promise.value}

    def prompts(self) -> Sequence[Prompt]:
        return [tuple(int(t) for t in p) for p in getattr(self.function, "prompts", _PROMPTS)]

    def write(self, jobs: Sequence[Job], way: Way) -> list[Writing]:
        return [self._one(job, True) for job in jobs]

    def plain(self, jobs: Sequence[Job]) -> list[Writing]:
        return [self._one(job, False) for job in jobs]

    def _one(self, job: Job, speculate: bool) -> Writing:
        if job.params.n > 1:
            raise Unsupported("a function writes one text")
        if job.params.stops:
            raise Unsupported("a function of token ids has no stop strings")
        try:
            found = self.function(prompt=list(job.prompt), params=job.params, speculate=speculate)
        except Unsupported:
            raise
        except Exception as error:  # whatever it fails with is a finding
            return failed(error)
        if isinstance(found, Writing):
            found.prompt = found.prompt or [int(t) for t in job.prompt]
            return found
        tokens = [int(t) for t in found]
        stopped = bool(tokens) and tokens[-1] in (
            *job.params.stop_token_ids,
            *(() if job.params.ignore_eos else self.end_ids),
        )
        return Writing(tokens=tokens, prompt=[int(t) for t in job.prompt], finish="stop" if stopped else "length")

    def rows(self, job: Job, writing: Writing) -> list[Row]:
        logits = getattr(self.function, "logits", None)
        if logits is None:
            raise Unsupported(
                f"{self.name} has no attribute `logits`: a function from token ids to the target's scores"
            )
        out = list[Row]()
        for at in range(len(writing.tokens)):
            text = [*writing.prompt, *writing.tokens[:at]]
            numbers = np.asarray(logits(text), dtype=np.float64)
            out.append(Row(warped(numbers, job.params, text, len(writing.prompt), self.end_ids), logits=numbers))
        return out

    def margin(self, job: Job, writing: Writing, at: int, other: int | None) -> float | None:
        return 1.0
