"""Checkpoints of small random models, written without torch: Llama's layers, and those that differ little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
VOCAB = 97  # no multiple of anything


def write_checkpoint(
    folder: Path, kind: str = "llama", dtype: Any = np.float32, seed: int = 0, **settings: Any
) -> Path:
    """A model whose likeliest token stands out. settings: of its configuration, in place of those of two layers of 32."""
    config: dict[str, Any] = {
        "model_type": kind, "architectures": [CLASSES[kind]], "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "head_dim": settings.get("hidden_size", 32) // 4, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    } | settings  # fmt: skip
    draw, width, inner = np.random.default_rng(seed), config["hidden_size"], config["intermediate_size"]
    query, key = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        matrices = {
            "self_attn.q_proj": (query, width),
            "self_attn.k_proj": (key, width),
            "self_attn.v_proj": (key, width),
        }
        biased = [*matrices] if kind == "qwen2" or config.get("attention_bias") else []
        matrices |= {"self_attn.o_proj": (width, query), "mlp.down_proj": (width, inner)}
        matrices |= {f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        vectors = {"input_layernorm.weight": width, "post_attention_layernorm.weight": width}
        vectors |= {f"self_attn.{n}_norm.weight": config["head_dim"] for n in "qk" if kind == "qwen3"}
        vectors |= {f"{name}.bias": matrices[name][0] for name in biased}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"model.layers.{i}.{name}": (size,) for name, size in vectors.items()}
    tensors = dict[str, np.ndarray]()
    for name, shape in shapes.items():
        values = draw.normal(0, 0.25 if len(shape) > 1 else 0.1, shape) + name.endswith("norm.weight")
        tensors[name] = values.astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config |= {"dtype": np.dtype(dtype).name}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
