"""What a setting is called elsewhere: vLLM, SGLang, llama.cpp, and what of it cannot be said there.

Names as of vLLM (`vllm/config/speculative.py`), SGLang (`docs/advanced_features`, `adaptive_spec_params.py`) and
llama.cpp's server (`--help`) in autumn 2026.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import SpeculativeConfig

LAST = 4096  # texts side by side beyond which nobody asks


@dataclass(frozen=True)
class Export:
    """command: what to add to the engine's command line, '' where nothing there guesses in this way. notes: what is lost."""

    engine: str
    command: str
    notes: tuple[str, ...] = ()


def exports(config: dict[str, Any], lengths: Mapping[int, int] | None = None) -> list[Export]:
    """A configuration for other engines. lengths: the best chain by the number of texts side by side, 0 for no guesses."""
    setting = SpeculativeConfig.of(config)
    lengths = dict(lengths or {})
    return [_vllm(setting, lengths), _sglang(setting, lengths), _llama_cpp(setting)]


def _vllm(setting: SpeculativeConfig, lengths: dict[int, int]) -> Export:
    if not _guesses(setting):
        return Export("vLLM", "", ("plain decoding: leave out --speculative-config",))
    out: dict[str, Any] = {"method": setting.method, "num_speculative_tokens": setting.budget.depth}
    notes = list[str]()
    if setting.method == "draft_model":
        out["model"] = _folder(setting)
        out["draft_sample_method"] = "probabilistic"
        if setting.quantization:
            notes.append(f"{setting.quantization} for the draft: give it as a checkpoint that is quantised so")
    elif setting.method == "ngram":
        out |= {"prompt_lookup_min": setting.prompt_lookup_min, "prompt_lookup_max": setting.prompt_lookup_max}
    elif setting.method == "suffix":
        out["suffix_decoding_min_token_prob"] = setting.suffix_decoding_min_token_prob
        if setting.corpus is not None:
            notes.append("corpus: its suffix decoding knows prompts and answers alone")
    else:
        return Export("vLLM", "", (_nobody(setting),))
    if setting.verifier == "block":
        out["rejection_sample_method"] = "block"
    notes += _lost(setting, {"rejection": "standard", "block": "block"})
    if setting.tree_width > 1:
        notes.append("trees: it drafts chains, so this is a chain as deep")
    schedule = _ranges(lengths)
    if schedule and any(k != out["num_speculative_tokens"] for _, _, k in schedule):
        out["num_speculative_tokens"] = max(1, *(k for _, _, k in schedule))
        out["num_speculative_tokens_per_batch_size"] = schedule
    if setting.adaptive:
        notes.append("lengths that follow the text: its lengths follow the batch size alone")
    return Export("vLLM", f"--speculative-config {shlex.quote(json.dumps(out))}", tuple(notes))


def _sglang(setting: SpeculativeConfig, lengths: dict[int, int]) -> Export:
    if not _guesses(setting):
        return Export("SGLang", "", ("plain decoding: leave out --speculative-algorithm",))
    depth, width, nodes = setting.budget.depth, setting.tree_width, setting.budget.max_nodes
    if setting.method == "draft_model":
        words = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", _folder(setting)]
        words += ["--speculative-num-steps", depth, "--speculative-eagle-topk", width]
        words += ["--speculative-num-draft-tokens", nodes + 1]  # the root counts
    elif setting.method in ("ngram", "suffix"):
        words = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", nodes + 1]
        words += ["--speculative-ngram-max-bfs-breadth", width]
    else:
        return Export("SGLang", "", (_nobody(setting),))
    notes = _lost(setting, {"rejection": "its own rule"})
    if setting.method in ("ngram", "suffix"):
        notes.append("NGRAM needs CUDA")
    if lengths and setting.method == "draft_model":
        slots = {str(r): {"candidate_steps": sorted({0, 1, k} if k < 2 else {1, k})} for r, k in lengths.items()}
        notes.append(
            "lengths that follow text and load: --speculative-adaptive is for EAGLE and EAGLE3 with topk 1 only; with such a "
            f"head of the same cost, --speculative-adaptive-config is a file with {json.dumps(slots)}"
        )
    return Export("SGLang", shlex.join(map(str, words)), tuple(notes))


def _llama_cpp(setting: SpeculativeConfig) -> Export:
    if not _guesses(setting):
        return Export("llama.cpp", "--spec-type none")
    depth, notes = setting.budget.depth, _lost(setting, {})
    if setting.method == "draft_model":
        model = f"{_folder(setting)}.gguf"
        words = ["--spec-type", "draft-simple", "--spec-draft-model", model, "--spec-draft-n-max", depth]
        notes.append("models are GGUF files there: convert_hf_to_gguf.py makes them")
    elif setting.method in ("ngram", "suffix"):
        words = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", depth]
        if setting.method == "ngram":
            words += ["--spec-ngram-simple-size-n", setting.prompt_lookup_min]
        else:
            notes.append(
                "suffix: ngram-simple is the nearest; it looks for one length, takes the last match and one text"
            )
    else:
        return Export("llama.cpp", "", (_nobody(setting),))
    if setting.tree_width > 1:
        notes.append("trees: it drafts chains, so this is a chain as deep")
    if setting.adaptive:
        notes.append(
            "lengths that follow the text: --spec-draft-n-max is fixed; --spec-draft-p-min stops at unsure guesses"
        )
    return Export("llama.cpp", shlex.join(map(str, words)), tuple(notes))


def _guesses(setting: SpeculativeConfig) -> bool:
    return setting.method != "none" and setting.budget.max_nodes > 0


def _nobody(setting: SpeculativeConfig) -> str:
    return f"nothing there guesses as {'+'.join(setting.methods)} does"


def _lost(setting: SpeculativeConfig, rules: Mapping[str, str]) -> list[str]:
    """What is said of the verifier."""
    if setting.verifier in rules:
        return []
    if setting.verifier == "match":
        return ["match: texts above temperature 0 keep their law there, not their tokens"]
    return [f"the verifier {setting.verifier}: it has its own"]


def _folder(setting: SpeculativeConfig) -> str:
    """The draft's folder; a built-in model's is this package's."""
    from outrider.models.load import DATA

    name = str(setting.model)
    return str(Path(DATA) / name.removeprefix("builtin:")) if name.startswith("builtin:") else name


def _ranges(lengths: dict[int, int]) -> list[list[int]]:
    """[first, last, length] of numbers of texts that have the same length."""
    rows = sorted(lengths)
    ends = [*(following - 1 for following in rows[1:]), LAST]
    runs = itertools.groupby(zip(rows, ends, strict=False), key=lambda pair: lengths[pair[0]])
    out = []
    for length, pairs in runs:
        some = list(pairs)
        out.append([some[0][0], some[-1][1], length])
    return out
