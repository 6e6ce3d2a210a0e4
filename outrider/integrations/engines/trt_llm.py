"""The export to TensorRT-LLM. Names are those of its PyTorch backend in version 1.3 (`tensorrt_llm/llmapi/llm_args.py`).

No parser of TensorRT-LLM was at hand, so these settings are from its source and its documentation and were not run.
"""

from __future__ import annotations

import shlex
from typing import Any

from outrider.drafters.method import EngineExport
from outrider.integrations.engines.setting import (
    EngineCommand,
    ExportedSetting,
    adaptive_notes,
    chain_notes,
    copies_notes,
    corpus_notes,
    match_note,
    method_notes,
    model_path,
    named_model,
    only_folders,
    unsupported,
    verifier_notes,
    vocab_notes,
    yaml_text,
)

ENGINE = "TensorRT-LLM"
FILE = "trt-llm.yaml"
_VERIFIERS = {
    "match": "match: above temperature 0, texts there have the same distribution, but other tokens",
    "rejection": "",
}
# Methods whose documentation asks for it.
_NO_OVERLAP = ("Draft_Target", "NGram")
# Methods of the one-model path, which can sample draft tokens and reject them.
_ONE_MODEL = ("Draft_Target", "Eagle3", "DFlash")


METHODS = {
    "draft_model": EngineExport(
        lambda c: {"decoding_type": "Draft_Target", "speculative_model": named_model(c)},
        lambda c: [
            *copies_notes(
                c, dict.fromkeys(("int8", "int4"), "give a checkpoint that is quantized to it, else a draft costs more")
            ),
            *vocab_notes(c),
        ],
    ),
    "eagle": EngineExport(
        lambda c: {
            "decoding_type": "Eagle3",
            "speculative_model": named_model(c),
            **(
                {
                    "use_dynamic_tree": True,
                    "dynamic_tree_max_topK": c.tree_width,
                    "max_total_draft_tokens": min(c.budget.max_nodes, c.tree_width * c.budget.depth),
                }
                if c.tree_width > 1
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
            *corpus_notes(c),
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
"""How it runs our methods, by name."""


def export(setting: ExportedSetting) -> EngineCommand:
    """`trtllm-serve MODEL --config trt-llm.yaml`, and the file."""
    model = "MODEL" if setting.model is None else model_path(setting.model)
    start = f"trtllm-serve {shlex.quote(model)}"
    if not setting.enabled:
        note = f"{setting.reason}: leave out speculative_config"
        return EngineCommand(ENGINE, "", (note,), start)
    config, rows = setting.config, _rows(setting)
    if rows is None:
        return unsupported(ENGINE, setting)
    values: dict[str, Any] = {"max_draft_len": config.budget.depth}
    for row in reversed(rows):
        values |= row.flags(config)
    if len(rows) == 2:  # a head, helped by look-ups
        pool = values.pop("enable_global_pool", False)
        values.pop("max_matching_ngram_size", None)
        values["sa_config"] = {"threshold": 4, "enable_global_pool": pool}
    kind = values["decoding_type"]
    values = {"decoding_type": kind} | values
    notes = ["this file was not run here: it follows TensorRT-LLM's source"]
    notes += verifier_notes(config, _VERIFIERS, "it compares with a token sampled from the target, which accepts less")
    if config.verifier == "rejection":
        if kind in _ONE_MODEL and len(rows) == 1:
            values["use_rejection_sampling"] = True
        else:
            notes.append("rejection: it compares with a token sampled from the target; the distribution is the same")
    notes += method_notes(setting, rows)
    if kind != "Eagle3":
        notes += chain_notes(config)
    if setting.other_tokens:
        notes.append(
            "tokens: the draft model has others, and hardly any draft token would be accepted; use one with the same"
        )
    notes += _lengths(setting, values)
    notes += adaptive_notes(
        config, "there they follow the batch size at most, so a text that is hard to draft gains less"
    )
    notes += only_folders(setting, setting.model, values.get("speculative_model"))
    whole: dict[str, Any] = {"backend": "pytorch"}
    if kind in _NO_OVERLAP:
        whole["disable_overlap_scheduler"] = True
    command = f"--config {shlex.quote(setting.file(FILE))}"
    files = {FILE: yaml_text(whole | {"speculative_config": values})}
    return EngineCommand(ENGINE, command, tuple(notes), f"{start} {command}", files=files)


def _rows(setting: ExportedSetting) -> list[Any] | None:
    """The rows of the methods: one method, or an EAGLE head and suffix decoding, in this order."""
    rows = setting.rows("trt-llm", METHODS)
    if rows is None or len(rows) == 1:
        return rows
    names = setting.config.methods
    if sorted(names) != ["eagle", "suffix"]:
        return None
    return [rows[names.index("eagle")], rows[names.index("suffix")]]


def _lengths(setting: ExportedSetting, values: dict[str, Any]) -> list[str]:
    """Add the lengths by batch size to `values`. Returns the note if they cannot be said.

    TensorRT-LLM's schedule maps the last batch size of a range to its length. Nothing is drafted after the last range, and
    the first length must be the longest.
    """
    if not setting.changes():
        return []
    schedule = setting.schedule()
    longest = max(length for _, _, length in schedule)
    if schedule[0][2] != longest:
        return ["lengths by batch size: the first must be the longest there, so this length is used at any load"]
    values["max_draft_len"] = longest
    if "max_total_draft_tokens" in values:
        values["max_total_draft_tokens"] = min(
            values["max_total_draft_tokens"], longest * values["dynamic_tree_max_topK"]
        )
    values["draft_len_schedule"] = {last: length for _, last, length in schedule if length}
    return []
