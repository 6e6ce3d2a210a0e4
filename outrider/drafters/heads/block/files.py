"""Reads block drafters: DFlash (arXiv 2602.06036), DFlash2 and DSpark.

The folders are as speculators, z-lab, Model-Optimizer, DeepSpec and transformers write them. It writes DFlash and DSpark as
speculators does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.drafters.heads.block.module import BlockConfig, BlockModule
from outrider.drafters.heads.config import Field, settings_of, speculators_settings, vocabulary_maps
from outrider.drafters.heads.files import (
    DFLASH,
    DFLASH2,
    DSPARK,
    HeadFolder,
    settings_named,
    store_head,
)
from outrider.drafters.heads.reading import EMBED, OUTPUT, HeadReader, HeadWeights
from outrider.models.dtypes import dtype_name
from outrider.models.load import Loaded

_BLOCK = (Field("block_size", int, 0, layer=False), Field("from_anchor", bool, key="sample_from_anchor", layer=False))
# DSpark alone has these.
_MARKOV = (
    Field("markov_rank", int, 0, layer=False),
    Field("confidence", bool, False, "enable_confidence_head", layer=False),
    Field("confidence_markov", bool, True, "confidence_head_with_markov", layer=False),
)
_SELECTOR = (Field("selector_top_k", int, 16, layer=False),)  # DFlash2 alone; the tensors say the rest


@settings_named
def read_block(folder: str | Path | HeadFolder, target: Loaded) -> HeadWeights[BlockConfig]:
    """Read a DFlash, DFlash2 or DSpark drafter. Raises ValueError, naming both sides, for what does not fit."""
    reader = HeadReader(folder, target, DFLASH, DFLASH2, DSPARK)
    config, tensors = _config(reader), reader.tensors
    reader.check_whole(lambda: BlockModule(config), "block drafter")
    ids = reader.token_ids(config.vocab_size, config.draft_vocab_size)
    if OUTPUT in reader.spare or len(ids) < config.vocab_size:
        tensors[OUTPUT] = reader.output_rows(config.hidden_size, ids)
    return HeadWeights(config, tensors | reader.own_embedding(config.hidden_size), ids)


def _config(reader: HeadReader) -> BlockConfig:
    path, tensors = reader.path, reader.tensors
    settings = {"sample_from_anchor": reader.kind == DSPARK} | reader.given | (reader.given.get("dflash_config") or {})
    markov = tensors.get("markov_head.markov_w1.weight")
    settings["markov_rank"] = 0 if markov is None else markov.shape[1]
    settings["enable_confidence_head"] = "confidence_head.proj.weight" in tensors
    shape = reader.shape(settings, (*_BLOCK, *_MARKOV, *_SELECTOR)) | _convolutions(reader)
    if reader.kind == DFLASH2:
        shape["selector_rank"] = reader.tensor("candidate_selector.successor_codebook").shape[1]
    if settings.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(
            f"{path} has a Markov head of the kind {settings['markov_head_type']!r}; outrider runs 'vanilla'"
        )
    if shape["block_size"] < 2:
        raise ValueError(f"{path}: block_size is {shape['block_size']}; a block has two slots or more")
    layers = 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("layers."))
    if int(settings.get("num_hidden_layers", layers)) != layers:
        raise ValueError(f"{path} has {layers} layers, and config.json says {settings['num_hidden_layers']}")
    taps = _taps(reader, settings, shape["target_hidden_size"])
    return reader.made(BlockConfig, **shape, taps=taps, num_layers=layers, mask_token_id=reader.mask(settings))


def _convolutions(reader: HeadReader) -> dict[str, int]:
    """Their shapes; nothing for a drafter without them."""
    names = (f"layers.0.attention_conv.{n}" for n in ("base_kernel", "kernel_projection.weight"))
    base, rows = (reader.tensors.get(name) for name in names)
    if base is None or rows is None:
        return {}
    groups = len(rows) // (2 * base.shape[1])
    return {"conv_kernel_size": base.shape[1], "conv_group_size": base.shape[2] // max(groups, 1)}


def _taps(reader: HeadReader, given: Mapping[str, Any], wide: int) -> tuple[int, ...]:
    """speculators counts states before a layer, all others outputs of layers, where -1 is the embedding."""
    outputs, before = given.get("target_layer_ids"), given.get("aux_hidden_state_layer_ids")
    if before is None and outputs is None:
        raise ValueError(f"{reader.path} names no layers of its target: target_layer_ids or aux_hidden_state_layer_ids")
    if before is not None:
        return reader.taps("aux_hidden_state_layer_ids", [int(i) for i in before], wide)
    ids = [int(i) + 1 for i in outputs or ()]
    return reader.taps("target_layer_ids (it counts outputs of layers, one less)", ids, wide)


def write_block(folder: str | Path, head: HeadWeights[BlockConfig], *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a DFlash or DSpark drafter in the layout of speculators, which vLLM reads; returns the folder.

    A head with a Markov bias or a confidence is a DSpark one. With a draft vocabulary its output head is written too; else
    engines take the target's. Raises ValueError for an embedding that no engine would read.
    """
    config = head.config
    if EMBED in head.tensors:
        raise ValueError("this drafter has an embedding of its own, and speculators gives block drafters the target's")
    dspark = bool(config.markov_rank) or config.confidence
    settings = speculators_settings(
        config,
        DSPARK if dspark else DFLASH,
        config.drafts,
        attention_bias=False,
        layer_types=["full_attention"] * config.num_layers,
        model_type="qwen3",
        use_sliding_window=False,
    )
    # vLLM takes sample_from_anchor False where it is missing, for DSpark too
    settings |= settings_of(config, _BLOCK, layer=False) | {
        "architectures": ["DSparkDraftModel" if dspark else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": config.layer_ids,
        "dtype": dtype_name(dtype),
        "mask_token_id": config.mask_token_id,
        # vLLM reads False as "causal in all layers", whatever the layers are; speculators ignores it without sliding layers
        "sliding_window_non_causal": True,
    }
    if dspark:
        settings |= settings_of(config, _MARKOV, layer=False) | {"markov_head_type": "vanilla"}
    return store_head(folder, settings, head.tensors | vocabulary_maps(head.token_ids, config), dtype)
