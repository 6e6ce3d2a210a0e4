"""What is known of each engine's server: how it is recognised, and how its speculation is switched off.

Only ways that a client can use are here. A server is not believed: a switch counts if no draft token is seen with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Told = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class EngineWays:
    """One engine."""

    name: str
    without: str  # how to have plain decoding without a field that turns speculation off
    off: dict[str, Any] = field(default_factory=dict)  # fields of a request that turn speculation off


OUTRIDER = EngineWays(
    "outrider",
    without="its own field",
    off={"disable_spec_decode": True},
)
VLLM = EngineWays(
    "vLLM",
    without="start it a second time without --speculative-config",
)
SGLANG = EngineWays(
    "SGLang",
    without="start it a second time without --speculative-algorithm",
)
LLAMA = EngineWays(
    "llama.cpp",
    without="start it a second time without a draft model",
)
TENSORRT = EngineWays(
    "TensorRT-LLM",
    without="start it a second time without speculative_config",
)
LM_STUDIO = EngineWays(
    "LM Studio",
    without="its requests name a draft_model: leave it out on the plain side, and put it into the other with --on-body",
)
OLLAMA = EngineWays(
    "Ollama",
    without="it runs a model as its Modelfile says: make a second model without a draft",
)
UNKNOWN = EngineWays("unknown", without="")
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
    """The engine behind an address.

    Args:
        told: What the server says at a path, empty if it says nothing.
    """
    if "default_generation_settings" in told("/props"):
        return LLAMA
    [listed, *_] = told("/v1/models").get("data") or [{}]
    owner = str(listed.get("owned_by", "")) if isinstance(listed, dict) else ""
    if owner in _BY_OWNER:
        return _BY_OWNER[owner]
    return OLLAMA if "version" in told("/api/version") and "models" in told("/api/tags") else UNKNOWN
