"""Reads fingerprints, and writes their texts again."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from outrider.core.params import SamplingParams
from outrider.core.suggest import faults
from outrider.engine.fingerprint import Fingerprint, settings_of
from outrider.engine.llm import LLM
from outrider_lab.traces import sampling

_WORDS = {
    "sha256": "content of the model's files (sha256)",
    "dtype": "precision of the weights",
    "kv_cache_dtype": "keys and values",
    "max_length": "max_model_len",
    "end_ids": "end tokens",
    "path": "path of a forward",
    "arithmetic": "version of the arithmetic",
}


class _FingerprintedChoice(BaseModel):
    fingerprint: Fingerprint


class _FingerprintedAnswer(BaseModel):
    choices: list[_FingerprintedChoice] = Field(min_length=1)


def read_fingerprint(file: str | os.PathLike[str]) -> Fingerprint:
    """Read a file that `Fingerprint.write` made, or an answer of the server with a fingerprint: the one of its first choice.

    Raises OSError, and ValueError for another file and for a changed one.
    """
    raw = Path(file).read_bytes()
    try:
        if b'"choices"' in raw:
            recorded = _FingerprintedAnswer.model_validate_json(raw).choices[0].fingerprint
        else:
            recorded = Fingerprint.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(
            f"{file} is no fingerprint that this outrider reads ({faults(error)[0]}); write one with: outrider generate "
            'PROMPT --fingerprint FILE, or ask the server with "return_fingerprint": true'
        ) from None
    if (now := recorded.sealed().digest) != recorded.digest:
        raise ValueError(f"{file} was changed after it was written: its digest is {now}, and it says {recorded.digest}")
    return recorded


def rewrite(recorded: Fingerprint, llm: LLM) -> tuple[list[int], int | None]:
    """Write the text again. Returns its tokens, and where the two texts differ first; None if they are equal.

    llm: with the model and the settings of the fingerprint. Its method does not matter. Raises ValueError that names each
    difference of content, precision, settings and arithmetic.
    """
    if differs := differences(recorded, llm):
        raise ValueError("the text cannot be compared; " + "; ".join(differs))
    prompt = {"prompt_token_ids": recorded.request.prompt}
    text = llm.generate(prompt, params_of(recorded))[0].outputs[0]
    pairs = zip([*recorded.tokens, recorded.finish], [*text.token_ids, text.finish_reason], strict=False)
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    return text.token_ids, at


def params_of(recorded: Fingerprint) -> SamplingParams:
    """The sampling parameters, with the seed and the bad words as token ids."""
    request = recorded.request
    return sampling(request).with_(seed=request.seed, bad_words=request.bad_words or ())


def differences(recorded: Fingerprint, llm: LLM) -> list[str]:
    """What is not as recorded: content, precision, settings and arithmetic, in words. Empty if the text can be compared."""
    here = settings_of(llm.runtime)
    return [
        f"{words}: recorded {getattr(recorded, name)}, here {here[name]}"
        for name, words in _WORDS.items()
        if getattr(recorded, name) != here[name]
    ]
