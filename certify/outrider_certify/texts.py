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

    A line has `prompt` or `prompt_token_ids`, `text` or `token_ids`, and sampling parameters by their names.

    Args:
        subject: Encodes texts.

    Raises ValueError with file, line and reason.
    """

    def parse(line: str) -> tuple[TextRequest, GeneratedText]:
        parsed = json.loads(line)
        prompt, tokens, stop = parsed.get("prompt_token_ids"), parsed.get("token_ids"), parsed.get("stop")
        prompt = subject.encode(parsed["prompt"], prompt=True) if prompt is None else prompt
        tokens = subject.encode(parsed["text"], prompt=False) if tokens is None else tokens
        parsed = {**parsed, "stop": [stop]} if isinstance(stop, str) else parsed
        params = SamplingParams(**{k: v for k, v in parsed.items() if k in _PARAMS and v is not None})
        if params.temperature == 0:
            raise ValueError("a greedy text has no distribution to audit; leave it out")
        prompt, tokens = [int(t) for t in prompt], [int(t) for t in tokens]
        return TextRequest(tuple(prompt), params), GeneratedText(tokens, parsed.get("text", ""), prompt)

    return read_lines(path, parse, EXAMPLE)
