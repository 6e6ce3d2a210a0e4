"""The architectures of GGUF files: their configuration in transformers' terms, and how their tensors are stored.

Sources: llama.cpp's convert_hf_to_gguf.py and the readers in its src/models. The names of the tensors are those of the `gguf`
package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from outrider.models.gguf import hybrids
from outrider.models.gguf.reader import GGUFFile
from outrider.models.hf.hooks import UnsupportedModel

Keys = Mapping[str, str | tuple[str, Any]]
"""Settings of transformers -> keys of the architecture: of a positive number that must be there, or with a default."""


@dataclass(frozen=True)
class Architecture:
    """How a family of models is stored."""

    model_type: str  # transformers' name
    mixture: str | None = None  # that of files with experts
    interleaved: bool = False  # the rows of q and k are in the order of interleaved rotary pairs
    one_added: bool = False  # the norms are stored as w + 1
    biases_by_tensor: bool = False  # a linear has a bias if the file has one for it
    keys: Keys = field(default_factory=dict)  # settings of this family beside the common ones
    constants: Mapping[str, Any] = field(default_factory=dict)  # settings that all its files have alike
    more: Callable[[GGUFFile], dict[str, Any]] = lambda file: {}  # settings that come of several keys, or of tensors
    attends: bool = True  # some layers have attention
    # the end of a module's name -> those of the modules that the gguf package knows in its place; of several, the rows
    # follow one another.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined_with_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # others of files with experts
    # of rows or numbers, see `hybrids`.
    order: Callable[[str, PretrainedConfig], Tensor | None] = lambda name, config: None


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UnsupportedModel for a file that is no language model, or one of another family."""
    path, name = file.paths[0], file.architecture
    kind = file.metadata.get("general.type", "model")
    for other, what in _NO_MODELS.items():
        if other in (kind, name):
            raise UnsupportedModel(f"{path} is {what}, not a language model; give the file of the model itself")
    if not name:
        raise UnsupportedModel(f"{path} names no architecture (general.architecture), so it is no model for llama.cpp")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{path} is a {name}, and outrider reads GGUF files of {', '.join(ARCHITECTURES)}. Others may run from their folder "
            "or hub name, as transformers loads them"
        )
    if not file.tensors:
        raise UnsupportedModel(f"{path} has no tensors, only a vocabulary; give the file of the model itself")
    family = ARCHITECTURES[name]
    if name == "granitehybrid" and file.get("rope.scaling.finetuned"):
        return _BAMBA
    if not file.get("expert_count"):
        return family
    return replace(
        family, model_type=family.mixture or family.model_type, joined={**family.joined, **family.joined_with_experts}
    )


def config_of(file: GGUFFile) -> PretrainedConfig:
    """The configuration that transformers builds the model from. Raises ValueError or UnsupportedModel with the reason."""
    family = architecture_of(file)
    settings: dict[str, Any] = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else None,
        "hidden_size": _number(file, "embedding_length"),
        "num_hidden_layers": _number(file, "block_count") - file.get("nextn_predict_layers", 0),
        "max_position_embeddings": _number(file, "context_length"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
        "quantization_level": file.quantization_level,
    }
    if family.attends:
        settings |= _attention(file, family)
    if settings["vocab_size"] is None:
        raise ValueError(f"{file.paths[0]} has no token_embd.weight; the file is not a whole model")
    try:
        settings |= {**read_keys(file, family.keys), **family.constants, **family.more(file)}
        return AutoConfig.for_model(settings.pop("model_type", family.model_type), **settings)
    except Exception as error:  # each architecture checks its settings in its own way
        raise ValueError(f"the configuration in {file.paths[0]} does not fit a {family.model_type}: {error}") from error


def read_keys(file: GGUFFile, keys: Keys) -> dict[str, Any]:
    """Settings by their keys. Raises ValueError for a number that is not there."""
    return {name: _number(file, key) if isinstance(key, str) else file.get(*key) for name, key in keys.items()}


def _attention(file: GGUFFile, family: Architecture) -> dict[str, Any]:
    heads = _number(file, "attention.head_count")
    head_dim = _number(file, "attention.key_length", _number(file, "embedding_length") // heads)
    if file.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.paths[0]} has values of another length than keys, which outrider does not run")
    return {
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": _rotary(file, head_dim, family.interleaved),
    }


