"""The export to SGLang. Names are those of version 0.5.23."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.drafters.config import EngineExport, SpeculativeConfig
from outrider.integrations.engines.setting import (
    ExportedSetting,
    ForeignEngine,
    flags_line,
    is_eagle1,
    match_note,
    named_model,
    yaml_text,
)

ADAPTIVE = "sglang-adaptive.json"
"""The file of `--speculative-adaptive-config`."""
_DISTRIBUTION = (
    "temperature: on a CPU, on an XPU, and on ROCm without --speculative-use-rejection-sampling, SGLang writes the likeliest "
    "token at any temperature, so texts are greedy. On CUDA the distribution is kept"
)
_PENALTIES = (
    "penalties: presence, frequency and repetition penalties are held fixed within a step, so texts with them change"
)


def _sglang_model(algorithm: str) -> Callable[[SpeculativeConfig], dict[str, Any]]:
    return lambda c: {
        "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": named_model(c),
        "--speculative-num-steps": c.budget.depth,
        "--speculative-eagle-topk": c.budget.width,
        "--speculative-num-draft-tokens": c.budget.max_nodes + 1,  # SGLang counts the root
    }


def _sglang_block(algorithm: str) -> EngineExport:
    return EngineExport(
        lambda c: {
            "--speculative-algorithm": algorithm,
            "--speculative-draft-model-path": named_model(c),
            "--speculative-num-draft-tokens": c.budget.depth + 1,
            **({"--speculative-use-block-verification": None} if c.verifier == "block" else {}),
        },
        lambda c: ["device: SGLang runs this method on CUDA, NPU and XPU, not on a CPU"],
    )


def _sglang_ngram(config: SpeculativeConfig) -> dict[str, Any]:
    longest = config.prompt_lookup_max if config.method == "ngram" else 16
    flags: dict[str, Any] = {
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": config.budget.max_nodes + 1,
        "--speculative-ngram-max-bfs-breadth": config.budget.width,
        # a path of the trie is a match and what followed it
        "--speculative-ngram-max-trie-depth": longest + config.budget.depth,
    }
    if _jsonl(config.corpus):
        flags["--speculative-ngram-external-corpus-path"] = config.corpus
        flags["--speculative-ngram-external-sam-budget"] = max(1, config.budget.max_nodes // 2)
    return flags


def _jsonl(corpus: Any) -> bool:
    return isinstance(corpus, (str, Path)) and str(corpus).endswith(".jsonl")


METHODS = {
    "draft_model": EngineExport(
        _sglang_model("STANDALONE"),
    ),
    "eagle": EngineExport(lambda c: _sglang_model("EAGLE" if is_eagle1(c) else "EAGLE3")(c)),
    "mtp": EngineExport(
        lambda c: {k: v for k, v in _sglang_model("EAGLE")(c).items() if k != "--speculative-draft-model-path"},
        lambda c: ["MTP: without a draft model, EAGLE is the layer of the checkpoint"],
    ),
    "dflash": _sglang_block("DFLASH"),
    "dspark": _sglang_block("DSPARK"),
    "suffix": EngineExport(
        _sglang_ngram,
        lambda c: [
            "suffix: NGRAM is the nearest; it shares a trie of prompts and answers between all requests",
        ],
    ),
    "ngram": EngineExport(
        _sglang_ngram,
        lambda c: (
            [match_note(c, f"SGLang matches 1 token or more, so drafts shorter than {c.prompt_lookup_min} come too")]
            if c.prompt_lookup_min > 1
            else []
        ),
    ),
}


class SGLang(ForeignEngine):
    """The command line and `sglang.yaml` for `--config`; for an EAGLE head with several lengths, the file of the lengths."""

    name, title, start = "sglang", "SGLang", "python -m sglang.launch_server --model-path"
    off, methods, draft_key = "leave out --speculative-algorithm", METHODS, "--speculative-draft-model-path"
    verifiers: Mapping[str, str] = {
        "match": "match: above temperature 0, texts there have other tokens",
        "rejection": "rejection: SGLang accepts by the target's probability alone; on CUDA the distribution is the same",
        "block": "block: --speculative-use-block-verification has it, on CUDA, for EAGLE heads with all tokens and topk 1",
    }
    otherwise = "SGLang accepts by the target's probability alone, which accepts less"
    other_tokens = ", and SGLang refuses to start with it; use a draft with the same tokens"
    adaptive = ""
    quantized: Mapping[str, str] = {
        "int8": "give a w8a8_int8 checkpoint and --speculative-draft-model-quantization w8a8_int8",
        "int4": "give a gptq or awq checkpoint and --speculative-draft-model-quantization",
    }

    def values(self, setting: ExportedSetting, rows: Sequence[EngineExport], notes: list[str]) -> dict[str, Any]:
        flags = dict(rows[0].flags(setting.config))
        notes += [_DISTRIBUTION, _PENALTIES]
        if not setting.changes():
            if setting.config.adaptive:
                notes.append(
                    "draft lengths that follow the text: --speculative-adaptive has them for EAGLE heads with topk 1; else a "
                    "text that is hard to draft gains less"
                )
        elif flags["--speculative-algorithm"] == "EAGLE3" and setting.config.budget.width == 1:
            flags |= {"--speculative-adaptive": None, "--speculative-adaptive-config": setting.file(ADAPTIVE)}
            steps = max(setting.lengths.values())
            flags |= {"--speculative-num-steps": steps, "--speculative-num-draft-tokens": steps + 1}
            notes.append(f"lengths by batch size: they are in {ADAPTIVE}, and follow the text too")
        else:
            notes.append(
                "lengths by batch size: SGLang has them for EAGLE heads with topk 1 only, so this length is used at any load"
            )
        return flags

    def corpus_note(self, config: SpeculativeConfig) -> str:
        if _jsonl(config.corpus):
            return "corpus: SGLang reads one JSON string a line, and gives half of the draft to it"
        return (
            "corpus: SGLang reads a .jsonl file with one JSON string a line, --speculative-ngram-external-corpus-path; this one "
            "is left out, so drafts come from prompts and answers only"
        )

    def trees(self, values: Mapping[str, Any]) -> bool:
        return True

    def verifier_note(self, verifier: str, values: Mapping[str, Any]) -> str:
        has_it = verifier == "block" and "--speculative-use-block-verification" in values
        return "" if has_it else super().verifier_note(verifier, values)

    def written(self, setting: ExportedSetting, model: str, values: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        keys = {k.removeprefix("--"): True if v is None else v for k, v in values.items()}
        files = {"sglang.yaml": yaml_text({"model-path": model} | keys)}
        if "--speculative-adaptive" in values:
            # The candidates by batch size. --speculative-num-steps must be one of them.
            steps = {n: sorted({0, 1, k} if k < 2 else {1, k}) for n, k in sorted(setting.lengths.items())}
            files[ADAPTIVE] = (
                json.dumps({str(n): {"candidate_steps": some} for n, some in steps.items()}, indent=1) + "\n"
            )
        return flags_line(values), files
