"""Recorded texts, as production keeps them: a JSON line each, with the parameters they were written with."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from outrider_certify.lines import read_lines
from outrider_certify.subject import GeneratedText, SamplingParams, Subject, TextRequest

EXAMPLE = '{"prompt": "def area(r):", "text": "\\n    return", "temperature": 0.8}'
_PARAMS = {f.name for f in fields(SamplingParams)} - {"logprobs", "n"}


def read_texts(path: Path, subject: Subject) -> list[tuple[TextRequest, GeneratedText]]:
    """The texts of a file. Token ids count more than texts: a text may be encoded otherwise than it was written.

    A line has `prompt` or `prompt_token_ids`, `text` or `token_ids`, and sampling parameters by their names. subject: encodes
    texts. Raises ValueError with file, line and reason.
    """

    def parse(line: str) -> tuple[TextRequest, GeneratedText]:
        given = json.loads(line)
        prompt, tokens, stop = given.get("prompt_token_ids"), given.get("token_ids"), given.get("stop")
        prompt = subject.encode(given["prompt"], prompt=True) if prompt is None else prompt
        tokens = subject.encode(given["text"], prompt=False) if tokens is None else tokens
        given = {**given, "stop": [stop]} if isinstance(stop, str) else given
        params = SamplingParams(**{k: v for k, v in given.items() if k in _PARAMS and v is not None})
        if params.temperature == 0:
            raise ValueError("a greedy text has no distribution to audit; leave it out")
        prompt, tokens = [int(t) for t in prompt], [int(t) for t in tokens]
        return TextRequest(tuple(prompt), params), GeneratedText(tokens, given.get("text", ""), prompt)

    return read_lines(path, parse, EXAMPLE)
