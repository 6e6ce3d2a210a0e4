"""The export to SGLang. Names are those of version 0.5.23."""

from __future__ import annotations

import json
import shlex
from typing import Any

from outrider.drafters.exports import model_path
from outrider.integrations.engines.setting import (
    EngineCommand,
    ExportedSetting,
    flags_line,
    method_notes,
    only_folders,
    unsupported,
    verifier_notes,
    yaml_text,
)

ENGINE = "SGLang"
ADAPTIVE = "sglang-adaptive.json"
"""The file of `--speculative-adaptive-config`."""
_LAW = (
    "temperature: on a CPU, on an XPU, and on ROCm without --speculative-use-rejection-sampling, SGLang writes the likeliest "
    "token at any temperature, so texts are greedy. On CUDA the distribution is kept"
)
_PENALTIES = (
    "penalties: presence, frequency and repetition penalties are held fixed within a step, so texts with them change"
)
_VERIFIERS = {
    "match": "match: above temperature 0, texts there have other tokens",
    "rejection": "rejection: SGLang accepts by the target's probability alone; on CUDA the distribution is the same",
}
_BLOCK = "block: --speculative-use-block-verification has it, on CUDA, for EAGLE heads with all tokens and topk 1"


def export(setting: ExportedSetting) -> EngineCommand:
    """The command line and `sglang.yaml` for `--config`; for an EAGLE head with several lengths, the file of the lengths."""
    model = "MODEL" if setting.model is None else model_path(setting.model)
    start = f"python -m sglang.launch_server --model-path {shlex.quote(model)}"
    if not setting.enabled:
        note = f"{setting.reason}: leave out --speculative-algorithm"
        return EngineCommand(ENGINE, "", (note,), start, files={"sglang.yaml": yaml_text({"model-path": model})})
    rows = setting.rows("sglang")
    if rows is None or len(rows) > 1:
        return unsupported(ENGINE, setting)
    config, (row,) = setting.config, rows
    flags: dict[str, Any] = dict(row.flags(config))
    known = _VERIFIERS | ({"block": ""} if "--speculative-use-block-verification" in flags else {"block": _BLOCK})
    notes = [*verifier_notes(config, known, "SGLang accepts by the target's probability alone, which accepts less")]
    notes += [_LAW, _PENALTIES, *method_notes(setting, rows)]
    if setting.other_tokens:
        notes.append(
            "tokens: the draft model has others, and SGLang refuses to start with it; use a draft with the same tokens"
        )
    files: dict[str, str] = {}
    if setting.changes():
        if flags["--speculative-algorithm"] == "EAGLE3" and config.tree_width == 1:
            files[ADAPTIVE] = json.dumps(_slots(setting.lengths), indent=1) + "\n"
            flags |= {"--speculative-adaptive": None, "--speculative-adaptive-config": setting.file(ADAPTIVE)}
            steps = max(setting.lengths.values())
            flags |= {"--speculative-num-steps": steps, "--speculative-num-draft-tokens": steps + 1}
            notes.append(f"lengths by batch size: they are in {ADAPTIVE}, and follow the text too")
        else:
            notes.append(
                "lengths by batch size: SGLang has them for EAGLE heads with topk 1 only, so this length is used at any load"
            )
    elif config.adaptive:
        notes.append(
            "draft lengths that follow the text: --speculative-adaptive has them for EAGLE heads with topk 1; else a text that "
            "is hard to draft gains less"
        )
    notes += only_folders(setting, setting.model, flags.get("--speculative-draft-model-path"))
    command = flags_line(flags)
    files["sglang.yaml"] = yaml_text(
        {"model-path": model} | {k.removeprefix("--"): True if v is None else v for k, v in flags.items()}
    )
    return EngineCommand(ENGINE, command, tuple(notes), f"{start} {command}", files=files)


def _slots(lengths: dict[int, int]) -> dict[str, dict[str, list[int]]]:
    """SGLang's candidates by batch size. `--speculative-num-steps` must be one of them."""
    return {str(n): {"candidate_steps": sorted({0, 1, k} if k < 2 else {1, k})} for n, k in sorted(lengths.items())}
