"""Settings of transformers' configurations, and where GGUF files have them.

Sources: llama.cpp's convert_hf_to_gguf.py and the readers in its src/models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.models.checkpoint import UnsupportedModel
from outrider.models.gguf.reader import GGUFFile

_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
_STILL = 1e20  # a pair of numbers whose frequency is divided by this is not rotated
_SIGMOID = 2  # llama.cpp's number of a router

Settings = dict[str, Any]
"""Settings of transformers, and where they come from: the key of a positive number that must be there, a tuple of a key and its
default if there is one, or a function of the file."""


def read(file: GGUFFile, settings: Settings) -> dict[str, Any]:
    """The values of settings. Raises ValueError for a number that is not there."""
    return {
        name: how(file) if callable(how) else number(file, how) if isinstance(how, str) else file.get(*how)
        for name, how in settings.items()
    }


def number(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(key, default)
    if isinstance(value, list) and len(some := {*value} - {0}) == 1:  # of each layer; 0: the layer has none
        (value,) = some
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = "differs from layer to layer" if isinstance(value, list) else f"is {value!r}"
        raise ValueError(f"{file.paths[0]}: {file.architecture}.{key} {what}; outrider needs one positive number")
    positions = "context" in key or "window" in key
    most = len(file.tensors) if key == "block_count" else 2**31 - 1 if positions else file.largest
    if value > most:
        raise ValueError(
            f"{file.paths[0]}: {file.architecture}.{key} is {value}, and the file has {len(file.tensors)} tensors of at most "
            f"{file.largest} rows or columns; it is not consistent"
        )
    return value


def head_dim(file: GGUFFile) -> int:
    hidden, heads = number(file, "embedding_length"), number(file, "attention.head_count")
    return number(file, "attention.key_length", hidden // heads)


def rotary(file: GGUFFile, head_dim: int, interleaved: bool) -> dict[str, Any]:
    """transformers' rope_parameters. Frequency factors of a tensor (rope_freqs) are applied to the built model."""
    turned = number(file, "rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 10000.0))}
    if turned != head_dim:
        if interleaved:
            raise UnsupportedModel(f"{file.paths[0]} rotates {turned} of {head_dim} dimensions, in interleaved pairs")
        rope["partial_rotary_factor"] = turned / head_dim
    stretch = file.get("rope.scale_linear", 0.0)
    kind, factor = file.get("rope.scaling.type", "none"), file.get("rope.scaling.factor", stretch)
    if kind == "none" and stretch:
        kind = "linear"
    if "rope_factors_long.weight" in file.tensors:
        first = number(file, "rope.scaling.original_context_length", number(file, "context_length"))
        return rope | {
            "rope_type": "longrope",
            "long_factor": file.floats("rope_factors_long.weight").tolist(),
            "short_factor": file.floats("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": first,
            "attention_factor": file.get("rope.scaling.attn_factor"),
        }
    if kind == "none" or not factor:
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise UnsupportedModel(f"{file.paths[0]} has rotary scaling {kind!r}; outrider knows linear, yarn and longrope")
    first = number(file, "rope.scaling.original_context_length")
    rope |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": first}
    for key, name in _YARN.items():
        if (value := file.get(f"rope.scaling.{key}")) is not None:
            rope[name] = float(value)
    return rope


def has(*tensors: str) -> Callable[[GGUFFile], bool]:
    """Whether a file has one of these tensors."""
    return lambda file: any(name in file.tensors for name in tensors)


def some(*ends: str) -> Callable[[GGUFFile], bool]:
    """Whether a file has a tensor whose name ends like this."""
    return lambda file: any(name.endswith(ends) for name in file.tensors)


def always(value: Any) -> Callable[[GGUFFile], Any]:
    return lambda file: value


def _alternating(pattern: int, key: str | None = "attention.sliding_window_pattern") -> Callable[[GGUFFile], list[str]]:
    """Of each so many layers the last one sees all tokens. Or the file says for each layer whether it has a window."""

    def types(file: GGUFFile) -> list[str]:
        said, layers = file.get(key, pattern) if key else pattern, range(number(file, "block_count"))
        local = said if isinstance(said, list) else [(i + 1) % said for i in layers]
        return ["sliding_attention" if each else "full_attention" for each in local]

    return types


def _kinds(tensor: str, kind: str) -> Callable[[GGUFFile], list[str]]:
    """kind: of the layers that have this tensor. The others attend."""

    def types(file: GGUFFile) -> list[str]:
        layers = range(file.get("block_count") - file.get("nextn_predict_layers", 0))
        return [kind if f"blk.{i}.{tensor}.weight" in file.tensors else "full_attention" for i in layers]

    return types


def inner_per(key: str) -> Callable[[GGUFFile], int]:
    """The channels of a mixer over another number."""
    return lambda file: file.get("ssm.inner_size") // file.get(key)


def _scale(file: GGUFFile) -> float:
    heads, hidden = number(file, "attention.head_count"), number(file, "embedding_length")
    return file.get("attention.scale") or (hidden // heads) ** -0.5


def _gemma_scale(largest: int) -> Callable[[GGUFFile], int]:
    """Scores are divided by the root of this. The file does not say it; llama.cpp knows the largest model by its layers."""

    def scale(file: GGUFFile) -> int:
        each = number(file, "embedding_length") // number(file, "attention.head_count")
        return each if number(file, "block_count") == largest else number(file, "attention.key_length", each)

    return scale


def _shared_width(file: GGUFFile) -> int:
    """Of the expert that all nodes have, beside the chosen ones."""
    width = number(file, "expert_feed_forward_length")
    return number(file, "expert_shared_feed_forward_length", width)


def _nemotron_kinds(file: GGUFFile) -> list[str]:
    kinds = {"ssm_in": "mamba", "attn_q": "attention", "ffn_up": "mlp"}
    return [
        next((kind for name, kind in kinds.items() if f"blk.{i}.{name}.weight" in file.tensors), "moe")
        for i in range(file.get("block_count"))
    ]


def _by_window(file: GGUFFile, window: dict[str, Any]) -> dict[str, Any]:
    """Angles of layers with and without a window. The scaled ones are those without."""
    return {"full_attention": rotary(file, 1, False) | {"partial_rotary_factor": 1.0}, "sliding_attention": window}


def mistral3(file: GGUFFile) -> dict[str, Any]:
    """Mistral Small 3 has this name too, and no growing queries."""
    if not (beta := file.get("attention.temperature_scale")):
        return read(file, LLAMA) | {"model_type": "mistral"}
    share = file.get("rope.scaling.yarn_log_multiplier", 0.0)
    scaling = {"llama_4_scaling_beta": beta, "mscale": 1.0, "mscale_all_dim": share}
    return {"rope_parameters": rotary(file, head_dim(file), False) | scaling}


def deepseek2(file: GGUFFile) -> dict[str, Any]:
    """Keys and values of a latent. Files before 2025 have the lengths of keys and values without names of their own."""
    heads, rotated, latent = (
        number(file, name) for name in ("attention.head_count", "rope.dimension_count", "attention.kv_lora_rank")
    )
    key, value = (
        number(file, f"attention.{n}_length_mla", number(file, f"attention.{n}_length")) for n in ("key", "value")
    )
    angles, share = rotary(file, rotated, False), file.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    if angles["rope_type"] == "yarn":
        angles |= {"mscale": share, "mscale_all_dim": share}  # llama.cpp scales the scores, and not the angles
    sigmoid = file.get("expert_gating_func", 1) == _SIGMOID
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "topk_method": "greedy" if file.get("expert_group_count", 1) == 1 else "group_limited_greedy",
        "intermediate_size": number(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": latent,
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": angles,
    }


def gemma4(file: GGUFFile) -> dict[str, Any]:
    """Its layers with windows have heads of another size than the others. Of those, `rope_freqs` shows how much is rotated."""
    types = _alternating(6)(file)
    inputs, width = file.get("embedding_length_per_layer_input", 0), file.get("feed_forward_length")
    widths, heads = (
        n if isinstance(n, list) else [n] * len(types) for n in (width, file.get("attention.head_count_kv"))
    )
    of_kind = {kind: n for kind, n in zip(types, heads, strict=True) if n}
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    share = (file.floats("rope_freqs.weight") < _STILL).mean() if "rope_freqs.weight" in file.tensors else 1.0
    angles = {
        "rope_type": "proportional",
        "rope_theta": file.get("rope.freq_base", 1e6),
        "partial_rotary_factor": float(share),
    }
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10000.0)}
    return {
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "num_attention_heads": number(file, "attention.head_count"),
        "num_key_value_heads": of_kind.get("sliding_attention", of_kind["full_attention"]),
        "num_global_key_value_heads": of_kind["full_attention"],
        "head_dim": number(file, "attention.key_length_swa"),
        "global_head_dim": number(file, "attention.key_length"),
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": file.get("attention.shared_kv_layers", 0),
        "layer_types": types,
        "sliding_window": number(file, "attention.sliding_window"),
        "rope_parameters": {"full_attention": angles, "sliding_attention": local},
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": file.tensors["per_layer_token_embd.weight"].shape[0] if inputs else 0,
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "enable_moe_block": bool(file.get("expert_count")),
        "num_experts": file.get("expert_count"),
        "top_k_experts": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
    }


def olmo2(file: GGUFFile) -> dict[str, Any]:
    """OLMo 3 has the same name, and windows. Its angles are scaled in the layers without a window only."""
    if not file.get("attention.sliding_window"):
        return {}
    plain = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 10000.0))}
    return read(file, WINDOWS) | {"model_type": "olmo3", "rope_parameters": _by_window(file, plain)}


