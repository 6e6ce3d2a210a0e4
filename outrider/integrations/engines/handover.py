"""A setting for one engine with everything that belongs to it: the head in its layout, and the draft model's tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.heads.files import DFLASH, DSPARK, EAGLE1, EAGLE3, MEDUSA, HeadFolder, head_kind, open_head
from outrider.drafters.method import find
from outrider.integrations.engines import EngineCommand, exports
from outrider.integrations.engines.setting import model_path
from outrider.models.load import load, tokenizer_named


def hand_over(
    config: dict[str, Any] | SpeculativeConfig,
    engine: str,
    lengths: dict[int, int] | None = None,
    *,
    model: str | None = None,
    out: Path | None = None,
) -> EngineCommand:
    """The command and the files of a setting for an engine. Writes the head, if the engine reads another layout.

    engine: a name of `ENGINES`. model: the target. out: the folder for files and heads; without it, or without a model, no
    head is written, and a note says so. Raises ValueError for what `exports` refuses, and for a head that does not fit.
    """
    speculation, notes = SpeculativeConfig.of(config), list[str]()
    folder = None if out is None else str(out)
    if (head := head_of(speculation)) is not None:
        if refused := refusal(head, engine):
            [command] = exports(speculation, lengths, model=model, engines=[engine])
            return EngineCommand(command.engine, "", (refused,), supported=False)
        if reason := rewrite_reason(head, engine):
            if out is None or model is None:
                notes.append(f"head: {reason}; --out FOLDER and -m MODEL write it so")
            else:
                written = write_head(head, engine, model, out.absolute())
                speculation = speculation.model_copy(update={"model": str(written)})
    same: bool | None = True
    if "draft_model" in speculation.methods and model is not None:
        same = same_tokens(model, str(speculation.model))
        if same is None:
            notes.append(
                "tokens: those of the draft model and the target could not be compared here; they must be the same"
            )
    [command] = exports(speculation, lengths, model=model, engines=[engine], other_tokens=same is False, folder=folder)
    return replace(command, notes=(*command.notes, *notes)) if command.supported else command


def write_files(command: EngineCommand, out: Path) -> list[str]:
    """Write the files of a command. Returns their names."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in command.files.items():
        (out / name).write_text(text, encoding="utf-8")
    return list(command.files)


def head_of(config: SpeculativeConfig) -> HeadFolder | None:
    """The head of a setting, if its method reads one and its folder is here. Raises ValueError for a damaged folder."""
    heads = any(find(name).heads for name in config.methods)
    if not heads or not isinstance(config.model, (str, Path)) or not Path(config.model).expanduser().exists():
        return None
    return open_head(config.model)


def rewrite_reason(head: HeadFolder, engine: str) -> str:
    """Why an engine cannot read this folder though it knows the layout of another; "" if it reads it, or never will."""
    if engine in ("sglang", "trt-llm") and head.kind == EAGLE3 and head.speculators:
        return "it has the layout of speculators, and this engine reads the flat one"
    if engine == "vllm" and head.kind == MEDUSA and "num_heads" not in head.settings:
        return "it has the layout of FasterDecoding, and vLLM reads its own"
    return ""


def refusal(head: HeadFolder, engine: str) -> str:
    """Why an engine runs no head of this kind; "" if it does."""
    if head.kind == EAGLE1 and engine in ("llama.cpp", "trt-llm"):
        return "heads of EAGLE-1: this engine runs EAGLE-3 only; train one: outrider train eagle3 -m MODEL -o HEAD"
    if head.kind in (DFLASH, DSPARK) and engine == "sglang" and head.speculators:
        return (
            f"{head.kind}: SGLang reads the flat layout of z-lab or DeepSpec, and this folder has that of speculators; "
            "the original checkpoint works"
        )
    return ""


def write_head(head: HeadFolder, engine: str, target: str, folder: Path) -> Path:
    """Write a head in the layout that an engine reads. Returns its new folder, in `folder`.

    target: the model that it drafts for. Raises ValueError if head and target do not fit, or if the layout cannot say it.
    """
    out = folder / f"head-{engine}"
    if head_kind(out) is not None and out.resolve() == head.path.resolve():
        raise ValueError(f"{out} is the head itself; write to another folder")
    loaded = load(target, device="cpu")
    dtype = next((t.dtype for t in head.tensors.values() if t.is_floating_point()), torch.bfloat16)
    if head.kind == MEDUSA:
        from outrider.drafters.heads.medusa.files import read_medusa, write_medusa

        return write_medusa(out, read_medusa(head, loaded), "vllm", dtype=dtype)
    from outrider.drafters.heads.eagle.files import read_eagle, write_eagle
    from outrider.drafters.heads.eagle.module import Eagle

    weights = read_eagle(head, loaded)
    own = weights.own_embedding
    embedding = torch.zeros(weights.config.vocab_size, weights.config.hidden_size) if own is None else own
    return write_eagle(out, Eagle.of(weights, embedding), "flat", dtype=dtype, embedding=own is not None)


def same_tokens(target: str, draft: str) -> bool | None:
    """Whether two models, given by name, have the same tokens and vocabulary size. None if that cannot be known here.

    Engines with one vocabulary refuse a draft model with another size, even if only unused tokens differ.
    """
    if not all(
        model_path(name).endswith(".gguf") or Path(model_path(name)).expanduser().is_dir() for name in (target, draft)
    ):
        return None  # a name on the hub
    try:
        one, two = (tokenizer_named(model_path(name)).get_vocab() for name in (target, draft))
    except (OSError, ValueError):
        return None
    sizes = {size for name in (target, draft) if (size := _vocab_size(model_path(name)))}
    return one == two and len(sizes) < 2


def _vocab_size(path: str) -> int | None:
    """The vocabulary size that a folder's config.json says."""
    try:
        settings = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
        return settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