def tensor_names(file: GGUFFile) -> TensorNameMap:
    """transformers' names -> the names in the file."""
    number = next(n for n, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    return get_tensor_name_map(number, _number(file, "block_count"))


def _number(file: GGUFFile, key: str, default: int | None = None) -> int:
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


def _rotary(file: GGUFFile, head_dim: int, interleaved: bool) -> dict[str, Any]:
    """transformers' rope_parameters. Frequency factors of a tensor (rope_freqs) are applied to the built model."""
    rotary = _number(file, "rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 10000.0))}
    if rotary != head_dim:
        if interleaved:
            raise UnsupportedModel(f"{file.paths[0]} rotates {rotary} of {head_dim} dimensions, in interleaved pairs")
        rope["partial_rotary_factor"] = rotary / head_dim
    kind, factor = (
        file.get("rope.scaling.type", "none"),
        file.get("rope.scaling.factor", file.get("rope.scale_linear", 0.0)),
    )
    if kind == "none" and file.get("rope.scale_linear"):
        kind = "linear"
    if "rope_factors_long.weight" in file.tensors:
        first = _number(file, "rope.scaling.original_context_length", _number(file, "context_length"))
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
    first = _number(file, "rope.scaling.original_context_length")
    rope |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": first}
    for key, name in _YARN.items():
        if (value := file.get(f"rope.scaling.{key}")) is not None:
            rope[name] = float(value)
    return rope


_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
_STILL = 1e20  # a pair of numbers whose frequency is divided by this is not rotated
_SIGMOID = 2  # llama.cpp's number of a router
_NO_MODELS = {
    "adapter": "an adapter (LoRA)",
    "mmproj": "a projector of images or sound",
    "clip": "a projector of images or sound",
    "imatrix": "an importance matrix",
    "controlvector": "a control vector",
}


def _llama(file: GGUFFile) -> dict[str, Any]:
    return (read_keys(file, _LOCAL) if file.get("expert_count") else {}) | {
        "attention_bias": any(f"blk.0.attn_{n}.bias" in file.tensors for n in ("q", "k", "v", "output")),
        "mlp_bias": any(f"blk.0.ffn_{n}.bias" in file.tensors for n in ("gate", "up", "down")),
    }


_USED = {"num_experts_per_tok": "expert_used_count"}
_LOCAL = {"num_local_experts": "expert_count", **_USED}
_EXPERTS = {"num_experts": "expert_count", **_USED}
_WIDTH = {"moe_intermediate_size": "expert_feed_forward_length"}
# A mixture with experts that all nodes have, behind some layers with an MLP.
_ROUTED: Keys = {
    "n_routed_experts": "expert_count",
    **_USED,
    **_WIDTH,
    "n_shared_experts": ("expert_shared_count", 1),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", False),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
}
_ERNIE_EXPERTS: Keys = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    **_WIDTH,
    "moe_num_shared_experts": ("expert_shared_count", 0),
    "moe_layer_start_index": ("leading_dense_block_count", 0),
    "moe_layer_interval": ("interleave_moe_layer_step", 1),
}
_GRANITE: Keys = {
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_scale", 1.0),
}
_CLIPPED: Keys = {"clip_qkv": ("attention.clamp_kqv", None)}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
_ALL_SPARSE: dict[str, Any] = {
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}  # llama.cpp divides the weights by their sum


def _granite(file: GGUFFile) -> dict[str, Any]:
    heads, hidden = _number(file, "attention.head_count"), _number(file, "embedding_length")
    return _llama(file) | {"attention_multiplier": file.get("attention.scale") or (hidden // heads) ** -0.5}


def _shared_width(file: GGUFFile) -> dict[str, Any]:
    """Beside the chosen experts one that all nodes have."""
    width = _number(file, "expert_feed_forward_length")
    return {"shared_expert_intermediate_size": _number(file, "expert_shared_feed_forward_length", width)}


def _nemotron_experts(file: GGUFFile) -> dict[str, Any]:
    latent = next((t for name, t in file.tensors.items() if name.endswith("ffn_latent_down.weight")), None)
    shared = _number(file, "expert_shared_feed_forward_length")
    return {
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": None if latent is None else latent.shape[0],
    }


def _mistral3(file: GGUFFile) -> dict[str, Any]:
    """Mistral Small 3 has this name too, and no growing queries."""
    if not (beta := file.get("attention.temperature_scale")):
        return _llama(file) | {"model_type": "mistral"}
    share = file.get("rope.scaling.yarn_log_multiplier", 0.0)
    scaling = {"llama_4_scaling_beta": beta, "mscale": 1.0, "mscale_all_dim": share}
    return {"rope_parameters": _rotary(file, _number(file, "attention.key_length"), False) | scaling}


def _gpt_oss(file: GGUFFile) -> dict[str, Any]:
    hidden, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    head_dim = _number(file, "attention.key_length", hidden // heads)
    return {
        "intermediate_size": _number(file, "expert_feed_forward_length"),
        "sliding_window": _number(file, "attention.sliding_window"),
        "layer_types": _alternating(file, 2),
        "rope_parameters": _rotary(file, head_dim, False) | {"truncate": False},
    }


def _deepseek2(file: GGUFFile) -> dict[str, Any]:
    """Keys and values of a latent. Files before 2025 have the lengths of keys and values without names of their own."""
    heads, rotated, latent = (
        _number(file, name) for name in ("attention.head_count", "rope.dimension_count", "attention.kv_lora_rank")
    )
    key, value = (
        _number(file, f"attention.{n}_length_mla", _number(file, f"attention.{n}_length")) for n in ("key", "value")
    )
    rotary, share = _rotary(file, rotated, False), file.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    if rotary["rope_type"] == "yarn":
        rotary |= {"mscale": share, "mscale_all_dim": share}  # llama.cpp scales the scores, and not the angles
    sigmoid = file.get("expert_gating_func", 1) == _SIGMOID
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "topk_method": "greedy" if file.get("expert_group_count", 1) == 1 else "group_limited_greedy",
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": latent,
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": rotary,
    }


def _gemma2(file: GGUFFile) -> dict[str, Any]:
    return {
        "sliding_window": file.get("attention.sliding_window", 4096),
        "layer_types": _alternating(file, 2),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scale(file, largest=46),
    }


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    rotary = _rotary(file, 1, False) | {"partial_rotary_factor": 1.0}
    return {
        "sliding_window": _number(file, "attention.sliding_window"),
        "layer_types": _alternating(file, file.get("attention.sliding_window_pattern", 6)),
        "rope_parameters": {
            "full_attention": rotary,
            "sliding_attention": {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10000.0)},
        },
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _gemma_scale(file, largest=62),
    }


def _gemma4(file: GGUFFile) -> dict[str, Any]:
    """Its layers with windows have heads of another size than the others. Of those, `rope_freqs` shows how much is rotated."""
    types = _alternating(file, file.get("attention.sliding_window_pattern", 6))
    inputs, width = file.get("embedding_length_per_layer_input", 0), file.get("feed_forward_length")
    widths, heads = (
        n if isinstance(n, list) else [n] * len(types) for n in (width, file.get("attention.head_count_kv"))
    )
    of_kind = {kind: n for kind, n in zip(types, heads, strict=True) if n}
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    share = (file.floats("rope_freqs.weight") < _STILL).float().mean() if "rope_freqs.weight" in file.tensors else 1.0
    rotary = {
        "rope_type": "proportional",
        "rope_theta": file.get("rope.freq_base", 1e6),
        "partial_rotary_factor": float(share),
    }
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10000.0)}
    return {
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "num_attention_heads": _number(file, "attention.head_count"),
        "num_key_value_heads": of_kind.get("sliding_attention", of_kind["full_attention"]),
        "num_global_key_value_heads": of_kind["full_attention"],
        "head_dim": _number(file, "attention.key_length_swa"),
        "global_head_dim": _number(file, "attention.key_length"),
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": file.get("attention.shared_kv_layers", 0),
        "layer_types": types,
        "sliding_window": _number(file, "attention.sliding_window"),
        "rope_parameters": {"full_attention": rotary, "sliding_attention": local},
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": file.tensors["per_layer_token_embd.weight"].shape[0] if inputs else 0,
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "enable_moe_block": bool(file.get("expert_count")),
        "num_experts": file.get("expert_count"),
        "top_k_experts": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
    }


