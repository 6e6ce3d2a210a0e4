"""The export to vLLM. Names are those of version 0.32."""

from __future__ import annotations

import json
import pprint
import shlex
from typing import Any

from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.method import EngineExport
from outrider.integrations.engines.setting import (
    EngineCommand,
    ExportedSetting,
    adaptive_notes,
    chain_notes,
    copies_notes,
    corpus_notes,
    is_eagle1,
    method_notes,
    model_path,
    named_model,
    only_folders,
    unsupported,
    verifier_notes,
    vocab_notes,
    yaml_text,
)

ENGINE = "vLLM"
_VERIFIERS = {
    "match": "match: above temperature 0, texts there have the same distribution, but other tokens",
    "rejection": "",
    "block": "block: only its second model runner has it, VLLM_USE_V2_MODEL_RUNNER=1 on CUDA; without that runner it is "
    "ordinary rejection, which accepts a little less",
}
_CPU = (
    "temperature on a CPU: vLLM 0.32 and 0.33 do not keep the distribution above temperature 0 (vLLM issue 55005). Send "
    "temperature 0 there"
)
_REFUSED = (
    "requests: logit_bias is refused (HTTP 400) while it speculates, and so is min_p above temperature 0; at temperature 0 min_p "
    "changes nothing"
)
_SNIPPET = """\
from vllm import LLM, SamplingParams

llm = LLM(
    model={model!r},
    speculative_config={config},
)
for output in llm.generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=64)):
    print(output.outputs[0].text)
"""


def _head(config: SpeculativeConfig) -> dict[str, Any]:
    return {"model": named_model(config)}


METHODS = {
    "draft_model": EngineExport(
        lambda c: {"model": named_model(c), "draft_sample_method": "probabilistic"},
        lambda c: [
            *copies_notes(
                c, dict.fromkeys(("int8", "int4"), "give a checkpoint that is quantized to it, else a draft costs more")
            ),
            *vocab_notes(c),
        ],
    ),
    "eagle": EngineExport(lambda c: {"method": "eagle" if is_eagle1(c) else "eagle3", **_head(c)}),
    "peagle": EngineExport(lambda c: {"method": "eagle3", **_head(c), "parallel_drafting": True}),
    "mtp": EngineExport(lambda c: {"method": "mtp"}),
    "medusa": EngineExport(_head, lambda c: ["medusa: vLLM 0.33 no longer has this method; 0.32 does"]),
    "dflash": EngineExport(_head),
    "dspark": EngineExport(_head),
    "suffix": EngineExport(
        lambda c: {
            "suffix_decoding_max_tree_depth": max(24, c.budget.depth + 8),
            "suffix_decoding_max_spec_factor": 1.0,
            "suffix_decoding_min_token_prob": c.suffix_decoding_min_token_prob,
            **({} if c.suffix_shared_tokens else {"suffix_decoding_max_cached_requests": 0}),
        },
        lambda c: [
            "install: pip install arctic-inference==0.1.1",
            "length: suffix_decoding_max_spec_factor 1.0 drafts no more tokens than the match is long; more is bolder",
            *corpus_notes(c),
        ],
    ),
    "ngram": EngineExport(
        lambda c: {"prompt_lookup_min": c.prompt_lookup_min, "prompt_lookup_max": c.prompt_lookup_max}
    ),
}
"""How it runs our methods, by name."""


def export(setting: ExportedSetting) -> EngineCommand:
    """The command line, `vllm.yaml` for `vllm serve --config`, and `vllm_offline.py` with the same in Python."""
    model = "MODEL" if setting.model is None else model_path(setting.model)
    if not setting.enabled:
        note = f"{setting.reason}: leave out --speculative-config"
        return EngineCommand(ENGINE, "", (note,), f"vllm serve {shlex.quote(model)}", files=_files(model, None))
    rows = setting.rows("vllm", METHODS)
    if rows is None or len(rows) > 1:
        return unsupported(ENGINE, setting)
    config, (row,) = setting.config, rows
    out: dict[str, Any] = {
        "method": config.method,
        "num_speculative_tokens": config.budget.depth,
        **row.flags(config),
    }
    notes = [*method_notes(setting, rows)]
    if setting.other_tokens:
        out["use_heterogeneous_vocab"] = True
        out.pop("draft_sample_method", None)
        notes.append(
            "tokens: the draft model has others. vLLM then drafts the likeliest token that both have, so above temperature 0 "
            "fewer are accepted"
        )
    if config.verifier == "block":
        out["rejection_sample_method"] = "block"
    notes += verifier_notes(config, _VERIFIERS, "vLLM uses rejection, which accepts less and keeps the distribution")
    notes += [_CPU, _REFUSED, *chain_notes(config)]
    if setting.changes():
        schedule = setting.schedule()
        out["num_speculative_tokens"] = max(length for _, _, length in schedule)
        out["num_speculative_tokens_per_batch_size"] = schedule
        notes.append("lengths by batch size: vLLM ignores them with --data-parallel-size over 1")
    notes += adaptive_notes(
        config, "there they follow the batch size at most, so a text that is hard to draft gains less"
    )
    notes += only_folders(setting, setting.model, out.get("model"))
    command = f"--speculative-config {shlex.quote(json.dumps(out))}"
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if config.method == "dspark" else {}
    serve = shlex.join(["env", *(f"{k}={v}" for k, v in environment.items())]) + " " if environment else ""
    return EngineCommand(
        ENGINE,
        command,
        tuple(notes),
        f"{serve}vllm serve {shlex.quote(model)} {command}",
        environment,
        _files(model, out),
    )


def _files(model: str, config: dict[str, Any] | None) -> dict[str, str]:
    values = {"model": model} if config is None else {"model": model, "speculative-config": config}
    shown = pprint.pformat(config, width=90, sort_dicts=False).replace("\n", "\n    ")
    return {"vllm.yaml": yaml_text(values), "vllm_offline.py": _SNIPPET.format(model=model, config=shown)}
