"""What the writers of heads share: the two files of a folder, and the settings that all heads of a layout have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.core.files import written_whole
from outrider.drafters.heads.config import FIELDS, HeadShape, settings_of


def store_head(
    folder: str | Path,
    settings: dict[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    file: str = "model.safetensors",
) -> Path:
    """Write config.json and the file of weights, each whole. Returns the folder, which is made if it is not there.

    dtype: of the floating point tensors. They are copied, because safetensors asks for tensors that share no memory.
    """
    out = Path(folder).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    stored = {
        n: t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype, copy=True).contiguous()
        for n, t in tensors.items()
    }
    with written_whole(out / file) as partial:
        save_file(stored, partial, metadata={"format": "pt"})
    with written_whole(out / "config.json") as partial:
        partial.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return out


def name_of(dtype: torch.dtype) -> str:
    """As a config.json says it."""
    return str(dtype).removeprefix("torch.")


def speculators_settings(config: HeadShape, algorithm: str, tokens: int, **layer: Any) -> dict[str, Any]:
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
        "target_hidden_size": wider(config),
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_settings(config, rope_parameters=config.rope_parameters, **layer),
    }


def vocabulary_maps(token_ids: Tensor, config: HeadShape) -> dict[str, Tensor]:
    """d2t int64 [draft_vocab], the *offset* from each row to its token; t2d bool [vocab], the tokens that have a row.

    Nothing for a head of all tokens."""
    if config.draft_vocab_size == config.vocab_size:
        return {}
    ids, has = token_ids.cpu(), torch.zeros(config.vocab_size, dtype=torch.bool)
    has[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": has}


def layer_settings(config: HeadShape, **more: Any) -> dict[str, Any]:
    """What a configuration of transformers says of a head's layers."""
    said = {"num_hidden_layers": config.num_layers, "tie_word_embeddings": False}
    return settings_of(config, FIELDS, layer=True) | said | more


def wider(config: HeadShape) -> int | None:
    """The width of the features, if it is not the head's."""
    return config.target_hidden_size if config.target_hidden_size != config.hidden_size else None
