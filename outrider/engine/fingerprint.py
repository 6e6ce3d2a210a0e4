"""A fingerprint of an answer: all that its tokens depend on, and the tokens. Any machine can write the text again, with
`outrider_lab.fingerprints`.

On the native path the bits are promised on every machine (docs/lossless.md). Elsewhere they are promised on one machine only.
A fingerprint has no drafter: under `match` a text does not depend on the draft tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from outrider.core.files import public_name, sha256, write_whole
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.core.types import Guarantee
from outrider.engine.llm import LLM
from outrider.engine.request import Request
from outrider.engine.runtime import Runtime
from outrider.engine.trace import Count, Id, RequestRecord, TraceLine, describe, request_record
from outrider.kernels import ARITHMETIC
from outrider.kernels.machine import machine
from outrider.models.files import weight_files

FORMAT: Literal[1] = 1  # increased when a field changes its meaning


class Fingerprint(TraceLine):
    """An answer that can be written again.

    dtype, kv_cache_dtype, max_length, end_ids and request are as in a trace.
    """

    kind: Literal["outrider-fingerprint"] = "outrider-fingerprint"
    format: Literal[1] = FORMAT
    arithmetic: Count  # outrider.kernels.ARITHMETIC
    model: str  # without folders
    sha256: str  # content of the model's files
    dtype: str
    kv_cache_dtype: str | None = None
    max_length: Count
    end_ids: list[Id]
    path: str  # "native" promises the bits on every machine (LanguageModel.path)
    machine: dict[str, str]
    request: RequestRecord
    tokens: list[Id]  # of the output
    finish: Literal["stop", "length"]
    digest: str = ""  # sha256 of all other fields

    def sealed(self) -> Fingerprint:
        """The same with the digest of its fields."""
        rest = self.model_copy(update={"digest": ""}).json_line()
        return self.model_copy(update={"digest": hashlib.sha256(rest).hexdigest()})

    def write(self, file: str | os.PathLike[str]) -> None:
        """Write it as one line of JSON. Token ids are text: the file shows the prompt and the answer."""
        write_whole(Path(file), self.json_line().decode())


def fingerprint(llm: LLM, output: RequestOutput, params: SamplingParams, index: int = 0) -> Fingerprint:
    """The fingerprint of an output of `llm.generate(prompt, params)`. index: which of its n texts.

    Reads the model's files once. Raises ValueError with the reason for a text that cannot be written again.
    """
    text = output.outputs[index]
    [request] = llm.requests(output.prompt_token_ids, params.with_(n=1, seed=text.seed))
    return Fingerprints(llm.runtime, llm.loaded.name).of(request, text.token_ids, text.finish_reason)


class Fingerprints:
    """Makes the fingerprints of a model's answers. Reads the model's files once.

    Raises ValueError with the reason if its texts cannot be written again.
    """

    def __init__(self, runtime: Runtime, name: str) -> None:
        """
        Args:
            runtime: It writes the texts.
            name: Of the model. Folders of this machine are cut off.
        """
        self._settings = settings_of(runtime)
        self._model = public_name(name)

    def of(self, request: Request, tokens: Sequence[int], finish: str | None) -> Fingerprint:
        """The fingerprint of a text. tokens: all of its output. Raises ValueError for a text that cannot be written again."""
        if request.mask is not None:
            raise ValueError("a fingerprint does not hold a grammar, so this text has none; ask without one")
        if finish not in ("stop", "length"):
            raise ValueError(f"the text was not written to its end ({finish}), so it has no fingerprint")
        params = request.params.with_(n=1, logprobs=None, prompt_logprobs=None)
        return Fingerprint(
            **self._settings,
            model=self._model,
            machine={name: str(fact) for name, fact in machine().items()},
            request=request_record(replace(request, id=0, params=params, continued=()), tokens=True),
            tokens=list(tokens),
            finish=finish,  # pyright: ignore[reportArgumentType]
        ).sealed()


def settings_of(runtime: Runtime) -> dict[str, Any]:
    """What the tokens depend on beside the request. Raises ValueError for a text that cannot be written again."""
    loaded, decoder = runtime.loaded, runtime.decoder
    if not decoder.plain and decoder.guarantee is not Guarantee.EXACT_TOKENS:
        name, about = decoder.verifier.name, "a text depends on the draft tokens, which a fingerprint does not have"
        why = f"with verifier {name!r} {about}; use verifier='match'"
        if decoder.verifier.guarantee is Guarantee.EXACT_TOKENS:
            why = f"the logits of {loaded.name} depend on the batch, so {about}; decode without drafts: method='none'"
        raise ValueError(f"this text has no fingerprint: {why}")
    source = loaded.source
    files = weight_files(str(source)) if isinstance(source, (str, Path)) else ()
    if not files:
        raise ValueError(
            f"{loaded.name} has no files here whose content a fingerprint could name; load it from its folder or GGUF file"
        )
    header = describe(loaded, runtime.config, decoder)
    taken = header.model_dump(include={"dtype", "kv_cache_dtype", "max_length", "end_ids"})
    return {**taken, "sha256": sha256(files), "path": loaded.model.path, "arithmetic": ARITHMETIC}