def exaone4(file: GGUFFile) -> dict[str, Any]:
    if not file.get("attention.sliding_window"):
        return {"sliding_window": None, "layer_types": ["full_attention"] * number(file, "block_count")}
    return read(file, WINDOWS)


USED = {"num_experts_per_tok": "expert_used_count"}
LOCAL = {"num_local_experts": "expert_count", **USED}
EXPERTS = {"num_experts": "expert_count", **USED}
WIDTH = {"moe_intermediate_size": "expert_feed_forward_length"}
# A mixture with experts that all nodes have, behind some layers with an MLP.
ROUTED: Settings = {
    "n_routed_experts": "expert_count",
    **USED,
    **WIDTH,
    "n_shared_experts": ("expert_shared_count", 1),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", False),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
}
ERNIE_EXPERTS: Settings = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    **WIDTH,
    "moe_num_shared_experts": ("expert_shared_count", 0),
    "moe_layer_start_index": ("leading_dense_block_count", 0),
    "moe_layer_interval": ("interleave_moe_layer_step", 1),
}
BIAS, QK_NORM = has("blk.0.attn_q.bias"), has("blk.0.attn_q_norm.weight")
LLAMA: Settings = {
    "attention_bias": has(*(f"blk.0.attn_{n}.bias" for n in ("q", "k", "v", "output"))),
    "mlp_bias": has(*(f"blk.0.ffn_{n}.bias" for n in ("gate", "up", "down"))),
}
EPSILON, LAYER_EPSILON = ("attention.layer_norm_rms_epsilon", 1e-5), ("attention.layer_norm_epsilon", 1e-5)
LAYER_NORMS: Settings = LLAMA | dict.fromkeys(("layer_norm_eps", "norm_eps", "norm_epsilon"), LAYER_EPSILON)
FACTORS: Settings = {
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_scale", 1.0),
    "attention_multiplier": _scale,
}
GRANITE: Settings = LLAMA | FACTORS
CLIPPED: Settings = {"clip_qkv": ("attention.clamp_kqv",)}
WINDOW: Settings = {"sliding_window": "attention.sliding_window"}
WINDOWS: Settings = WINDOW | {"layer_types": _alternating(4)}
GEMMA: Settings = {"hidden_activation": always("gelu_pytorch_tanh")}
GEMMA2: Settings = {
    **GEMMA,
    "sliding_window": ("attention.sliding_window", 4096),
    "layer_types": _alternating(2, key=None),
    "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
    "final_logit_softcapping": ("final_logit_softcapping", 30.0),
    "query_pre_attn_scalar": _gemma_scale(largest=46),
}
GEMMA3: Settings = {
    **GEMMA,
    **WINDOW,
    "layer_types": _alternating(6),
    "rope_parameters": lambda file: _by_window(
        file, {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10000.0)}
    ),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "query_pre_attn_scalar": _gemma_scale(largest=62),
}
PHI3: Settings = {
    "sliding_window": lambda file: file.get("attention.sliding_window") or None,
    "original_max_position_embeddings": lambda file: number(
        file, "rope.scaling.original_context_length", number(file, "context_length")
    ),
}
STABLELM: Settings = {
    "layer_norm_eps": LAYER_EPSILON,
    "use_qkv_bias": BIAS,
    "qk_layernorm": QK_NORM,
    "use_parallel_residual": lambda file: "blk.0.ffn_norm.weight" not in file.tensors,
}
GLM4: Settings = {"attention_bias": BIAS, "attention_out_bias": has("blk.0.attn_output.bias")}
COHERE: Settings = LAYER_NORMS | {"logit_scale": ("logit_scale", 0.0625), "use_qk_norm": QK_NORM}
STARCODER2: Settings = LAYER_NORMS | {"use_bias": BIAS, "sliding_window": PHI3["sliding_window"]}
GPT_OSS: Settings = {
    **LOCAL,
    **WINDOW,
    "intermediate_size": "expert_feed_forward_length",
    "layer_types": _alternating(2, key=None),
    "rope_parameters": lambda file: rotary(file, head_dim(file), False) | {"truncate": False},
}
SHARED: Settings = {"shared_expert_intermediate_size": _shared_width}
# llama.cpp divides the weights by their sum
ALL_SPARSE: Settings = EXPERTS | WIDTH | {"norm_topk_prob": always(True), "mlp_only_layers": always([])}
QWEN2_MOE: Settings = ALL_SPARSE | SHARED | {"norm_topk_prob": always(False), "sliding_window": always(None)}
# Of models with recurrent layers.
STATE_SPACE: Settings = {
    "state_size": ("ssm.state_size",),
    "n_groups": ("ssm.group_count", 1),
    "conv_kernel": ("ssm.conv_kernel",),
    "use_conv_bias": some("ssm_conv1d.bias"),
    "layer_norm_epsilon": EPSILON,
}
MAMBA2: Settings = {
    **STATE_SPACE,
    "num_heads": ("ssm.time_step_rank",),
    "head_dim": inner_per("ssm.time_step_rank"),
    "expand": inner_per("embedding_length"),
    "use_bias": has("blk.0.ssm_in.bias"),
}
NEMOTRON_H: Settings = {
    **STATE_SPACE,
    "mamba_num_heads": ("ssm.time_step_rank",),
    "mamba_head_dim": inner_per("ssm.time_step_rank"),
    "ssm_state_size": ("ssm.state_size",),
    "layers_block_type": _nemotron_kinds,
}
NEMOTRON_H_MOE: Settings = {
    **NEMOTRON_H,
    **ROUTED,
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": lambda file: next(
        (t.shape[0] for name, t in file.tensors.items() if name.endswith("ffn_latent_down.weight")), None
    ),
}
MAMBA: Settings = {
    "mamba_n_heads": ("ssm.time_step_rank",),
    "mamba_d_head": inner_per("ssm.time_step_rank"),
    "mamba_d_state": ("ssm.state_size",),
    "mamba_n_groups": ("ssm.group_count", 1),
    "mamba_d_conv": ("ssm.conv_kernel",),
    "mamba_conv_bias": some("ssm_conv1d.bias"),
    "mamba_proj_bias": some("ssm_in.bias"),
}
FALCON_H1: Settings = {  # all its multipliers are in the matrices of the file
    **MAMBA,
    "mamba_d_ssm": ("ssm.inner_size",),
    "mamba_rms_norm": has("blk.0.ssm_norm.weight"),
    "mamba_norm_before_gate": always(False),
    "projectors_bias": has("blk.0.ssm_out.bias"),
    "attention_bias": BIAS,
    "mlp_bias": has("blk.0.ffn_up.bias"),
}
GRANITE_HYBRID: Settings = {
    **MAMBA,
    **FACTORS,
    "layer_types": _kinds("ssm_in", "linear_attention"),
    "mamba_expand": inner_per("embedding_length"),
    "num_local_experts": ("expert_count", 0),
    "num_experts_per_tok": ("expert_used_count", 0),
    "intermediate_size": lambda file: file.get("expert_feed_forward_length") or file.get("feed_forward_length"),
    "shared_intermediate_size": lambda file: file.get(
        "expert_shared_feed_forward_length", file.get("feed_forward_length")
    ),
}
LFM2: Settings = {
    "layer_types": _kinds("shortconv.conv", "conv"),
    "conv_L_cache": ("shortconv.l_cache",),
    "norm_eps": EPSILON,
    "block_auto_adjust_ff_dim": always(False),
}
LFM2_MOE: Settings = {
    **LFM2,
    **EXPERTS,
    **WIDTH,
    "num_dense_layers": ("leading_dense_block_count", 0),
    "norm_topk_prob": always(True),
    "use_expert_bias": some("exp_probs_b.bias"),
}
QWEN35: Settings = {
    "layer_types": _kinds("ssm_out", "linear_attention"),
    "linear_num_value_heads": ("ssm.time_step_rank",),
    "linear_num_key_heads": ("ssm.group_count",),
    "linear_key_head_dim": ("ssm.state_size",),
    "linear_value_head_dim": inner_per("ssm.time_step_rank"),
    "linear_conv_kernel_dim": ("ssm.conv_kernel",),
}
BAMBA: Settings = {
    **MAMBA,
    "attn_layer_indices": lambda file: [i for i, n in enumerate(file.get("attention.head_count_kv")) if n],
    "mamba_expand": inner_per("embedding_length"),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": lambda file: max(file.get("attention.head_count_kv")),
    "intermediate_size": ("feed_forward_length",),
    "rope_parameters": lambda file: {
        "rope_type": "default",
        "rope_theta": file.get("rope.freq_base", 10000.0),
        "partial_rotary_factor": 0.5,
    },
}
