"""Recorded texts, as production keeps them: a JSON line each, with the parameters they were written with."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider_certify.subject import GeneratedText, SamplingParams, Subject, TextRequest, Unsupported

EXAMPLE = '{"prompt": "def area(r):", "text": "\\n    return", "temperature": 0.8}'
_PARAMS = {f.name for f in fields(SamplingParams)} - {"logprobs", "n"}


def read_texts(path: Path, subject: Subject) -> list[tuple[TextRequest, GeneratedText]]:
    """The texts of a file. Token ids count more than texts: a text may be encoded otherwise than it was written.

    A line has `prompt` or `prompt_token_ids`, `text` or `token_ids`, and sampling parameters by their names. subject: encodes
    texts. Raises ValueError with file, line and reason.
    """
    texts = list[tuple[TextRequest, GeneratedText]]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            texts.append(_text(json.loads(line), subject))
        except (ValueError, TypeError, KeyError, Unsupported) as error:
            why = error
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ValueError(f"{path}, line {number}: {why}; a correct line is {EXAMPLE}") from None
    if not texts:
        raise ValueError(f"{path} holds no texts; a correct line is {EXAMPLE}")
    return texts


def _text(given: Any, subject: Subject) -> tuple[TextRequest, GeneratedText]:
    if not isinstance(given, dict):
        raise ValueError("a line must be an object")
    prompt, tokens = given.get("prompt_token_ids"), given.get("token_ids")
    prompt = subject.encode(given["prompt"], prompt=True) if prompt is None else [int(t) for t in prompt]
    tokens = subject.encode(given["text"], prompt=False) if tokens is None else [int(t) for t in tokens]
    stop = given.get("stop")
    given = {**given, "stop": [stop]} if isinstance(stop, str) else given
    params = SamplingParams(**{k: v for k, v in given.items() if k in _PARAMS and v is not None})
    if params.temperature == 0:
        raise ValueError("a greedy text has no distribution to audit; leave it out")
    return TextRequest(tuple(prompt), params), GeneratedText(tokens=tokens, prompt=prompt, text=given.get("text", ""))
