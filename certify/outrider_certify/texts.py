"""Recorded texts, as production keeps them: a JSON line each, with the parameters they were written with."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from outrider.core.params import SamplingParams
from outrider.engine.llm import LLM
from outrider_certify.subjects.base import Job, Writing

EXAMPLE = '{"prompt": "def area(r):", "text": "\\n    return", "temperature": 0.8}'
_PARAMS = {f.name for f in fields(SamplingParams) if f.init} - {"prediction", "prompt_logprobs", "logprobs", "n"}


def read_texts(path: Path, llm: LLM) -> list[tuple[Job, Writing]]:
    """The texts of a file. Token ids count more than texts: a text may be encoded otherwise than it was written.

    A line has `prompt` or `prompt_token_ids`, `text` or `token_ids`, and sampling parameters by their names. llm: encodes texts.
    Raises ValueError with file, line and reason.
    """
    found = list[tuple[Job, Writing]]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(_text(json.loads(line), llm))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error}; a correct line is {EXAMPLE}") from None
    if not found:
        raise ValueError(f"{path} holds no texts; a correct line is {EXAMPLE}")
    return found


def _text(given: Any, llm: LLM) -> tuple[Job, Writing]:
    if not isinstance(given, dict):
        raise ValueError("a line must be an object")
    prompt = given.get("prompt_token_ids") or llm.encode(given["prompt"])
    tokens = given.get("token_ids")
    if tokens is None:
        if llm.loaded.tokenizer is None:
            raise ValueError("a text without token ids needs a model with a tokenizer")
        tokens = llm.loaded.tokenizer(given["text"], add_special_tokens=False)["input_ids"]
    params = SamplingParams(**{k: v for k, v in given.items() if k in _PARAMS and v is not None})
    if params.temperature == 0:
        raise ValueError("a greedy text has no distribution to audit; leave it out")
    prompt, tokens = [int(t) for t in prompt], [int(t) for t in tokens]
    return Job(tuple(prompt), params), Writing(tokens=tokens, prompt=prompt, text=given.get("text", ""))
