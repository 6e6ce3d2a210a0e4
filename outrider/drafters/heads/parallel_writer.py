"""Writes heads that draft several positions at once: Medusa for vLLM or TGI, DFlash and DSpark as speculators does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.heads.config import BLOCK_FIELDS, BlockConfig, settings_of
from outrider.drafters.heads.files import DFLASH, DSPARK, MEDUSA
from outrider.drafters.heads.medusa import MedusaWeights
from outrider.drafters.heads.reader import HeadWeights
from outrider.drafters.heads.writer import layer_settings, speculators_settings, store_head, vocabulary_maps, wider

MEDUSA_LAYOUTS = ("vllm", "tgi")


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
    if layout not in MEDUSA_LAYOUTS:
        raise ValueError(f"Medusa heads are written as {' or '.join(MEDUSA_LAYOUTS)}, got {layout!r}")
    hidden, count, layers = head.blocks[0][0][0].shape[0], len(head.blocks), len(head.blocks[0])
    old = layout == "tgi"
    tensors: dict[str, Tensor] = {}
    for i, blocks in enumerate(head.blocks):
        for j, (weight, bias) in enumerate(blocks):
            name = f"{i}.{j}.linear" if old else f"blocks.{i}.layers.{j}"
            tensors[f"{name}.weight"] = weight
            if bias is not None:
                tensors[f"{name}.bias"] = bias
    shared = len(head.outputs) == 1 and count > 1
    if old:
        if shared or head.token_ids is not None or head.logit_scale != 1.0:
            raise ValueError(
                "the layout 'tgi' has an output matrix of all tokens for each head, or none; these heads share one, have a draft "
                "vocabulary or scale their logits: write layout='vllm'"
            )
        tensors |= {f"{i}.{layers}.weight": m for i, m in enumerate(head.outputs)}
        settings: dict[str, Any] = {"medusa_num_heads": count, "medusa_num_layers": layers, "model_type": MEDUSA}
    else:
        if not head.outputs:
            raise ValueError("vLLM has no Medusa heads with the target's own output head; write layout='tgi'")
        tensors |= (
            {"lm_head.weight": head.outputs[0]}
            if shared
            else {f"lm_heads.{i}.weight": m for i, m in enumerate(head.outputs)}
        )
        settings = {
            "architectures": ["MedusaModel"],
            "hidden_size": hidden,
            "medusa_fc_bias": any(b is not None for blocks in head.blocks for _, b in blocks),
            "model_type": MEDUSA,
            "num_heads": count,
            "num_hidden_layers": layers,
            "original_lm_head": shared,
            "truncated_vocab_size": len(head.outputs[0]),
            "vocab_size": head.vocab_size,
        }
        if head.logit_scale != 1.0:
            settings["logit_scale"] = head.logit_scale
    stored = _stored(tensors, dtype)
    if head.token_ids is not None:
        stored["token_map"] = head.token_ids.cpu().clone()
    if verifier:
        settings["base_model_name_or_path"] = verifier
    settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    return store_head(
        Path(folder).expanduser(), settings, stored, "medusa_lm_head.safetensors" if old else "model.safetensors"
    )


def write_block(folder: str | Path, head: HeadWeights[BlockConfig], *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a DFlash or DSpark drafter in the layout of speculators, which vLLM reads; returns the folder.

    A head with a Markov bias or a confidence is a DSpark one. With a draft vocabulary its output head is written too; else
    engines take the target's. Raises ValueError for an embedding that no engine would read.
    """
    config = head.config
    if "embed_tokens.weight" in head.tensors:
        raise ValueError("this drafter has an embedding of its own, and speculators gives block drafters the target's")
    stored = _stored(head.tensors, dtype)
    if config.draft_vocab_size < config.vocab_size:
        stored |= vocabulary_maps(head.token_ids.cpu(), config.vocab_size)
    settings = _block_settings(config, confidence="confidence_head.proj.weight" in stored)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    return store_head(Path(folder).expanduser(), settings, stored)


def _stored(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies that share no memory, as safetensors asks."""
    return {n: t.detach().to("cpu", dtype, copy=True).contiguous() for n, t in tensors.items()}


def _block_settings(c: BlockConfig, *, confidence: bool) -> dict[str, Any]:
    kind = DSPARK if c.markov_rank or confidence else DFLASH
    own = settings_of(
        c, BLOCK_FIELDS, layer=False
    )  # vLLM takes sample_from_anchor False where it is missing, for DSpark too
    markov = own.pop("confidence_head_with_markov")
    own |= {
        "architectures": ["DSparkDraftModel" if kind == DSPARK else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": c.layer_ids,
        "draft_vocab_size": c.draft_vocab_size,
        "mask_token_id": c.mask_token_id,
        # vLLM reads False as "causal in all layers", whatever the layers are; speculators ignores it without sliding layers
        "sliding_window_non_causal": True,
        "target_hidden_size": wider(c),
    }
    if kind == DSPARK:
        own |= {
            "confidence_head_with_markov": markov,
            "enable_confidence_head": confidence,
            "markov_head_type": "vanilla",
            "markov_rank": c.markov_rank,
        }
    layer = layer_settings(
        c,
        attention_bias=False,
        layer_types=["full_attention"] * c.num_layers,
        model_type="qwen3",
        rope_parameters=c.rope_parameters,
        use_sliding_window=False,
    )
    return speculators_settings(kind, c.drafts, c.verifier) | own | {"transformer_layer_config": layer}
