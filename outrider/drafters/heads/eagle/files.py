"""Reads heads of the EAGLE family. Writes them as speculators does, for vLLM, or flat, for vLLM, SGLang and SafeAILab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.drafters.heads.config import (
    Field,
    default_taps,
    layer_settings,
    settings_of,
    speculators_settings,
    vocabulary_maps,
    wider,
)
from outrider.drafters.heads.eagle.module import Eagle, EagleConfig
from outrider.drafters.heads.files import EAGLE1, EAGLE3, PEAGLE, HeadFolder, settings_named, store_head
from outrider.drafters.heads.reading import EMBED, OUTPUT, HeadReader, HeadWeights, log
from outrider.models.base import FINAL_NORM
from outrider.models.dtypes import dtype_name
from outrider.models.load import Loaded

LAYOUTS = ("speculators", "flat")
DRAFTS = 4  # draft tokens per step that other engines start with
_NAMES = {EAGLE3: "EAGLE-3", EAGLE1: "EAGLE-1", PEAGLE: "P-EAGLE"}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = (Field("fc_norm", bool, False, layer=False), Field("norm_before_fc", bool, False, layer=False))  # have tensors
_OUTPUT = Field("norm_output", bool, False, layer=False)
_RESIDUAL = Field("norm_before_residual", bool, False, layer=False)


@settings_named
def read_eagle(folder: str | Path | HeadFolder, target: Loaded) -> HeadWeights[EagleConfig]:
    """Read a head of EAGLE-3, EAGLE-3.1, P-EAGLE or EAGLE-1 for a target.

    Raises ValueError, naming both sides, for settings, tensors or a vocabulary that do not fit each other or the target.
    """
    reader = HeadReader(folder, target, EAGLE3, EAGLE1, PEAGLE)
    config, tensors, parallel = _config(reader), reader.tensors, reader.kind == PEAGLE
    ids = reader.token_ids(config.vocab_size, config.draft_vocab_size)
    reader.check_whole(lambda: Eagle(config), f"{_NAMES[reader.kind]} head")
    output = {OUTPUT: reader.output_rows(config.hidden_size, ids)}
    # the embedding of P-EAGLE is trained, the row of the mask first of all
    return HeadWeights(config, tensors | output | reader.own_embedding(config.hidden_size, trained=parallel), ids)


def _config(reader: HeadReader) -> EagleConfig:
    path, settings, tensors = reader.path, reader.given, reader.tensors
    eagle1, parallel = reader.kind == EAGLE1, reader.kind == PEAGLE
    layers = int(settings.get("num_hidden_layers", 1))
    if layers != 1 and not parallel:
        raise ValueError(
            f"{path}: the head has {layers} layers; engines disagree about the norms of the second, so outrider runs EAGLE heads "
            "of one, and P-EAGLE heads of several"
        )
    shape = reader.shape(settings, (_OUTPUT, _RESIDUAL))
    norms = {"fc_norm": "fc_norm.0.weight" in tensors, "norm_before_fc": "input_norm.weight" in tensors}
    for name, there in norms.items():
        said = settings.get(name, (settings.get("eagle_config") or {}).get(name))
        if said is not None and bool(said) != there:
            raise ValueError(
                f"{path}: config.json says {name} is {said}, and the file {'has' if there else 'lacks'} its tensors; one of the "
                "two is of another head"
            )
    return reader.made(
        EagleConfig,
        **shape,
        **norms,
        taps=(FINAL_NORM,) if eagle1 else _taps(reader, shape["target_hidden_size"]),
        num_layers=layers,
        eagle1=eagle1,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        mask_token_id=reader.mask(settings) if parallel else None,
        parallel_drafts=_parallel_drafts(reader) if parallel else 0,
    )


def _taps(reader: HeadReader, wide: int) -> tuple[int, ...]:
    """The layers that the head reads, by the first list that the folder has; docs/guides/heads.md says how formats count."""
    settings, key = reader.given, _LAYER_IDS
    ids, inner = settings.get(key), (settings.get("eagle_config") or {}).get(key)
    if ids is None and inner is not None:
        key = f"eagle_config.{key} (it counts outputs of layers, one less)"
        ids = [i + 1 for i in inner]  # SGLang's list
    if ids is None:
        ids = [t + 1 for t in default_taps(reader.target.model.num_layers)]
        said = (
            "%s names no layers of its target; the usual ones, before layers %s, may be others than it was trained on"
        )
        log.warning(said, reader.path, ids)
    return reader.taps(key, ids, wide)


def _parallel_drafts(reader: HeadReader) -> int:
    """Tokens that a P-EAGLE head was trained to draft at once: what its folder proposes."""
    methods = reader.given.get("speculators_config", {}).get("proposal_methods") or [{}]
    count = int(methods[0].get("speculative_tokens") or 0)
    if count < 1:
        raise ValueError(
            f"{reader.path}: speculators_config names no speculative_tokens, the tokens that the head drafts"
        )
    return count


def write_eagle(
    folder: str | Path,
    head: Eagle,
    layout: str = "speculators",
    *,
    dtype: torch.dtype = torch.bfloat16,
    embedding: bool = False,
) -> Path:
    """Write config.json and model.safetensors; returns the folder, which is made if it is not there.

    layout: "speculators", or "flat" for the folder that vLLM and SGLang both read. embedding: write the table of tokens too;
    without one, engines take the target's.

    Raises ValueError for a head that the layout cannot say.
    """
    config, tensors = head.config, head.state_dict()
    if layout not in LAYOUTS:
        raise ValueError(f"a head is written as {' or '.join(LAYOUTS)}, got {layout!r}")
    if config.eagle1:
        raise ValueError("heads of EAGLE-1 are read, not written; EAGLE-3 heads are better at the same cost")
    if not embedding:
        del tensors[EMBED]
    tensors |= vocabulary_maps(head.token_ids, config)
    settings = settings_of(config, (*_NORMS, _OUTPUT), layer=False)
    layer: dict[str, Any] = {"attention_bias": config.attention_bias, "mlp_bias": False, "model_type": "llama"}
    if layout == "speculators":
        settings |= speculators_settings(config, EAGLE3, DRAFTS, **layer)
        settings |= {"architectures": ["Eagle3DraftModel"], _LAYER_IDS: config.layer_ids, "embed_requires_grad": False}
        settings |= settings_of(config, (_RESIDUAL,), layer=False) | {"dtype": dtype_name(dtype)}
    else:
        settings = {n: said for n, said in settings.items() if said} | layer_settings(config, **layer) | _flat(config)
        settings["torch_dtype"] = dtype_name(dtype)
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    return store_head(folder, settings, tensors, dtype)


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
        _LAYER_IDS: ids,
        "eagle_config": {_LAYER_IDS: [i - 1 for i in ids], "use_aux_hidden_state": True},
        "num_aux_hidden_states": len(ids),
        "rope_theta": rope.pop("rope_theta"),
    }
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = rope
    if wide := wider(config):  # null breaks SGLang, so it is there only if it says something
        settings["target_hidden_size"] = wide
    if config.verifier:
        settings["base_model_name_or_path"] = config.verifier
    return settings
