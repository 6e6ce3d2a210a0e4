"""outrider: language models that generate faster and say the same. Speculative decoding, exact and proved.

>>> from outrider import LLM, SamplingParams
>>> llm = LLM("builtin:code", speculative_config={"model": "builtin:code-draft", "num_speculative_tokens": 5})
>>> llm.generate("def quicksort(xs):", SamplingParams(temperature=0, max_tokens=64))

Names are imported when they are first used, so that the kernel (`outrider.verify` and below) can be had without models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outrider._version import __version__

if TYPE_CHECKING:
    from outrider.core.outputs import CompletionOutput, Delta, RequestOutput, SpeculativeMetrics
    from outrider.core.params import SamplingParams
    from outrider.core.types import Guarantee
    from outrider.drafters.config import SpeculativeConfig
    from outrider.engine.llm import LLM
    from outrider.integrations.transformers import custom_generate

_HOME = {
    "LLM": "engine.llm",
    "CompletionOutput": "core.outputs",
    "Delta": "core.outputs",
    "Guarantee": "core.types",
    "RequestOutput": "core.outputs",
    "SamplingParams": "core.params",
    "SpeculativeConfig": "drafters.config",
    "SpeculativeMetrics": "core.outputs",
    "custom_generate": "integrations.transformers",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "Guarantee",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "SpeculativeMetrics",
    "__version__",
    "custom_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(importlib.import_module(f"outrider.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
