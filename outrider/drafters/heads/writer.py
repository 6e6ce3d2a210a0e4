"""Writes a head as other engines read it: the layout of speculators (vLLM), or the flat one (vLLM, SGLang, SafeAILab)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.core.files import written_whole
from outrider.drafters.heads.config import FIELDS, HeadConfig, HeadShape, settings_of
from outrider.drafters.heads.eagle_module import Eagle

LAYOUTS = ("speculators", "flat")


def write_eagle(
    folder: str | Path,
    head: Eagle,
    layout: str = "speculators",
    *,
    dtype: torch.dtype = torch.bfloat16,
    embedding: bool = False,
    tokens: int = 4,
) -> Path:
    """Write config.json and model.safetensors; returns the folder, which is made if it is not there.

    layout: "speculators", or "flat" for the folder that vLLM and SGLang both read. embedding: write the table of tokens too;
    without one, engines take the target's. tokens: draft tokens per step that other engines start with.

    Raises ValueError for a head that the layout cannot say.
    """
    config, out = head.config, Path(folder).expanduser()
    if layout not in LAYOUTS:
        raise ValueError(f"a head is written as {' or '.join(LAYOUTS)}, got {layout!r}")
    if config.eagle1:
        raise ValueError("heads of EAGLE-1 are read, not written; EAGLE-3 heads are better at the same cost")
    own = not torch.equal(head.token_ids.cpu(), torch.arange(config.vocab_size))
    tensors = {n: t.detach().to("cpu", dtype).contiguous() for n, t in head.state_dict().items()}
    if not embedding:
        del tensors["embed_tokens.weight"]
    if own:
        tensors |= vocabulary_maps(head.token_ids.cpu(), config.vocab_size)
    settings = _speculators(config, tokens) if layout == "speculators" else _flat(config)
    settings["dtype" if layout == "speculators" else "torch_dtype"] = str(dtype).removeprefix("torch.")
    if layout == "flat":
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    return store_head(out, settings, tensors)


def store_head(
    out: Path, settings: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> Path:
    """Write config.json and the file of weights, each whole. Returns the folder, which is made if it is not there."""
    out.mkdir(parents=True, exist_ok=True)
    with written_whole(out / file) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    with written_whole(out / "config.json") as partial:
        partial.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return out


def speculators_settings(algorithm: str, tokens: int, verifier: str | None) -> dict[str, Any]:
    """What every folder of speculators says. tokens: draft tokens per step that vLLM starts with."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": verifier},
        },
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
    }


def vocabulary_maps(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t int64 [draft_vocab], the *offset* from each row to its token; t2d bool [vocab], the tokens that have a row."""
    has = torch.zeros(vocab_size, dtype=torch.bool)
    has[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": has}


def layer_settings(config: HeadShape, **more: Any) -> dict[str, Any]:
    """What a configuration of transformers says of a head's layers."""
    said = {"num_hidden_layers": config.num_layers, "tie_word_embeddings": False}
    return settings_of(config, FIELDS, layer=True) | said | more


def wider(config: HeadShape) -> int | None:
    """The width of the features, if it is not the head's."""
    return config.target_hidden_size if config.target_hidden_size != config.hidden_size else None


def _layer(config: HeadConfig) -> dict[str, Any]:
    return layer_settings(config, attention_bias=config.attention_bias, mlp_bias=False, model_type="llama")


def _flags(config: HeadConfig) -> dict[str, Any]:
    return {n: getattr(config, n) for n in ("fc_norm", "norm_before_fc", "norm_output")}


def _speculators(config: HeadConfig, tokens: int) -> dict[str, Any]:
    return (
        _flags(config)
        | speculators_settings("eagle3", tokens, config.verifier)
        | {
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": config.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": config.layer_ids,
            "embed_requires_grad": False,
            "norm_before_residual": config.norm_before_residual,
            "target_hidden_size": wider(config),
            "transformer_layer_config": _layer(config) | {"rope_parameters": config.rope_parameters},
        }
    )


def _flat(config: HeadConfig) -> dict[str, Any]:
    """vLLM reads the list at the top and counts states before a layer; SGLang reads the other and counts outputs."""
    ids = config.layer_ids
    if 0 in ids:
        raise ValueError("SGLang cannot give a head the embedding (layer id 0); write layout='speculators'")
    if config.norm_before_residual:
        raise ValueError(
            "SGLang ignores norm_before_residual, so this head would be wrong there; write layout='speculators'"
        )
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    own: dict[str, Any] = {} if kind == "default" else {"rope_scaling": rope}
    if wide := wider(config):  # null breaks SGLang, so it is there only if it says something
        own["target_hidden_size"] = wide
    if config.verifier:
        own["base_model_name_or_path"] = config.verifier
    flags = {n: given for n, given in _flags(config).items() if given}
    return (
        _layer(config)
        | flags
        | own
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids], "use_aux_hidden_state": True},
            "num_aux_hidden_states": len(ids),
            "rope_theta": theta,
        }
    )
