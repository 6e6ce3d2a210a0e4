"""The export to llama.cpp's server. Names are those of autumn 2026."""

from __future__ import annotations

import re
import shlex
from typing import Any

from outrider.drafters.exports import gguf_path, model_path
from outrider.integrations.engines.setting import (
    EngineCommand,
    ExportedSetting,
    adaptive_notes,
    chain_notes,
    flags_line,
    method_notes,
    unsupported,
    verifier_notes,
)

ENGINE = "llama.cpp"
_TYPE = "--spec-type"
_VERIFIERS = {
    "match": "match: above temperature 0, texts there have the same distribution, but other tokens",
    "rejection": "",
}
# Sampled draft tokens and rejection, in place of the likeliest ones.
_SAMPLED = "--spec-draft-sampling"


def export(setting: ExportedSetting) -> EngineCommand:
    """The command line, and `llama.cpp.ini` for `llama-server --models-preset`. Several methods become a list of types."""
    model = "MODEL.gguf" if setting.model is None else gguf_path(setting.model)
    start = f"llama-server -m {shlex.quote(model)}"
    if not setting.enabled:
        command = f"{_TYPE} none"
        note = (f"{setting.reason}: --spec-type none is also the default",)
        return EngineCommand(ENGINE, command, note, f"{start} {command}", files=_files(model, {_TYPE: "none"}))
    rows = setting.rows("llama_cpp")
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
