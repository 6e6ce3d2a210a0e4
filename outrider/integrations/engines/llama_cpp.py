"""The export to llama.cpp's server. Names are those of autumn 2026."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.drafters.config import EngineExport, SpeculativeConfig
from outrider.integrations.engines.setting import (
    ExportedSetting,
    ForeignEngine,
    flags_line,
    match_note,
    model_path,
    named_model,
)

_TYPE = "--spec-type"
_MATCH = 3  # tokens that it looks up for suffix decoding; its own default, 12, hardly ever matches a short text
# Sampled draft tokens and rejection, in place of the likeliest ones.
_SAMPLED = "--spec-draft-sampling"
_CONVERT = "python convert_hf_to_gguf.py"


def gguf_path(name: str) -> str:
    """The GGUF file that llama.cpp reads: the model itself, or the one to convert its folder to."""
    path = model_path(name)
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}.gguf"


def _gguf_notes(config: SpeculativeConfig, what: str = "model", options: str = "") -> list[str]:
    """What to convert first, if the draft model is not a GGUF file."""
    source, wanted = named_model(config), gguf_path(str(config.model))
    return [] if source == wanted else [f"{what}: convert it first: {_CONVERT} {source}{options} --outfile {wanted}"]


def _head_notes(config: SpeculativeConfig) -> list[str]:
    return _gguf_notes(config, "head", " --target-model-dir TARGET --outtype bf16")


def _llama_model(kind: str) -> Callable[[SpeculativeConfig], dict[str, Any]]:
    return lambda c: {
        "--spec-type": kind,
        "--spec-draft-model": gguf_path(str(c.model)),
        "--spec-draft-n-max": c.budget.depth,
    }


def _llama_ngram(config: SpeculativeConfig, match: int) -> dict[str, Any]:
    return {
        "--spec-type": "ngram-simple",
        "--spec-ngram-simple-size-n": match,
        "--spec-ngram-simple-size-m": config.budget.depth,
    }


METHODS = {
    "draft_model": EngineExport(
        _llama_model("draft-simple"),
        _gguf_notes,
    ),
    "eagle": EngineExport(_llama_model("draft-eagle3"), _head_notes),
    "dflash": EngineExport(_llama_model("draft-dflash"), _head_notes),
    "dspark": EngineExport(
        _llama_model("draft-dspark"),
        lambda c: [*_head_notes(c), "dspark: llama.cpp runs drafters with a Qwen3 backbone only"],
    ),
    "suffix": EngineExport(
        lambda c: _llama_ngram(c, _MATCH),
        lambda c: [
            "suffix: ngram-simple is the nearest; it uses one length, the last match and one text, so it drafts less often",
        ],
    ),
    "ngram": EngineExport(
        lambda c: _llama_ngram(c, c.prompt_lookup_min),
        lambda c: (
            [match_note(c, f"ngram-simple looks up one length, {c.prompt_lookup_min}, and takes the last match")]
            if c.prompt_lookup_max > c.prompt_lookup_min
            else []
        ),
    ),
}


class LlamaCpp(ForeignEngine):
    """The command line, and `llama.cpp.ini` for `llama-server --models-preset`. Several methods become a list of types."""

    name, title, start, off = "llama.cpp", "llama.cpp", "llama-server -m", "--spec-type none is also the default"
    plain: Mapping[str, Any] = {_TYPE: "none"}
    methods = METHODS
    otherwise = "llama.cpp samples from the target and compares, which accepts less"
    other_tokens = "; llama.cpp passes the text between them, which costs time in each step"
    adaptive = ""
    quantized: Mapping[str, str] = {
        "int8": "convert it with --outtype q8_0, else a draft costs more",
        "int4": "llama-quantize FILE.gguf FILE-q4.gguf Q4_0 makes it, else a draft costs more",
    }

    def path(self, model: str) -> str:
        return gguf_path(model)

    def together(self, methods: Sequence[str]) -> bool:
        return True

    def values(self, setting: ExportedSetting, rows: Sequence[EngineExport], notes: list[str]) -> dict[str, Any]:
        config = setting.config
        flags: dict[str, Any] = {}
        for row in rows:
            types = dict.fromkeys([*flags.get(_TYPE, "").split(","), row.flags(config)[_TYPE]])
            flags |= {**row.flags(config), _TYPE: ",".join(filter(None, types))}
        drafts = "--spec-draft-model" in flags
        if drafts and config.verifier == "rejection":
            flags[_SAMPLED] = "probabilistic"
        if setting.model is not None and model_path(setting.model) != (wanted := gguf_path(setting.model)):
            notes.append(f"target: convert it first: {_CONVERT} {model_path(setting.model)} --outfile {wanted}")
        if setting.changes():
            notes.append("lengths by batch size: llama.cpp has none, so this length is used at any load")
        if config.adaptive:
            fixed = "--spec-ngram-simple-size-m is fixed, so a text that is hard to draft gains less"
            if drafts:
                fixed = "--spec-draft-n-max is fixed; --spec-draft-p-min 0.5 stops at unlikely tokens"
            notes.append(f"draft lengths that follow the text: {fixed}")
        return flags

    def written(self, setting: ExportedSetting, model: str, values: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        section = re.sub(r"[^\w.-]", "-", model.rpartition("/")[2].removesuffix(".gguf"))
        lines = ["version = 1", "", f"[{section}]", f"model = {model}"]
        lines += [f"{flag.removeprefix('--')} = {value}" for flag, value in values.items()]
        return flags_line(values), {"llama.cpp.ini": "\n".join(lines) + "\n"}
