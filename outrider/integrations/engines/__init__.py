"""A setting in the terms of vLLM, SGLang, llama.cpp and TensorRT-LLM, and what of it these engines cannot do.

One module an engine. `outrider export` and `outrider tune` both take their commands from `exports`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.suggest import did_you_mean
from outrider.drafters.config import SpeculativeConfig
from outrider.integrations.engines.llama_cpp import LlamaCpp
from outrider.integrations.engines.setting import EngineCommand, ExportedSetting, ForeignEngine
from outrider.integrations.engines.sglang import SGLang
from outrider.integrations.engines.trt_llm import TensorRTLLM
from outrider.integrations.engines.vllm import VLLM

__all__ = ["ENGINES", "EngineCommand", "ExportedSetting", "exports", "named"]

ENGINES: dict[str, ForeignEngine] = {engine.name: engine for engine in (VLLM(), SGLang(), LlamaCpp(), TensorRTLLM())}
"""By the name on the command line."""


def exports(
    config: dict[str, Any] | SpeculativeConfig,
    lengths: Mapping[int, int] | None = None,
    *,
    model: str | None = None,
    engines: list[str] | None = None,
    other_tokens: bool = False,
    folder: str | None = None,
) -> list[EngineCommand]:
    """The same setting for other engines.

    lengths: the best number of draft tokens by batch size; 0 means no draft tokens. model: the target; without it, commands
    say MODEL. engines: names of `ENGINES`; without it, all. other_tokens: the draft model has other tokens than the target.
    folder: where the files will be.

    Raises ValueError for a wrong configuration, an unknown engine, and lengths that are no batch sizes.
    """
    setting = ExportedSetting(SpeculativeConfig.of(config), dict(lengths or {}), model, other_tokens, folder)
    return [named(name).export(setting) for name in (list(ENGINES) if engines is None else engines)]


def named(engine: str) -> ForeignEngine:
    """The engine of a name. Raises ValueError if it is unknown."""
    if engine not in ENGINES:
        raise ValueError(
            f"there is no export to {engine!r}{did_you_mean(engine, ENGINES)}; there are {', '.join(ENGINES)}"
        )
    return ENGINES[engine]
