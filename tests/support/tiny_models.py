"""Tiny random models of any class of transformers, made from its configuration. Nothing is downloaded.

The numbers of a configuration become small by their names. What a name cannot tell is in `_TINY`. The kinds of layers, the
ratio of heads, tied embeddings, activations and the like stay. So what runs for the tiny model runs for the large one.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 97  # no multiple of anything
LENGTH = 512  # positions that a tiny model can read
_MOST_LAYERS = 8
_EXPERTS, _PER_TOKEN = 8, 2

# What a number becomes, by its name. The first pattern that fits counts; None leaves it as it is.
_NUMBERS: list[tuple[str, int | None]] = [
    (r".*token_id|.*_token_index|.*_type_ids?", None),
    (r".*vocab_size.*|n_vocab", VOCAB_SIZE),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length|max_target_positions", LENGTH),
    (r"original_max_position_embeddings", LENGTH),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"(v|qk_nope|index|linear(_key|_value)?|swa|mamba|global)?_?(head_dim|head_size|headdim|d_head|dim_head)", 8),
    (r"n_group", 2),
    (r"topk_group", 1),
    (r"attention_hidden_size|mamba_d_ssm", 64),
    (r"attention_head_dim", 16),
    (r"kv_channels|attention_head_size|d_kv|dim_head|swa_head_dim|swa_v_head_dim", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r".*lora_rank|adapter_rank|.*_rank", 16),
    (r"(hidden_size|d_model|n_embd|emb_dim|dim_model|embedding_dim|embedding_size|lru_width|word_embed_proj_dim|hidden_dim)", 32),
    (r"backbone_hidden_size|input_embedding_size|output_embedding_size|.*hidden_size", 32),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size|intermediate_size_mlp).*|dff|d_inner|dim_ff", 48),
    (r"sliding_window(_size)?|local_attention|attention_chunk_size|rel_extent", 8),
    (r"floor_scale", 6),
    (r"keep_window_size", LENGTH),
    (r".*window_size", 8),
    (r"(.*_)?chunk_size|mamba_chunk_size|max_inference_chunksize", 8),
    (r".*(state_size|d_state)", 8),
    (r"n_routed_experts|num_experts|num_local_experts|moe_num_experts|.*num_experts", _EXPERTS),
    (r"num_experts_per_tok|moe_k|moe_topk|num_experts_per_token|top_k_experts", _PER_TOKEN),
    (r"index_topk", LENGTH),
    (r"num_codebooks", 2),
    (r"image_size", 16),
    (r"(.*_)?patch_size", 8),
]  # fmt: skip
_LAYERS = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|num_(en|de)coder_layers|num_blocks|depth"
)
_HEADS = re.compile(
    r"(swa_)?num_attention_heads|n_heads?|num_heads|attention_heads|(en|de)coder_attention_heads|index_n_heads"
)
_KV_HEADS = re.compile(r"(swa_)?(num_key_value_heads|n_kv_heads|num_kv_heads|kv_n_heads|multi_query_group_num)")

# By model_type: what the configuration of a class needs to be a whole one. Its own defaults lack it.
_MISSING: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [22, 22, 20]}
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16, "num_dense_layers": 1},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 16, "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 97, "split_ngram_parts": 1,
    },
}  # fmt: skip
# By model_type: numbers that hang together in a way of their own.
_TINY: dict[str, dict[str, Any]] = {
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "rwkv": {"attention_hidden_size": 32, "rescale_every": 1},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "max_inference_chunksize": LENGTH},
    "zamba": {"mamba_dt_rank": 8},
}


def whole_config(model_type: str) -> PreTrainedConfig:
    """The configuration that a class has by default, with what a model of it needs besides. Raises what the class raises."""
    missing = _MISSING.get(model_type, {})
    kind: Any = CONFIG_MAPPING[model_type]
    if hasattr(kind(**missing), "is_decoder"):  # the BERT family: it attends both ways without
        return kind(is_decoder=True, **missing)
    config = kind(**missing)
    for name, sub in vars(config).items():  # the text model of one with pictures
        if isinstance(sub, PreTrainedConfig) and sub.model_type in _MISSING:
            setattr(config, name, type(sub)(**_MISSING[sub.model_type]))
    return config


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A small configuration with the same kinds of layers. Raises what the class raises for numbers that do not fit."""
    return type(config).from_dict(_shrunk(config.to_dict()))


