"""Tiny random models, one of each architecture: from their configuration, nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import Any

from light import torch, transformers

VOCAB = 97  # no multiple of anything

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_HEADS = {"num_key_value_heads": 4}
_WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 20,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_shared_experts": 1,
}  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen2": _BASE,
    "qwen3": {**_BASE, "head_dim": 8},
    "mistral": {**_BASE, "sliding_window": 7},
    "gemma": {**_BASE, "head_dim": 8},
    "gemma2": {
        **_BASE, **_WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {**_BASE, **_WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8},
    "phi": {**_BASE, "partial_rotary_factor": 0.5},
    "phi3": _BASE,
    "gpt2": _GPT,
    "gpt_neox": {**_BASE, **_HEADS, "rotary_pct": 0.25},
    "opt": {
        "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "word_embed_proj_dim": 32, "eos_token_id": None, "pad_token_id": 0,
    },
    "olmo2": _BASE,
    "stablelm": {**_BASE, "partial_rotary_factor": 0.25},
    "granite": {
        **_BASE, "attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
    },
    "starcoder2": {**_BASE, "sliding_window": 7},
    "cohere2": {**_BASE, **_WINDOW, "logit_scale": 1.0},
    "smollm3": {**_BASE, "no_rope_layers": [1, 0]},
    "glm4": {**_BASE, "head_dim": 8, "partial_rotary_factor": 0.5},
    "mixtral": {**_BASE, **_LOCAL},
    "phimoe": {**_BASE, **_LOCAL, "sliding_window": 6},
    "qwen2_moe": {**_BASE, **_EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**_BASE, **_EXPERTS, "head_dim": 8, "norm_topk_prob": True},
    "olmoe": {**_BASE, "num_experts": 5, "num_experts_per_tok": 3},
    "gpt_oss": {**_BASE, **_LOCAL, **_WINDOW, "head_dim": 8},
    "granitemoe": {**_BASE, **_LOCAL, "attention_multiplier": 0.3, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "deepseek_v3": {**_BASE, **_DEEPSEEK, "topk_method": "noaux_tc"},
}  # fmt: skip

# Dense models that have rows for GGUF files or for the native step, beside those above.
DENSE: dict[str, dict[str, Any]] = {
    "olmo3": {**_BASE, **_WINDOW},
    "olmo": _BASE,
    "glm": {**_BASE, "head_dim": 8, "partial_rotary_factor": 0.5},
    "cohere": {**_BASE, "logit_scale": 0.5},
    "exaone4": {**_BASE, **_WINDOW},
    "ernie4_5": {**_BASE, "head_dim": 8},
    "seed_oss": {**_BASE, "head_dim": 8, "attention_bias": False},
    "arcee": _BASE,
    "ministral3": {
        **_BASE, "head_dim": 8, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5},
    },
    "nemotron": {**_BASE, "head_dim": 8, "partial_rotary_factor": 0.5},
}  # fmt: skip

_LINEAR: dict[str, Any] = {
    **_BASE, "num_hidden_layers": 2, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    **_BASE, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_d_conv": 4, "mamba_chunk_size": 8,
}  # fmt: skip
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 20}

# Mixtures of experts, for the tests of routing.
MIXTURES: dict[str, dict[str, Any]] = {
    **{name: ARCHITECTURES[name] for name in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe")},
    "deepseek_v2": {**_BASE, **_DEEPSEEK, "topk_method": "group_limited_greedy", "n_shared_experts": 2, "n_group": 2},
    "glm4_moe_lite": {**_BASE, **_DEEPSEEK},
    "ernie4_5_moe": {
        **_BASE, "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 20, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "dots1": {**_BASE, **_DEEPSEEK, "num_key_value_heads": 2},
    "glm4_moe": {
        **_BASE, "head_dim": 8, "partial_rotary_factor": 0.5, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
}  # fmt: skip

# Layers that share keys and values with earlier ones, and read inputs of their own: none of them can be left out.
SHARED_KEYS: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        **_BASE, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6,
        "head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
}  # fmt: skip

# Models with recurrent layers.
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_LINEAR, **_SHARED},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_SHARED},
    "olmo_hybrid": _LINEAR,
    "granitemoehybrid": {**_MAMBA2, **_LOCAL, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 20},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "nemotron_h": {
        **_BASE, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8, "n_routed_experts": 4,
        "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 20, "num_experts_per_tok": 2,
        "moe_latent_size": None,
    },
    "jamba": {
        **_BASE, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "mamba": {**_MAMBA, "time_step_rank": 4},
    "falcon_mamba": {**_MAMBA, "time_step_rank": 4},
    "mamba2": {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "lfm2": {**_BASE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {
        **_BASE, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "num_dense_layers": 1,
    },
}  # fmt: skip

# No number is a multiple of the width of a vector.
ODD: dict[str, Any] = {"hidden_size": 100, "intermediate_size": 77, "num_hidden_layers": 3, "head_dim": 20}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}  # fmt: skip
MUP: dict[str, Any] = {
    "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3], "ssm_in_multiplier": 1.2, "key_multiplier": 0.6, "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.1, "ssm_out_multiplier": 0.8, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.9, 1.4],
}  # fmt: skip


def _yarn(*shares: float) -> dict[str, Any]:
    """As the published DeepSeek models have it: shares are mscale and mscale_all_dim."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
    names = ("mscale", "mscale_all_dim")
    return {"rope_parameters": rope | dict(zip(names, shares, strict=False)) | {"original_max_position_embeddings": 16}}


