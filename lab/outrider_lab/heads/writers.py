"""Writes heads as other engines read them: as speculators does, for vLLM; flat, for vLLM, SGLang and SafeAILab; and for TGI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from outrider.core.files import read_settings, write_whole, written_whole
from outrider.core.types import Array
from outrider.drafters.heads.block import BlockConfig
from outrider.drafters.heads.config import FIELDS, HeadShape
from outrider.drafters.heads.eagle import LAYER_IDS, EagleConfig
from outrider.drafters.heads.files import DFLASH, DSPARK, EAGLE3, MEDUSA, TARGET_DIGEST
from outrider.drafters.heads.medusa import MedusaWeights
from outrider.drafters.heads.reading import EMBED, OUTPUT, HeadWeights

DRAFTS = 4  # draft tokens per step that other engines start with
_LAYOUTS = ("speculators", "flat")
_MEDUSA_LAYOUTS = ("vllm", "tgi")


def check_trainable(config: EagleConfig) -> None:
    """Raise ValueError unless a head is a single layer of Llama's kind. Only such heads are trained and written."""
    if config.num_layers != 1 or config.qk_norm or config.mask_token_id is not None:
        raise ValueError("heads of P-EAGLE, and of Qwen3's layers, draft here and cannot be trained or written")


def write_eagle(
    folder: str | Path,
    head: HeadWeights[EagleConfig],
    layout: str = "speculators",
    *,
    dtype: str = "bfloat16",
) -> Path:
    """Write config.json and model.safetensors; returns the folder, which is made if it is not there.

    layout: "speculators", or "flat" for the folder that vLLM and SGLang both read. A head without an embedding gets the target's
    from the engines.

    Raises ValueError for a head that the layout cannot say.
    """
    config = head.config
    if layout not in _LAYOUTS:
        raise ValueError(f"a head is written as {' or '.join(_LAYOUTS)}, got {layout!r}")
    if config.eagle1:
        raise ValueError("heads of EAGLE-1 are read, not written; EAGLE-3 heads are better at the same cost")
    check_trainable(config)
    tensors = head.tensors | vocabulary_maps(head.token_ids, config)
    settings = _said(config, "fc_norm", "norm_before_fc", "norm_output")
    layer: dict[str, Any] = {"attention_bias": config.attention_bias, "mlp_bias": False, "model_type": "llama"}
    if layout == "speculators":
        settings |= _speculators(config, EAGLE3, DRAFTS, **layer) | _said(config, "norm_before_residual")
        settings |= {"architectures": ["Eagle3DraftModel"], LAYER_IDS: config.layer_ids, "embed_requires_grad": False}
        settings["dtype"] = dtype
    else:
        settings = {n: said for n, said in settings.items() if said} | _layers(config, **layer) | _flat(config)
        settings["torch_dtype"] = dtype
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    return _store(folder, settings, tensors, dtype)


def _flat(config: EagleConfig) -> dict[str, Any]:
    """vLLM reads the list at the top and counts states before a layer; SGLang reads the other and counts outputs."""
    ids = config.layer_ids
    if 0 in ids:
        raise ValueError("SGLang cannot give a head the embedding (layer id 0); write layout='speculators'")
    if config.norm_before_residual:
        raise ValueError(
            "SGLang ignores norm_before_residual, so this head would be wrong there; write layout='speculators'"
        )
    rope = dict(config.rope_parameters)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        LAYER_IDS: ids,
        "eagle_config": {LAYER_IDS: [i - 1 for i in ids], "use_aux_hidden_state": True},
        "num_aux_hidden_states": len(ids),
        "rope_theta": rope.pop("rope_theta"),
    }
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = rope
    if wide := _wider(config):  # null breaks SGLang, so it is there only if it says something
        settings["target_hidden_size"] = wide
    if config.verifier:
        settings["base_model_name_or_path"] = config.verifier
    return settings