def _shrunk(given: dict[str, Any]) -> dict[str, Any]:
    layers = next((v for k, v in given.items() if _LAYERS.fullmatch(k) and isinstance(v, int)), 0)
    kept = _kept_layers(given, layers)
    heads = next((v for k, v in given.items() if _HEADS.fullmatch(k) and isinstance(v, int)), None)
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("transformers_version", "quantization_config", "_name_or_path", "output_attentions"):
            continue
        if (
            isinstance(value, dict)
            and all(str(k).isdigit() and isinstance(v, dict) for k, v in value.items())
            and value
        ):  # settings of some layers
            out[name] = {str(kept.index(int(k))): _shrunk(v) for k, v in value.items() if int(k) in kept}
        elif isinstance(value, dict) and "model_type" in value:
            out[name] = {k: v for k, v in _shrunk(value).items() if v != ""}
        elif name in ("rope_parameters", "rope_scaling"):
            out[name] = _rotary(value, given)
        elif isinstance(value, list) and layers and len(value) == layers:
            out[name] = [_number(name, value[i], len(kept), heads) for i in kept]
        elif isinstance(value, list) and name.endswith(("layer_ids", "layer_indices")):
            out[name] = [kept.index(i) for i in value if i in kept]
        else:
            out[name] = _number(name, value, len(kept), heads)
    if given.get("num_kv_shared_layers"):
        out["num_kv_shared_layers"] = len(kept) // 2
    if "qk_rope_head_dim" in given:
        out["v_head_dim"] = 16  # a panel of the kernels
        out |= {"qk_head_dim": 12} if "qk_head_dim" in given else {}
        out |= {"head_dim": 4} if given.get("head_dim") == given["qk_rope_head_dim"] else {}
    return _tokens(out) | _TINY.get(str(given.get("model_type")), {})


def _rotary(value: Any, config: dict[str, Any]) -> Any:
    """The same rotary embedding for heads of 8 (4 with latent attention)."""
    if not isinstance(value, dict):
        return value
    share = value.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    pairs = int((4 if "qk_rope_head_dim" in config else 8) * share) // 2
    out = {name: _rotary(each, config) for name, each in value.items()}
    for name in ("short_factor", "long_factor"):
        if name in value:
            out[name] = value[name][:pairs]
    if "mrope_section" in value:
        third = pairs // 3
        out["mrope_section"] = [pairs - 2 * third - (pairs > 3), third + (pairs > 3), third]
    if "original_max_position_embeddings" in value:
        out["original_max_position_embeddings"] = LENGTH
    return out


def _kept_layers(given: dict[str, Any], layers: int) -> list[int]:
    """The first layers that have one of each kind, two at least. If these are many, one layer of each kind."""
    kinds = given.get("layer_types") or given.get("layers_block_type") or []
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if given.get("num_kv_shared_layers"):  # each kind with keys of its own, and with those of another layer
        return sorted([*first, *(len(kinds) - 1 - kinds[::-1].index(kind) for kind in dict.fromkeys(kinds))])
    last = max([*first, given.get("attn_layer_offset") or 0])
    if given.get("model_type") == "zamba":  # the second such layer has the weights of the first
        last = [i for i, kind in enumerate(kinds) if kind == "hybrid"][1]
    if given.get("model_type") == "zamba2":  # two uses of a shared block; the model looks for a second one
        return [0, *[i for i, kind in enumerate(kinds) if kind == "hybrid"][:2]]
    if last < _MOST_LAYERS:
        return [*range(min(max(last + 1, 2), layers or 2))]
    return sorted({*first, 0, 1})


def _number(name: str, value: Any, layers: int, heads: int | None) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _LAYERS.fullmatch(name):
        return min(value, layers)
    if _HEADS.fullmatch(name):
        return min(value, 4)
    if _KV_HEADS.fullmatch(name):
        return value if value <= 1 else 4 if heads is None or value >= heads else 2
    for pattern, small in _NUMBERS:
        if re.fullmatch(pattern, name):
            return value if small is None else min(value, small)
    return value


def _tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Special tokens within the vocabulary. A text has no end token, so it has the length that a test asks for."""
    size = config.get("vocab_size", VOCAB_SIZE)
    out = dict(config)
    for name, value in config.items():
        if name == "eos_token_id":
            out[name] = None
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= size:
            out[name] = value % size
    return out


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model of a configuration that is small already, float32, whose likeliest token stands out.

    Its attention is "eager", the definition. Raises what the class raises.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape) * (0.25 if parameter.dim() > 1 else 0.1))
    if model.generation_config is not None:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        model.generation_config.forced_eos_token_id = model.generation_config.forced_bos_token_id = None
    return cast(PreTrainedModel, model)
