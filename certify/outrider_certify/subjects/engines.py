"""What is known of each engine's server: how it is recognised, what it tells, and how its speculation is switched off.

Only ways that a client can use are here. A server is not believed: a switch counts if no draft token is seen with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Told = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class EngineWays:
    """One engine.

    off: fields of a request that turn speculation off. without: how to have plain decoding where there are none. numbers: where
    the target's probabilities come from. ids: how it tells token ids. seeds: what a seed means.
    """

    name: str
    without: str
    numbers: str
    ids: str
    seeds: str
    off: dict[str, Any] = field(default_factory=dict)


OUTRIDER = EngineWays(
    "outrider",
    without="its own field",
    numbers="prompt_logprobs",
    ids="return_token_ids",
    seeds="the same text in every batch",
    off={"disable_spec_decode": True},
)
VLLM = EngineWays(
    "vLLM",
    without="start it a second time without --speculative-config",
    numbers="prompt_logprobs of temperature 1",
    ids="return_token_ids, since 0.10.2",
    seeds="of a request: the same draws, but the numbers depend on the batch",
)
SGLANG = EngineWays(
    "SGLang",
    without="start it a second time without --speculative-algorithm",
    numbers="not in OpenAI's routes: name a model with its weights, --reference MODEL",
    ids="not in OpenAI's routes: texts are compared",
    seeds="of a request: kept with --enable-deterministic-inference only",
)
LLAMA = EngineWays(
    "llama.cpp",
    without="start it a second time without a draft model",
    numbers="/completion tells the likeliest tokens",
    ids="with the log-probabilities",
    seeds="of a request: another text if the batch rounds otherwise",
)
TENSORRT = EngineWays(
    "TensorRT-LLM",
    without="start it a second time without speculative_config",
    numbers="not in OpenAI's routes: name a model with its weights, --reference MODEL",
    ids="not in OpenAI's routes: texts are compared",
    seeds="of a request",
)
LM_STUDIO = EngineWays(
    "LM Studio",
    without="its requests name a draft_model: leave it out on the plain side, and put it into the other with --on-body",
    numbers="none: name a model with its weights, --reference MODEL",
    ids="none: texts are compared",
    seeds="of a request",
)
OLLAMA = EngineWays(
    "Ollama",
    without="it runs a model as its Modelfile says: make a second model without a draft",
    numbers="none: name a model with its weights, --reference MODEL",
    ids="none in OpenAI's routes: texts are compared",
    seeds="of a request",
)
UNKNOWN = EngineWays("unknown", without="", numbers="", ids="", seeds="")
_BY_OWNER = {
    "outrider": OUTRIDER,
    "vllm": VLLM,
    "sglang": SGLANG,
    "tensorrt_llm": TENSORRT,
    "organization_owner": LM_STUDIO,
    "llamacpp": LLAMA,
}
"""What a server's list of models says under `owned_by`."""


def recognised(told: Told) -> EngineWays:
    """The engine behind an address. told: what the server says at a path, empty if it says nothing."""
    if "default_generation_settings" in told("/props"):
        return LLAMA
    [listed, *_] = told("/v1/models").get("data") or [{}]
    owner = str(listed.get("owned_by", "")) if isinstance(listed, dict) else ""
    if owner in _BY_OWNER:
        return _BY_OWNER[owner]
    return OLLAMA if "version" in told("/api/version") and "models" in told("/api/tags") else UNKNOWN