def _gemma_scale(file: GGUFFile, largest: int) -> int:
    """Scores are divided by the root of this. The file does not say it; llama.cpp knows the largest model by its layers."""
    heads, hidden = _number(file, "attention.head_count"), _number(file, "embedding_length")
    each = hidden // heads
    return each if _number(file, "block_count") == largest else _number(file, "attention.key_length", each)


def _phi3(file: GGUFFile) -> dict[str, Any]:
    context = _number(file, "context_length")
    return {
        "sliding_window": file.get("attention.sliding_window") or None,
        "original_max_position_embeddings": _number(file, "rope.scaling.original_context_length", context),
    }


def _stablelm(file: GGUFFile) -> dict[str, Any]:
    return {
        "layer_norm_eps": file.get("attention.layer_norm_epsilon", 1e-5),
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
    }


def _alternating(file: GGUFFile, pattern: int | list[bool]) -> list[str]:
    """Of each so many layers the last one sees all tokens. Or for each layer whether it has a window."""
    layers = range(_number(file, "block_count"))
    local = pattern if isinstance(pattern, list) else [(i + 1) % pattern for i in layers]
    return ["sliding_attention" if each else "full_attention" for each in local]


def _windows(file: GGUFFile) -> dict[str, Any]:
    types = _alternating(file, file.get("attention.sliding_window_pattern", 4))
    return {"sliding_window": _number(file, "attention.sliding_window"), "layer_types": types}


