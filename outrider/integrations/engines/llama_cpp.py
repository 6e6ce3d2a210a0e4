"""The export to llama.cpp's server. Names are those of autumn 2026."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
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
    flags_line,
    match_note,
    method_notes,
    model_path,
    named_model,
    unsupported,
    verifier_notes,
    vocab_notes,
)

ENGINE = "llama.cpp"
_TYPE = "--spec-type"
_VERIFIERS = {
    "match": "match: above temperature 0, texts there have the same distribution, but other tokens",
    "rejection": "",
}
_MATCH = 3  # tokens that it looks up for suffix decoding; its own default, 12, hardly ever matches a short text
# Sampled draft tokens and rejection, in place of the likeliest ones.
_SAMPLED = "--spec-draft-sampling"


def gguf_path(name: str) -> str:
    """The GGUF file that llama.cpp reads: the model itself, or the one to convert its folder to."""
    path = model_path(name)
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}.gguf"


def _gguf_notes(config: SpeculativeConfig) -> list[str]:
    source, wanted = named_model(config), gguf_path(str(config.model))
    return (
        []
        if source == wanted
        else [f"model: convert it first: python convert_hf_to_gguf.py {source} --outfile {wanted}"]
    )


def _head_notes(config: SpeculativeConfig) -> list[str]:
    source, wanted = named_model(config), gguf_path(str(config.model))
    if source == wanted:
        return []
    return [
        f"head: convert it first: python convert_hf_to_gguf.py {source} --target-model-dir TARGET --outtype bf16 "
        f"--outfile {wanted}"
    ]


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
        lambda c: [
            *_gguf_notes(c),
            *copies_notes(
                c,
                {
                    "int8": "convert it with --outtype q8_0, else a draft costs more",
                    "int4": "llama-quantize FILE.gguf FILE-q4.gguf Q4_0 makes it, else a draft costs more",
                },
            ),
            *vocab_notes(c),
        ],
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
            *corpus_notes(c),
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
"""How it runs our methods, by name."""


def export(setting: ExportedSetting) -> EngineCommand:
    """The command line, and `llama.cpp.ini` for `llama-server --models-preset`. Several methods become a list of types."""
    model = "MODEL.gguf" if setting.model is None else gguf_path(setting.model)
    start = f"llama-server -m {shlex.quote(model)}"
    if not setting.enabled:
        command = f"{_TYPE} none"
        note = (f"{setting.reason}: --spec-type none is also the default",)
        return EngineCommand(ENGINE, command, note, f"{start} {command}", files=_files(model, {_TYPE: "none"}))
    rows = setting.rows("llama.cpp", METHODS)
    if rows is None:
        return unsupported(ENGINE, setting)
    config = setting.config
    flags: dict[str, Any] = {}
    for row in rows:
        added = dict(row.flags(config))
        flags |= added | {_TYPE: ",".join(dict.fromkeys([*flags.get(_TYPE, "").split(","), added[_TYPE]])).strip(",")}
    drafts = "--spec-draft-model" in flags
    if drafts and config.verifier == "rejection":
        flags[_SAMPLED] = "probabilistic"
    notes = [*verifier_notes(config, _VERIFIERS, "llama.cpp samples from the target and compares, which accepts less")]
    notes += [*method_notes(setting, rows), *chain_notes(config)]
    if setting.model is not None and model_path(setting.model) != model:
        notes.append(
            f"target: convert it first: python convert_hf_to_gguf.py {model_path(setting.model)} --outfile {model}"
        )
    if setting.other_tokens:
        notes.append(
            "tokens: the draft model has others; llama.cpp passes the text between them, which costs time in each step"
        )
    if setting.changes():
        notes.append("lengths by batch size: llama.cpp has none, so this length is used at any load")
    fixed = (
        "--spec-draft-n-max is fixed; --spec-draft-p-min 0.5 stops at unlikely tokens"
        if drafts
        else ("--spec-ngram-simple-size-m is fixed, so a text that is hard to draft gains less")
    )
    notes += adaptive_notes(config, fixed)
    command = flags_line(flags)
    return EngineCommand(ENGINE, command, tuple(notes), f"{start} {command}", files=_files(model, flags))


def _files(model: str, flags: dict[str, Any]) -> dict[str, str]:
    """A preset: one section, named as the model's file."""
    name = re.sub(r"[^\w.-]", "-", model.rpartition("/")[2].removesuffix(".gguf"))
    lines = ["version = 1", "", f"[{name}]", f"model = {model}"]
    lines += [f"{flag.removeprefix('--')} = {value}" for flag, value in flags.items()]
    return {"llama.cpp.ini": "\n".join(lines) + "\n"}