# Families that the native step runs: name -> (model type, changes of the tiny model).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            "llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "seed_oss", "ernie4_5", "phi3", "gemma", "gemma2",
            "gemma3_text", "olmo2", "olmo3", "exaone4", "glm", "glm4", "cohere", "cohere2", "stablelm",
            "starcoder2", "nemotron", "arcee", "phi", "ministral3",
            "mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe",
            "dots1", "qwen2_moe", "ernie4_5_moe", "bamba", "lfm2_moe", "mamba2",
        )
    },
    "llama-odd": ("llama", ODD | {"tie_word_embeddings": True}),
    "llama3-odd": ("llama", ODD | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "yarn-odd": ("llama", ODD | _yarn()),
    "qwen2-odd": ("qwen2", ODD | {"hidden_size": 96, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-odd": ("qwen3", ODD | {"hidden_act": "gelu_pytorch_tanh"}),
    "phi3-long": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": _LONG}),
    "phi-norms": ("phi", {"qk_layernorm": True, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"}),
    "cohere-norms": ("cohere", {"use_qk_norm": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "exaone4-whole": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "gemma4": ("gemma4_text", {"global_head_dim": 16, "use_double_wide_mlp": True, "final_logit_softcapping": 4.0}),
    "gemma4-equal": ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0}),
    "gemma4-experts": ("gemma4_text", {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3,
        "moe_intermediate_size": 20, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "gemma3-odd": ("gemma3_text", {"hidden_size": 36, "head_dim": 10, "final_logit_softcapping": 4.0}),
    "qwen3_moe-dense": ("qwen3_moe", {"mlp_only_layers": [1]}),
    **{f"deepseek_v2-yarn-{n}": ("deepseek_v2", _yarn(*n)) for n in ((1.0, 1.0), (0.7, 1.0))},
    **{f"deepseek_v3-yarn-{n}": ("deepseek_v3", _yarn(*n)) for n in ((0.7, 1.0), (1.0, 0.0))},
    "glm4_moe_lite-yarn": ("glm4_moe_lite", _yarn(0.7, 1.0)),
    "falcon_h1": ("falcon_h1", MUP),
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "granite_hybrid": ("granitemoehybrid", {"num_local_experts": 0, "attention_multiplier": 0.3, "logits_scaling": 2.0,
        "residual_multiplier": 0.7, "embedding_multiplier": 3.0}),
    "granite_hybrid-moe": ("granitemoehybrid", {"residual_multiplier": 0.7, "attention_multiplier": 0.3}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"], "head_dim": 8}),
    "nemotron_h-moe": ("nemotron_h", {"head_dim": 8, "routed_scaling_factor": 2.5}),
    "nemotron_h-latent": ("nemotron_h", {"head_dim": 8, "moe_latent_size": 16, "n_group": 2, "topk_group": 1}),
    "qwen3_5": ("qwen3_5_text", {"linear_num_value_heads": 6}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {"linear_num_value_heads": 6}),
}  # fmt: skip

_SEEDS = {"mistral": 1, "stablelm": 1, "mixtral": 1}  # 0 gives a near-tie somewhere in the tests' texts


def tiny(name: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model of this architecture, float32, with weights large enough that its likeliest token stands out."""
    torch.manual_seed(_SEEDS.get(name, 0))
    config = transformers.AutoConfig.for_model(
        name, **{**(ARCHITECTURES | DENSE | RECURRENT | SHARED_KEYS | MIXTURES)[name], **changes}
    )
    # transformers' sdpa leaves out Gemma 2's soft-cap; its eager attention is the definition
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for where, parameter in model.named_parameters():
            if where.endswith(("A_log", "dt_bias")):  # logarithms of decay rates, which would make states explode
                continue
            parameter.add_(torch.randn(parameter.shape) * (0.25 if parameter.dim() > 1 else 0.1))
    if model.generation_config is not None:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@cache
def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (n,), generator=draw).tolist() for n in lengths]