def _olmo2(file: GGUFFile) -> dict[str, Any]:
    """OLMo 3 has the same name, and windows. Its angles are scaled in the layers without a window only."""
    if not file.get("attention.sliding_window"):
        return {}
    plain = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 10000.0))}
    ropes = {"full_attention": _rotary(file, 1, False) | {"partial_rotary_factor": 1.0}, "sliding_attention": plain}
    return _windows(file) | {"model_type": "olmo3", "rope_parameters": ropes}


def _smollm3(file: GGUFFile) -> dict[str, Any]:
    return _llama(file) | {"no_rope_layers": None, "use_sliding_window": False}


def _attention_bias(file: GGUFFile) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
    }


def _layer_norms(file: GGUFFile) -> dict[str, Any]:
    eps = file.get("attention.layer_norm_epsilon", 1e-5)
    return _llama(file) | {"layer_norm_eps": eps, "norm_eps": eps, "norm_epsilon": eps}


def _cohere(file: GGUFFile) -> dict[str, Any]:
    scale = file.get("logit_scale", 0.0625)
    return _layer_norms(file) | {"logit_scale": scale, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def _starcoder2(file: GGUFFile) -> dict[str, Any]:
    window = file.get("attention.sliding_window") or None
    return _layer_norms(file) | {"use_bias": "blk.0.attn_q.bias" in file.tensors, "sliding_window": window}


def _exaone4(file: GGUFFile) -> dict[str, Any]:
    if not file.get("attention.sliding_window"):
        return {"sliding_window": None, "layer_types": ["full_attention"] * _number(file, "block_count")}
    return _windows(file)


def _ernie(file: GGUFFile) -> dict[str, Any]:
    return {"use_bias": any(name.endswith(".bias") for name in file.tensors)}


_BAMBA = Architecture("bamba", interleaved=True, attends=False, more=hybrids.bamba)  # with the name of Granite 4
ARCHITECTURES = {
    "llama": Architecture("llama", "mixtral", interleaved=True, biases_by_tensor=True, more=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "mistral3": Architecture("ministral3", interleaved=True, more=_mistral3),
    "gemma": Architecture("gemma", one_added=True, constants=_GEMMA),
    "gemma2": Architecture("gemma2", one_added=True, constants=_GEMMA, more=_gemma2),
    "gemma3": Architecture("gemma3_text", one_added=True, constants=_GEMMA, more=_gemma3),
    "gemma4": Architecture("gemma4_text", attends=False, constants=_GEMMA, more=_gemma4),
    "phi3": Architecture("phi3", more=_phi3),
    "qwen3moe": Architecture("qwen3_moe", keys=_EXPERTS | _WIDTH, constants=_ALL_SPARSE),
    "olmoe": Architecture("olmoe", keys={**_EXPERTS, **_CLIPPED}, constants={"norm_topk_prob": False}),
    "deepseek2": Architecture("deepseek_v3", attends=False, keys=_ROUTED, more=_deepseek2),
    "glm4moe": Architecture(
        "glm4_moe",
        keys=_ROUTED,
        more=lambda file: {
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        },
    ),
    "dots1": Architecture("dots1", keys=_ROUTED, constants={"sliding_window": None, "layer_types": None}),
    "gpt-oss": Architecture("gpt_oss", keys=_LOCAL, more=_gpt_oss),
    "granitemoe": Architecture(
        "granitemoe",
        interleaved=True,
        biases_by_tensor=True,
        keys=_GRANITE,
        more=_granite,
        joined={"block_sparse_moe.router": ("block_sparse_moe.router.layer",)},
    ),
    "granite": Architecture("granite", interleaved=True, biases_by_tensor=True, keys=_GRANITE, more=_granite),
    "stablelm": Architecture("stablelm", more=_stablelm),
    "olmo2": Architecture("olmo2", more=_olmo2),
    "olmo": Architecture("olmo", interleaved=True, keys=_CLIPPED),
    "smollm3": Architecture("smollm3", interleaved=True, more=_smollm3),
    "glm4": Architecture("glm4", more=_attention_bias),
    "command-r": Architecture("cohere", more=_cohere),
    "cohere2": Architecture("cohere2", more=lambda file: _cohere(file) | _windows(file)),
    "starcoder2": Architecture("starcoder2", more=_starcoder2),
    "internlm2": Architecture("llama", interleaved=True, biases_by_tensor=True, more=_llama),
    "exaone4": Architecture("exaone4", more=_exaone4),
    "ernie4_5": Architecture("ernie4_5", more=_ernie),
    "seed_oss": Architecture("seed_oss", more=_attention_bias),
    "arcee": Architecture("arcee", interleaved=True, biases_by_tensor=True, more=_llama),
    "phi2": Architecture("phi", more=_layer_norms),
    "nemotron": Architecture("nemotron", one_added=True, more=_layer_norms),
    "falcon-h1": Architecture("falcon_h1", more=hybrids.falcon_h1),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        interleaved=True,
        more=hybrids.granite_hybrid,
        joined={
            "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
            "shared_mlp.output_linear": ("mlp.down_proj",),
            "block_sparse_moe.router": ("block_sparse_moe.router.layer",),
        },
        joined_with_experts={
            "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            "shared_mlp.output_linear": ("mlp.shared_expert.down_proj",),
        },
    ),
    "lfm2": Architecture("lfm2", more=hybrids.lfm2),
    "mamba2": Architecture("mamba2", attends=False, more=hybrids.mamba2),
    "nemotron_h": Architecture("nemotron_h", more=hybrids.nemotron_h),
    "nemotron_h_moe": Architecture(
        "nemotron_h", keys=_ROUTED, more=lambda file: hybrids.nemotron_h(file) | _nemotron_experts(file)
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        keys=_EXPERTS | _WIDTH,
        constants={"norm_topk_prob": False, "mlp_only_layers": [], "sliding_window": None},
        more=_shared_width,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        keys=_ERNIE_EXPERTS,
        more=lambda file: {"use_bias": any(name.endswith(("attn_q.bias", "ffn_up.bias")) for name in file.tensors)},
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        keys={**_EXPERTS, **_WIDTH, "num_dense_layers": ("leading_dense_block_count", 0)},
        constants={"norm_topk_prob": True},
        more=lambda file: (
            hybrids.lfm2(file) | {"use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in file.tensors)}
        ),
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        one_added=True,
        keys=_EXPERTS | _WIDTH,
        more=lambda file: hybrids.qwen35(file) | _shared_width(file),
        order=hybrids.value_heads,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        one_added=True,
        keys=_EXPERTS | _WIDTH,
        constants=_ALL_SPARSE,
        more=lambda file: hybrids.qwen35(file) | _shared_width(file),
        joined={"linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")},
        order=hybrids.by_group,
    ),
    "qwen35": Architecture("qwen3_5_text", one_added=True, more=hybrids.qwen35, order=hybrids.value_heads),
}
