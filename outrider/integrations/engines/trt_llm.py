"""The export to TensorRT-LLM. Names are those of its PyTorch backend in version 1.3 (`tensorrt_llm/llmapi/llm_args.py`).

No parser of TensorRT-LLM was at hand, so these settings are from its source and its documentation and were not run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.drafters.config import EngineExport
from outrider.integrations.engines.setting import (
    ExportedSetting,
    ForeignEngine,
    match_note,
    named_model,
    yaml_text,
)

FILE = "trt-llm.yaml"
# Methods whose documentation asks for it.
_NO_OVERLAP = ("Draft_Target", "NGram")
# Methods of the one-model path, which can sample draft tokens and reject them.
_ONE_MODEL = ("Draft_Target", "Eagle3", "DFlash")


METHODS = {
    "draft_model": EngineExport(
        lambda c: {"decoding_type": "Draft_Target", "speculative_model": named_model(c)},
    ),
    "eagle": EngineExport(
        lambda c: {
            "decoding_type": "Eagle3",
            "speculative_model": named_model(c),
            **(
                {
                    "use_dynamic_tree": True,
                    "dynamic_tree_max_topK": c.budget.width,
                    "max_total_draft_tokens": min(c.budget.max_nodes, c.budget.width * c.budget.depth),
                }
                if c.budget.width > 1
                else {}
            ),
        }
    ),
    "dflash": EngineExport(
        lambda c: {"decoding_type": "DFlash", "speculative_model": named_model(c)},
        lambda c: [
            "dflash: TensorRT-LLM reads `dflash_config` of config.json, as z-lab writes it; that of speculators is untried"
        ],
    ),
    "suffix": EngineExport(
        lambda c: {
            "decoding_type": "SA",
            "max_matching_ngram_size": -1,
            **({"enable_global_pool": True} if c.suffix_shared_tokens else {}),
        },
        lambda c: [
            "suffix: a draft is always as long as max_draft_len, whatever its chance is, so weak matches cost more",
        ],
    ),
    "ngram": EngineExport(
        lambda c: {
            "decoding_type": "NGram",
            "max_matching_ngram_size": c.prompt_lookup_max,
            "is_public_pool": False,
            "is_use_oldest": False,
        },
        lambda c: (
            [match_note(c, f"NGram matches 1 to {c.prompt_lookup_max}, so weaker drafts come too")]
            if c.prompt_lookup_min > 1
            else []
        ),
    ),
}


class TensorRTLLM(ForeignEngine):
    """`trtllm-serve MODEL --config trt-llm.yaml`, and the file."""

    name, title, start, off = "trt-llm", "TensorRT-LLM", "trtllm-serve", "leave out speculative_config"
    methods, draft_key = METHODS, "speculative_model"
    otherwise = "it compares with a token sampled from the target, which accepts less"
    other_tokens = ", and hardly any draft token would be accepted; use one with the same"

    def together(self, methods: Sequence[str]) -> bool:
        return len(methods) == 1 or sorted(methods) == ["eagle", "suffix"]

    def trees(self, values: Mapping[str, Any]) -> bool:
        return values["decoding_type"] == "Eagle3"

    def values(self, setting: ExportedSetting, rows: Sequence[EngineExport], notes: list[str]) -> dict[str, Any]:
        config = setting.config
        values: dict[str, Any] = {"decoding_type": "", "max_draft_len": config.budget.depth}
        for _, row in sorted(zip(config.methods, rows, strict=True), key=lambda pair: pair[0], reverse=True):
            values |= row.flags(config)
        if len(rows) == 2:  # a head, helped by look-ups
            pool = values.pop("enable_global_pool", False)
            values.pop("max_matching_ngram_size", None)
            values["sa_config"] = {"threshold": 4, "enable_global_pool": pool}
        notes.append("this file was not run here: it follows TensorRT-LLM's source")
        if config.verifier == "rejection":
            if values["decoding_type"] in _ONE_MODEL and len(rows) == 1:
                values["use_rejection_sampling"] = True
            else:
                notes.append(
                    "rejection: it compares with a token sampled from the target; the distribution is the same"
                )
        return values | _lengths(setting, values, notes)

    def written(self, setting: ExportedSetting, model: str, values: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        if not values:
            return "", {}
        whole: dict[str, Any] = {"backend": "pytorch"}
        if values["decoding_type"] in _NO_OVERLAP:
            whole["disable_overlap_scheduler"] = True
        file = yaml_text(whole | {"speculative_config": values})
        return f"--config {shlex.quote(setting.file(FILE))}", {FILE: file}


def _lengths(setting: ExportedSetting, values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What says the lengths by batch size. Adds a note if they cannot be said.

    TensorRT-LLM's schedule maps the last batch size of a range to its length. Nothing is drafted after the last range, and
    the first length must be the longest.
    """
    if not setting.changes():
        return {}
    schedule = setting.schedule()
    longest = max(length for _, _, length in schedule)
    if schedule[0][2] != longest:
        notes.append("lengths by batch size: the first must be the longest there, so this length is used at any load")
        return {}
    out: dict[str, Any] = {"max_draft_len": longest}
    if most := values.get("max_total_draft_tokens"):
        out["max_total_draft_tokens"] = min(most, longest * values["dynamic_tree_max_topK"])
    return out | {"draft_len_schedule": {last: length for _, last, length in schedule if length}}
