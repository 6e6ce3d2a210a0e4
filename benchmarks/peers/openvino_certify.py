"""OpenVINO GenAI as a subject of outrider-certify, with prompt lookup, beside the same pipeline without.

    OPENVINO_MODEL=model.gguf outrider-certify benchmarks.peers.openvino_certify:OpenVino

Runs in a Python of its own that has both packages (pip install openvino-genai ./certify): it imports nothing of outrider.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]

from outrider_certify.prompts import read_prompts
from outrider_certify.subject import (
    GeneratedText,
    SpeculationVariant,
    Subject,
    TextRequest,
    Unsupported,
    failed,
)

GUESSES, NGRAM = 5, 3
# By default it rounds activations and the cache to 8 bits, and a text that is read gives other numbers than one that is written.
PRECISION = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
_FIELDS = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")  # of the same names


class OpenVino(Subject):
    """Its numbers depend on the rows of a forward pass, and no way is known to ask for them."""

    def __init__(self) -> None:
        super().__init__()
        model = os.environ["OPENVINO_MODEL"]
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1, **PRECISION}
        self.plainly = genai.LLMPipeline(model, "CPU", scheduler_config=genai.SchedulerConfig(), **options)
        self.speculating = genai.LLMPipeline(model, "CPU", **options, prompt_lookup=True)
        self.tokenizer = self.plainly.get_tokenizer()
        self.end_ids = (int(self.tokenizer.get_eos_token_id()),)
        self.name = f"OpenVINO GenAI {genai.__version__}, {os.path.basename(model)}, prompt lookup"
        self.versions = {"openvino-genai": genai.__version__}
        self._prompts = [tuple(self.encode(text, prompt=True)) for text in read_prompts("code", 6)]

    def prompts(self) -> Sequence[tuple[int, ...]]:
        return self._prompts

    def encode(self, text: str, *, prompt: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=prompt).input_ids.data[0].tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))

    def show(self, tokens: Sequence[int]) -> str:
        return repr(self.decode(tokens))[1:-1]

    def generate(self, requests: Sequence[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        return [self._one(self.speculating, request) for request in requests]

    def plain(self, requests: Sequence[TextRequest]) -> list[GeneratedText]:
        return [self._one(self.plainly, request) for request in requests]

    def _one(self, pipe: Any, request: TextRequest) -> GeneratedText:
        p, config = request.params, genai.GenerationConfig()
        if p.logprobs is not None or p.n > 1 or p.logit_bias or p.bad_words or p.allowed_token_ids is not None:
            raise Unsupported("OpenVINO GenAI has no such parameter, or not together with speculation")
        for name in _FIELDS:
            setattr(config, name, getattr(p, name))
        config.temperature, config.top_k = p.temperature or 1.0, p.top_k or 2**31
        config.do_sample, config.rng_seed = p.temperature > 0, (p.seed or 0) % 2**31
        config.max_new_tokens, config.min_new_tokens = p.max_tokens, p.min_tokens
        config.ignore_eos, config.stop_strings = p.ignore_eos, set(p.stop)
        config.stop_token_ids = {*p.stop_token_ids, *(() if p.ignore_eos else self.end_ids)}
        if pipe is self.speculating:
            config.num_assistant_tokens, config.max_ngram_size = GUESSES, NGRAM
        ids = np.array([request.prompt_ids], np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        try:
            tokens = [int(t) for t in pipe.generate(inputs, config).tokens[0]]
        except Exception as error:  # whatever it fails with is a finding
            return failed(error)
        ended = len(tokens) < p.max_tokens or (bool(tokens) and tokens[-1] in config.stop_token_ids)
        text = self.decode(tokens)
        return GeneratedText(tokens, text, list(request.prompt_ids), "stop" if ended else "length", usage=len(tokens))
