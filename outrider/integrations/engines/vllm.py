"""The export to vLLM. Names are those of version 0.32."""

from __future__ import annotations

import json
import pprint
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.drafters.config import EngineExport, SpeculativeConfig
from outrider.integrations.engines.setting import (
    ExportedSetting,
    ForeignEngine,
    is_eagle1,
    named_model,
    yaml_text,
)

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
        ],
    ),
    "ngram": EngineExport(
        lambda c: {"prompt_lookup_min": c.prompt_lookup_min, "prompt_lookup_max": c.prompt_lookup_max}
    ),
}


class VLLM(ForeignEngine):
    """The command line, `vllm.yaml` for `vllm serve --config`, and `vllm_offline.py` with the same in Python."""

    name, title, start, off = "vllm", "vLLM", "vllm serve", "leave out --speculative-config"
    methods, draft_key = METHODS, "model"
    verifiers: Mapping[str, str] = {
        **ForeignEngine.verifiers,
        "block": "block: only its second model runner has it, VLLM_USE_V2_MODEL_RUNNER=1 on CUDA; without that runner it is "
        "ordinary rejection, which accepts a little less",
    }
    otherwise = "vLLM uses rejection, which accepts less and keeps the distribution"
    other_tokens = ". vLLM then drafts the likeliest token that both have, so above temperature 0 fewer are accepted"

    def values(self, setting: ExportedSetting, rows: Sequence[EngineExport], notes: list[str]) -> dict[str, Any]:
        config = setting.config
        out = {"method": config.method, "num_speculative_tokens": config.budget.depth, **rows[0].flags(config)}
        if setting.other_tokens:
            out["use_heterogeneous_vocab"] = True
            out.pop("draft_sample_method", None)
        if config.verifier == "block":
            out["rejection_sample_method"] = "block"
        notes += [_CPU, _REFUSED]
        if setting.changes():
            schedule = setting.schedule()
            out["num_speculative_tokens"] = max(length for _, _, length in schedule)
            out["num_speculative_tokens_per_batch_size"] = schedule
            notes.append("lengths by batch size: vLLM ignores them with --data-parallel-size over 1")
        return out

    def environment(self, config: SpeculativeConfig) -> dict[str, str]:
        return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if config.method == "dspark" else {}

    def written(self, setting: ExportedSetting, model: str, values: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        command = f"--speculative-config {shlex.quote(json.dumps(values))}" if values else ""
        shown = pprint.pformat(values or None, width=90, sort_dicts=False).replace("\n", "\n    ")
        file = yaml_text({"model": model, **({"speculative-config": values} if values else {})})
        return command, {"vllm.yaml": file, "vllm_offline.py": _SNIPPET.format(model=model, config=shown)}