def write_block(folder: str | Path, head: HeadWeights[BlockConfig], *, dtype: str = "bfloat16") -> Path:
    """Write a DFlash or DSpark drafter in the layout of speculators, which vLLM reads; returns the folder.

    A head with a Markov bias or a confidence is a DSpark one. With a draft vocabulary its output head is written too; else
    engines take the target's. Raises ValueError for an embedding that no engine would read.
    """
    config = head.config
    if EMBED in head.tensors:
        raise ValueError("this drafter has an embedding of its own, and speculators gives block drafters the target's")
    dspark = bool(config.markov_rank) or config.confidence
    settings = _speculators(
        config,
        DSPARK if dspark else DFLASH,
        config.drafts,
        attention_bias=False,
        layer_types=["full_attention"] * config.num_layers,
        model_type="qwen3",
        use_sliding_window=False,
    )
    # vLLM takes sample_from_anchor False where it is missing, for DSpark too
    settings |= _said(config, "block_size") | {
        "sample_from_anchor": config.from_anchor,
        "architectures": ["DSparkDraftModel" if dspark else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": config.layer_ids,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        # vLLM reads False as "causal in all layers", whatever the layers are; speculators ignores it without sliding layers
        "sliding_window_non_causal": True,
    }
    if dspark:
        settings |= _said(config, "markov_rank") | {
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_markov,
            "markov_head_type": "vanilla",
        }
    return _store(folder, settings, head.tensors | vocabulary_maps(head.token_ids, config), dtype)


def write_medusa(
    folder: str | Path,
    head: MedusaWeights,
    layout: str = "vllm",
    *,
    dtype: str = "bfloat16",
    verifier: str | None = None,
) -> Path:
    """Write config.json and the weights; returns the folder, which is made if it is not there.

    layout: "vllm", or "tgi" for the names of FasterDecoding, which TGI reads too. verifier: name of the target.

    Raises ValueError for heads that the layout cannot say.
    """
    if layout not in _MEDUSA_LAYOUTS:
        raise ValueError(f"Medusa heads are written as {' or '.join(_MEDUSA_LAYOUTS)}, got {layout!r}")
    count, layers, outputs = len(head.blocks), len(head.blocks[0]), head.outputs
    tgi, shared = layout == "tgi", len(outputs) == 1 and count > 1
    block, output = ("{}.{}.linear", "{}.{}.weight") if tgi else ("blocks.{}.layers.{}", "lm_heads.{}.weight")
    tensors: dict[str, Array] = {OUTPUT: outputs[0]} if shared else {}
    if not shared:
        tensors |= {output.format(i, layers): m for i, m in enumerate(outputs)}
    for i, blocks in enumerate(head.blocks):
        for j, (weight, bias) in enumerate(blocks):
            name = block.format(i, j)
            tensors |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    settings: dict[str, Any] = {"model_type": MEDUSA, "torch_dtype": dtype}
    if verifier:
        settings["base_model_name_or_path"] = verifier
    if tgi:
        if shared or head.token_ids is not None or head.logit_scale != 1.0:
            raise ValueError(
                "the layout 'tgi' has an output matrix of all tokens for each head, or none; these heads share one, have a draft "
                "vocabulary or scale their logits: write layout='vllm'"
            )
        settings |= {"medusa_num_heads": count, "medusa_num_layers": layers}
        return _store(folder, settings, tensors, dtype, "medusa_lm_head.safetensors")
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
    return _store(folder, settings, tensors, dtype)


def _store(
    folder: str | Path,
    settings: dict[str, Any],
    tensors: Mapping[str, Array],
    dtype: str,
    file: str = "model.safetensors",
) -> Path:
    """Write config.json and the file of weights, each whole. Returns the folder, which is made if it is not there.

    dtype: of the floating point tensors.
    """
    out = Path(folder).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    stored = {n: np.ascontiguousarray(t, None if t.dtype.kind in "ib" else kind) for n, t in tensors.items()}
    with written_whole(out / file) as partial:
        save_file(stored, partial, metadata={"format": "pt"})
    with written_whole(out / "config.json") as partial:
        partial.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return out


def name_target(folder: Path, digest: str) -> None:
    """Write into a head's config.json which model it is for. digest: of `target_digest`."""
    settings = read_settings(folder / "config.json") | {TARGET_DIGEST: digest}
    write_whole(folder / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _said(config: HeadShape, *names: str) -> dict[str, Any]:
    """Fields that config.json has under the same name."""
    return {name: getattr(config, name) for name in names}


def _speculators(config: HeadShape, algorithm: str, tokens: int, **layer: Any) -> dict[str, Any]:
    """What every folder of speculators says. tokens: draft tokens per step that vLLM starts with. layer: of its layers."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": config.verifier},
        },
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "target_hidden_size": _wider(config),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers(config, rope_parameters=config.rope_parameters, **layer),
    }


def vocabulary_maps(token_ids: Array, config: HeadShape) -> dict[str, Array]:
    """d2t int64 [draft_vocab], the *offset* from each row to its token; t2d bool [vocab], the tokens that have a row.

    Nothing for a head of all tokens."""
    if config.draft_vocab_size == config.vocab_size:
        return {}
    has = np.zeros(config.vocab_size, bool)
    has[token_ids] = True
    return {"d2t": token_ids - np.arange(len(token_ids)), "t2d": has}


def _layers(config: HeadShape, **more: Any) -> dict[str, Any]:
    """What a configuration of transformers says of a head's layers."""
    said = {"num_hidden_layers": config.num_layers, "tie_word_embeddings": False}
    elsewhere = ("draft_vocab_size", "target_hidden_size")  # where a layout has a configuration of the layers
    return _said(config, *(f.name for f in FIELDS if f.name not in elsewhere)) | said | more


def _wider(config: HeadShape) -> int | None:
    """The width of the features, if it is not the head's."""
    return config.target_hidden_size if config.target_hidden_size != config.hidden_size else None
