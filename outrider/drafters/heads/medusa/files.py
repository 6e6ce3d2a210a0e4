"""Reads Medusa heads, and writes them for vLLM, or for TGI in the layout of FasterDecoding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.heads.files import MEDUSA, HeadFolder, settings_named, store_head
from outrider.drafters.heads.reading import OUTPUT, HeadReader, log
from outrider.models.dtypes import dtype_name
from outrider.models.load import Loaded

LAYOUTS = ("vllm", "tgi")
_BLOCK = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.(weight|bias)")
_OWN = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.(\d+)\.weight")


@dataclass(frozen=True, eq=False)
class MedusaWeights:
    """Medusa heads as they were read."""

    # for each head its blocks, as (A [hidden, hidden], b [hidden] or None)
    blocks: list[list[tuple[Tensor, Tensor | None]]]
    # float [kept, hidden], one for each head, or a single one for all; empty for the target's own
    outputs: list[Tensor]
    token_ids: Tensor | None  # int64 [kept], ascending; None for all tokens
    vocab_size: int  # tokens of the target
    logit_scale: float = 1.0  # factor of all logits


@settings_named
def read_medusa(folder: str | Path | HeadFolder, target: Loaded) -> MedusaWeights:
    """Read the layout of FasterDecoding and TGI, or that of vLLM. Raises ValueError, naming both sides, for what does not fit."""
    reader = HeadReader(folder, target, MEDUSA)
    path, settings, shared = reader.path, reader.given, reader.spare.get(OUTPUT)
    tensors = {n.removeprefix("medusa_heads."): t for n, t in reader.tensors.items()}
    vocab_size, mapped = int(settings.get("vocab_size") or target.model.vocab_size), tensors.pop("token_map", None)
    blocks: dict[int, dict[int, dict[str, Tensor]]] = {}
    outputs: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            head, layer = (int(match[1]), int(match[2])) if match[1] else (int(match[3]), int(match[4]))
            blocks.setdefault(head, {}).setdefault(layer, {})[match[5]] = tensor
        elif match := _OWN.fullmatch(name):
            outputs[int(match[1] or match[2])] = tensor
        else:
            raise ValueError(f"{path} holds {name}, which no Medusa head has")
    count = int(settings.get("medusa_num_heads", settings.get("num_heads", len(blocks))))
    layers = int(settings.get("medusa_num_layers", settings.get("num_hidden_layers", 1)))
    if sorted(blocks) != list(range(count)) or any(sorted(b) != list(range(layers)) for b in blocks.values()):
        held = {len(b) for b in blocks.values()}
        raise ValueError(
            f"{path} holds {len(blocks)} heads of {' or '.join(map(str, sorted(held))) or 'no'} blocks, and config.json says "
            f"{count} heads of {layers}"
        )
    if shared is None and settings.get("original_lm_head"):
        shared = outputs.get(0)
    if shared is None and outputs and sorted(outputs) != list(range(count)):
        raise ValueError(
            f"{path} has output matrices of the heads {sorted(outputs)}, and config.json says {count} heads"
        )
    every = [shared] if shared is not None else [outputs[i] for i in sorted(outputs)]
    hidden = next((w["weight"].shape[0] for b in blocks.values() for w in b.values()), reader.target_width)
    reader.check_target(vocab_size, hidden)
    ids = _ids(path, mapped, every, vocab_size)
    wanted = (vocab_size if ids is None else len(ids), hidden)
    if wrong := [tuple(m.shape) for m in every if tuple(m.shape) != wanted]:
        raise ValueError(f"{path}: an output matrix is {wrong[0]}, and the settings say {wanted}")
    biased = any("bias" in w for b in blocks.values() for w in b.values())
    if biased and settings.get("medusa_fc_bias") is False:
        log.warning("%s has biases and says medusa_fc_bias false; they are used here, and vLLM leaves them out", path)
    heads = [[(b[j]["weight"], b[j].get("bias")) for j in range(layers)] for _, b in sorted(blocks.items())]
    if ids is not None:
        ids, order = ids.sort()
        every = [m[order] for m in every]
    return MedusaWeights(heads, every, ids, vocab_size, float(settings.get("logit_scale") or 1.0))


def _ids(path: Path, mapped: Tensor | None, outputs: Sequence[Tensor], vocab_size: int) -> Tensor | None:
    """The token of each row: `token_map` holds ids, not offsets as the map of EAGLE does."""
    if mapped is None:
        if outputs and len(outputs[0]) < vocab_size:
            raise ValueError(
                f"{path}: the output matrix has {len(outputs[0])} rows for {vocab_size} tokens, and there is no token_map"
            )
        return None
    ids = mapped.long()
    if len(ids.unique()) != len(ids) or not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"{path}: token_map must hold different tokens from 0 to {vocab_size - 1}, the id of each row")
    return ids


def write_medusa(
    folder: str | Path,
    head: MedusaWeights,
    layout: str = "vllm",
    *,
    dtype: torch.dtype = torch.bfloat16,
    verifier: str | None = None,
) -> Path:
    """Write config.json and the weights; returns the folder, which is made if it is not there.

    layout: "vllm", or "tgi" for the names of FasterDecoding, which TGI reads too. verifier: name of the target.

    Raises ValueError for heads that the layout cannot say.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"Medusa heads are written as {' or '.join(LAYOUTS)}, got {layout!r}")
    count, layers, outputs = len(head.blocks), len(head.blocks[0]), head.outputs
    tgi, shared = layout == "tgi", len(outputs) == 1 and count > 1
    block, output = ("{}.{}.linear", "{}.{}.weight") if tgi else ("blocks.{}.layers.{}", "lm_heads.{}.weight")
    tensors: dict[str, Tensor] = {OUTPUT: outputs[0]} if shared else {}
    if not shared:
        tensors |= {output.format(i, layers): m for i, m in enumerate(outputs)}
    for i, blocks in enumerate(head.blocks):
        for j, (weight, bias) in enumerate(blocks):
            name = block.format(i, j)
            tensors |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    settings: dict[str, Any] = {"model_type": MEDUSA, "torch_dtype": dtype_name(dtype)}
    if verifier:
        settings["base_model_name_or_path"] = verifier
    if tgi:
        if shared or head.token_ids is not None or head.logit_scale != 1.0:
            raise ValueError(
                "the layout 'tgi' has an output matrix of all tokens for each head, or none; these heads share one, have a draft "
                "vocabulary or scale their logits: write layout='vllm'"
            )
        settings |= {"medusa_num_heads": count, "medusa_num_layers": layers}
        return store_head(folder, settings, tensors, dtype, "medusa_lm_head.safetensors")
    if not outputs:
        raise ValueError("vLLM has no Medusa heads with the target's own output head; write layout='tgi'")
    settings |= {
        "architectures": ["MedusaModel"],
        "hidden_size": len(head.blocks[0][0][0]),
        "medusa_fc_bias": any(b is not None for blocks in head.blocks for _, b in blocks),
        "num_heads": count,
        "num_hidden_layers": layers,
        "original_lm_head": shared,
        "truncated_vocab_size": len(outputs[0]),
        "vocab_size": head.vocab_size,
    }
    if head.logit_scale != 1.0:
        settings["logit_scale"] = head.logit_scale
    if head.token_ids is not None:
        tensors["token_map"] = head.token_ids
    return store_head(folder, settings, tensors, dtype)
