"""Writes a trained head in the layout that another engine reads, and says what it cannot."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.heads.files import DFLASH, DSPARK, EAGLE1, EAGLE3, MEDUSA, HeadFolder, head_kind, open_head
from outrider.drafters.registry import find
from outrider.models.load import load


def head_of(config: SpeculativeConfig) -> HeadFolder | None:
    """The head of a setting, if its method reads one and its folder is here. Raises ValueError for a damaged folder."""
    heads = any(find(name).heads for name in config.methods)
    if not heads or not isinstance(config.model, (str, Path)) or not Path(config.model).expanduser().exists():
        return None
    return open_head(config.model)


def rewrite_reason(head: HeadFolder, engine: str) -> str:
    """Why an engine cannot read this folder though it knows the layout of another; "" if it reads it, or never will.

    engine: a name of `ENGINES`.
    """
    if engine in ("sglang", "trt-llm") and head.kind == EAGLE3 and head.speculators:
        return "it has the layout of speculators, and this engine reads the flat one"
    if engine == "vllm" and head.kind == MEDUSA and "num_heads" not in head.settings:
        return "it has the layout of FasterDecoding, and vLLM reads its own"
    return ""


def refusal(head: HeadFolder, engine: str) -> str:
    """Why an engine runs no head of this kind; "" if it does."""
    if head.kind == EAGLE1 and engine in ("llama.cpp", "trt-llm"):
        return "heads of EAGLE-1: this engine runs EAGLE-3 only; train one: outrider train eagle3"
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
