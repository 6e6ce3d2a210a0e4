"""A configuration in the terms of vLLM, SGLang and llama.cpp, and what of it these engines cannot do.

Each row of `outrider.drafters.registry` says how the three run its method (`EngineExport`). This module adds what does not
depend on the method: the draft length, the verifier, trees and schedules. Names are those of vLLM
(`vllm/config/speculative.py`), SGLang (`docs/advanced_features`, `adaptive_spec_params.py`) and llama.cpp's server (`--help`)
in autumn 2026.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.config import SpeculativeConfig
from outrider.drafters.registry import EngineExport, find

LARGEST_BATCH = 4096
"""The last batch size of a schedule."""


@dataclass(frozen=True)
class EngineCommand:
    """command: what to add to the engine's command line; "" if it cannot run this method. notes: what differs there."""

    engine: str
    command: str
    notes: tuple[str, ...] = ()


def exports(config: dict[str, Any], lengths: Mapping[int, int] | None = None) -> list[EngineCommand]:
    """The same configuration for other engines.

    lengths: the best number of draft tokens by batch size; 0 means no draft tokens.
    """
    speculation = SpeculativeConfig.of(config)
    lengths = dict(lengths or {})
    if not speculation.enabled:
        return [
            EngineCommand("vLLM", "", ("plain decoding: leave out --speculative-config",)),
            EngineCommand("SGLang", "", ("plain decoding: leave out --speculative-algorithm",)),
            EngineCommand("llama.cpp", "--spec-type none"),
        ]
    if len(speculation.methods) == 1:
        method = find(speculation.methods[0])
        found = {"vLLM": method.vllm, "SGLang": method.sglang, "llama.cpp": method.llama_cpp}
    else:
        found = dict.fromkeys(("vLLM", "SGLang", "llama.cpp"))
    write = {"vLLM": _vllm, "SGLang": _sglang, "llama.cpp": _llama_cpp}
    missing = f"{'+'.join(speculation.methods)}: this engine has no such method"
    return [
        EngineCommand(engine, "", (missing,)) if row is None else write[engine](speculation, row, lengths)
        for engine, row in found.items()
    ]


def _vllm(config: SpeculativeConfig, row: EngineExport, lengths: dict[int, int]) -> EngineCommand:
    depth = config.budget.depth
    out: dict[str, Any] = {"method": config.method, "num_speculative_tokens": depth, **row.flags(config)}
    notes = [*row.notes(config)]
    if config.verifier == "block":
        out["rejection_sample_method"] = "block"
    notes += _verifier_notes(config, "rejection", "block")
    notes += _tree_notes(config)
    schedule = _ranges(lengths)
    if any(length != depth for _, _, length in schedule):
        out["num_speculative_tokens"] = max(1, *(length for _, _, length in schedule))
        out["num_speculative_tokens_per_batch_size"] = schedule
    if config.adaptive:
        notes.append("draft lengths that follow the text: there they follow the batch size only")
    return EngineCommand("vLLM", f"--speculative-config {shlex.quote(json.dumps(out))}", tuple(notes))


def _sglang(config: SpeculativeConfig, row: EngineExport, lengths: dict[int, int]) -> EngineCommand:
    notes = [*_verifier_notes(config, "rejection"), *row.notes(config)]
    if lengths and find(config.methods[0]).needs_model:
        slots = {str(r): {"candidate_steps": sorted({0, 1, k} if k < 2 else {1, k})} for r, k in lengths.items()}
        notes.append(
            "draft lengths that follow text and load: --speculative-adaptive is for EAGLE and EAGLE3 with topk 1 only. With "
            f"such a head of the same cost, --speculative-adaptive-config is a file with {json.dumps(slots)}"
        )
    return EngineCommand("SGLang", _command_line(config, row), tuple(notes))


def _llama_cpp(config: SpeculativeConfig, row: EngineExport, lengths: dict[int, int]) -> EngineCommand:
    notes = [*_verifier_notes(config), *row.notes(config), *_tree_notes(config)]
    if config.adaptive:
        notes.append(
            "draft lengths that follow the text: --spec-draft-n-max is fixed; --spec-draft-p-min stops at unlikely tokens"
        )
    return EngineCommand("llama.cpp", _command_line(config, row), tuple(notes))


def _command_line(config: SpeculativeConfig, row: EngineExport) -> str:
    return shlex.join(str(word) for flag in row.flags(config).items() for word in flag)


def _verifier_notes(config: SpeculativeConfig, *known: str) -> list[str]:
    """known: the verifiers that the engine has too."""
    if config.verifier in known:
        return []
    if config.verifier == "match":
        return ["match: above temperature 0, texts there have the same distribution, but other tokens"]
    return [f"the verifier {config.verifier}: it has its own"]


def _tree_notes(config: SpeculativeConfig) -> list[str]:
    return ["trees: it drafts chains, so this is a chain as deep"] if config.tree_width > 1 else []


def _ranges(lengths: dict[int, int]) -> list[list[int]]:
    """[first batch size, last batch size, length] for neighbouring batch sizes with the same length."""
    sizes = sorted(lengths)
    ends = [*(following - 1 for following in sizes[1:]), LARGEST_BATCH]
    runs = itertools.groupby(zip(sizes, ends, strict=False), key=lambda pair: lengths[pair[0]])
    out = []
    for length, pairs in runs:
        some = list(pairs)
        out.append([some[0][0], some[-1][1], length])
    return out
