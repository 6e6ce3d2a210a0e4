"""Python functions and classes as subjects, named `module:name`: a generate function, or a `Subject` of one's own."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider_certify.sampling import distributions_of
from outrider_certify.subject import (
    GeneratedText,
    Prompt,
    SpeculationVariant,
    Subject,
    TextRequest,
    TokenDistribution,
    Unsupported,
    failed,
)

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_PROMPTS: tuple[Prompt, ...] = ((1, 2), (2, 3, 1), (3,), (1, 1, 2), (2,), (3, 2))
EXAMPLE = "an engine is f(prompt, params, speculate), or a class derived from outrider_certify.Subject"


def is_python_name(name: str) -> bool:
    """Whether a subject's name is `module:name`."""
    return bool(_NAME.fullmatch(name)) and not name.startswith("builtin:")


def imported(name: str) -> Any:
    """What `module:name` names. Modules of the current folder are found too. Raises ValueError."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name} cannot be imported ({error}); name a module and what is in it: my_engine:generate"
        ) from None
    return target


def python_subject(target: Any, name: str, example: str = EXAMPLE) -> Subject:
    """A subject, its class, a function that makes one, or an engine in one function. Raises ValueError for anything else."""
    if isinstance(target, Subject):
        return target
    if not callable(target):
        raise ValueError(f"{name} is a {type(target).__name__}; {example}")
    names = list(inspect.signature(target).parameters)
    if {"prompt", "params", "speculate"} <= set(names):
        return FunctionSubject(target, name)
    if names:
        raise ValueError(f"{name} takes ({', '.join(names)}); {example}")
    subject = target()
    if not isinstance(subject, Subject):
        raise ValueError(f"{name}() gives a {type(subject).__name__}; {example}")
    return subject


class FunctionSubject(Subject):
    """An engine in one function: `f(prompt, params, speculate)` gives token ids or a `GeneratedText`.

    prompt: token ids. params: `SamplingParams` with a seed. Attributes of the function tell more, all optional: `logits(tokens)`,
    the target's scores of the next token; `exact_tokens`, whether sampled texts are promised too; `prompts`; `end_ids`.
    """

    exact_numbers = True

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name
        self.end_ids = tuple(getattr(function, "end_ids", ()))
        self.exact_tokens = bool(getattr(function, "exact_tokens", False))
        self.properties = {"function": name, "promise": "exact-tokens" if self.exact_tokens else "exact-distribution"}

    def prompts(self) -> Sequence[Prompt]:
        return [tuple(int(t) for t in p) for p in getattr(self.function, "prompts", _PROMPTS)]

    def generate(self, requests: Sequence[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        return [self._one(request, True) for request in requests]

    def plain(self, requests: Sequence[TextRequest]) -> list[GeneratedText]:
        return [self._one(request, False) for request in requests]

    def _one(self, request: TextRequest, speculate: bool) -> GeneratedText:
        params = request.params
        if params.n > 1:
            raise Unsupported("a function writes one text")
        if params.stop:
            raise Unsupported("a function of token ids has no stop strings")
        try:
            out = self.function(prompt=list(request.prompt), params=params, speculate=speculate)
        except Unsupported:
            raise
        except Exception as error:  # whatever it fails with is a finding
            return failed(error)
        prompt = [int(t) for t in request.prompt]
        if isinstance(out, GeneratedText):
            out.prompt = out.prompt or prompt
            return out
        tokens = [int(t) for t in out]
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self.end_ids))
        return GeneratedText(tokens, prompt=prompt, finish="stop" if tokens and tokens[-1] in ends else "length")

    def distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        logits = getattr(self.function, "logits", None)
        if logits is None:
            raise Unsupported(
                f"{self.name} has no attribute `logits`: a function from token ids to the target's scores"
            )
        tokens, start = [*text.prompt, *text.tokens], len(text.prompt)
        rows = [np.asarray(logits(tokens[:at]), dtype=np.float64) for at in range(start, len(tokens))]
        return distributions_of(rows, request, text, self.end_ids)
