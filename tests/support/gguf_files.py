"""Writes small models as GGUF files, the way llama.cpp's converter does: its names, its order of rows, its norms."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ggml_blocks import random_blocks
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    TensorNameMap,
    get_tensor_name_map,
    quants,
)
from gguf_writer import tokenizer_metadata as tokenizer_metadata
from gguf_writer import write_file as write_file
from light import torch, transformers

# transformers' model type -> the architecture of the file. Others have the same name.
ARCHITECTURE = {
    "mistral": "llama", "ministral3": "mistral3", "gemma3_text": "gemma3", "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "qwen3_5_text": "qwen35", "olmo3": "olmo2", "cohere": "command-r", "phi": "phi2", "mixtral": "llama",
    "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2", "glm4_moe": "glm4moe",
    "qwen2_moe": "qwen2moe", "ernie4_5_moe": "ernie4_5-moe", "lfm2_moe": "lfm2moe", "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next", "gemma4_text": "gemma4", "bamba": "granitehybrid",
}  # fmt: skip
INTERLEAVED = ("llama", "mistral3", "granite", "granitehybrid", "granitemoe", "smollm3", "olmo", "arcee", "internlm2")
ONE_ADDED = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "nemotron", "qwen3next")
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_SCALES = {
    "scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale", "layer_scalar": "layer_output_scale.weight",
}  # fmt: skip
# The gguf package cannot quantise to these; any bits do.
RANDOM = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "IQ2_XXS", "IQ3_S")


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    parts: int = 1,
    metadata: dict[str, Any] | None = None,
    mtp: transformers.PreTrainedModel | None = None,
) -> None:
    """Write a model, and change its own weights to the values that are in the file: the reference.

    kind: of the matrices whose rows are whole blocks, or a function from a tensor's name to it; the others are F16.
    metadata: more keys, or None to leave one out. mtp: its MTP layer, of `mtp_layer`.
    """
    metadata = metadata or {}
    architecture = ARCHITECTURE.get(model.config.model_type, model.config.model_type)
    architecture = metadata.get("general.architecture", architecture)
    tensors = _tensors(model, architecture, kind)
    values = _metadata(model, architecture) | metadata
    if mtp is not None:
        block = model.config.num_hidden_layers
        tensors |= _mtp(mtp, architecture, kind, block)
        values |= {f"{architecture}.block_count": block + 1, f"{architecture}.nextn_predict_layers": 1}
    names = (
        [path] if parts == 1 else [path.with_name(f"{path.stem}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    )
    each = -(-len(tensors) // parts)
    for i, file in enumerate(names):
        split = {"split.no": i, "split.count": parts, "split.tensors.count": len(tensors)} if parts > 1 else {}
        own = values if i == 0 else {"general.architecture": architecture}
        write_file(file, own | split, dict([*tensors.items()][i * each : (i + 1) * each]))


def _tensors(
    model: transformers.PreTrainedModel, architecture: str, kind: str | Callable[[str], str]
) -> dict[str, tuple[np.ndarray, str]]:
    config: Any = model.config
    number = next(n for n, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    out: dict[str, Any] = {}
    for path, module in model.named_modules():
        for suffix, parameter in module.named_parameters(recurse=False):
            if suffix in CORRECTIONS or (module is model.get_output_embeddings() and config.tie_word_embeddings):
                continue
            each = re.fullmatch(r"(.*)\.norms\.(\d+)", path)  # one norm per head, in one tensor
            known = path.replace("model.", "backbone.", 1) if ".mixer." in path else path
            name = f"{names.get_name(each[1] if each else known) or names.get_name(path + '.' + suffix)}.{suffix}"
            values, order = parameter.detach(), None
            if (own := _recurrent(names, path, suffix, values, config)) is not None:
                out |= own
                continue
            if path.endswith("in_proj_qkvz"):
                out |= _by_part(values, path.split(".")[2], config, kind if isinstance(kind, str) else kind(name))
                continue
            if path.endswith("shared_mlp.input_linear"):
                layer = path.split(".")[2]
                for part, half in zip(("gate", "up"), values.chunk(2), strict=True):
                    shared = "_shexp" if config.num_local_experts else ""
                    out[f"blk.{layer}.ffn_{part}{shared}.weight"] = _matrix(
                        half, None, kind if isinstance(kind, str) else kind(name)
                    )
                continue
            if "shared_mlp" in path and not config.num_local_experts:
                name = name.replace("ffn_down_shexp", "ffn_down")
            values = values * _multiplier(path, config) if architecture == "falcon-h1" else values
            if architecture == "falcon-h1" and path.endswith("pre_ff_layernorm"):
                name = name.removesuffix(".weight")  # the gguf package knows the name with its suffix
            order = _value_heads(path, config)
            if path.endswith("kv_b_proj") and config.model_type != "deepseek_v2":  # as files before 2025
                out |= _latent(
                    values, f"blk.{path.split('.')[2]}", config, kind if isinstance(kind, str) else kind(name)
                )
                continue
            if path.endswith(".experts"):
                out |= _experts(values, suffix, f"blk.{path.split('.')[2]}", architecture, kind)
                continue
            if suffix in _SCALES:
                name = f"blk.{path.split('.')[2]}.{_SCALES[suffix]}"
            elif suffix == "sinks":
                name = f"{names.get_name(f'{path}.sinks')}.weight"
            elif path.endswith("block_sparse_moe.router"):
                name = f"{names.get_name(f'{path}.layer')}.{suffix}"
            if architecture in INTERLEAVED and (found := re.search(r"attn_([qk])\.", name)):
                heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
                # the definition in llama.cpp's converter: [head, half, pair] -> [head, pair, half]
                order = torch.arange(len(values)).view(heads, 2, -1).swapaxes(1, 2).reshape(-1)
            if suffix == "weight" and isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                if path.endswith("linear_attn.out_proj") and order is not None:
                    out[name] = (values[:, order].numpy(), "F32")
                    continue
                out[name] = _matrix(values, order, kind if isinstance(kind, str) else kind(name))
                continue
            values = values if order is None else values[order]
            values = (
                values + 1
                if architecture in ONE_ADDED and name.endswith("norm.weight") and "ssm" not in name
                else values
            )
            if each:
                values = torch.cat([torch.from_numpy(out[name][0]), values[None]]) if name in out else values[None]
            out[name] = (values.numpy(), "F32")
        for suffix, values in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)):
            if suffix in CORRECTIONS:
                out[f"blk.{path.split('.')[2]}.exp_probs_b.bias"] = (values.detach().flatten().numpy(), "F32")
            elif suffix == "layer_scalar":
                out[f"blk.{path.split('.')[2]}.{_SCALES[suffix]}"] = (values.numpy(), "F32")
    if architecture == "gemma4":
        for i in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
            out[f"blk.{i}.attn_k.weight"] = (
                np.zeros((8, config.hidden_size), np.float32),
                "F32",
            )  # converters leave them
        full = config.per_layer_config[config.num_hidden_layers - 1].head_dim
        turned = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
        out["rope_freqs.weight"] = (np.array([1.0] * turned + [1e30] * (full // 2 - turned), np.float32), "F32")
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "llama3":
        plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        out["rope_freqs.weight"] = ((plain / rotary.inv_freq).numpy(), "F32")
    if parameters.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(parameters[f"{length}_factor"], np.float32)
            out[f"rope_factors_{length}.weight"] = (factors, "F32")
    return out


class _Below:
    """Tensors below a prefix; the embedding and the output head are those of the whole model."""

    def __init__(self, tensors: Any, prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def _name(self, name: str) -> str:
        own = self.prefix + name
        return own if name not in ("model.embed_tokens.weight", "lm_head.weight") or self.tensors.has(own) else name

    def has(self, name: str) -> bool:
        return self.tensors.has(self._name(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(self._name(name))

    def get(self, name: str) -> Any:
        return self.tensors.get(self._name(name))

    def experts(self, name: str) -> Any:
        return self.tensors.experts(self._name(name))

    def check(self, further: bool = True) -> None: ...


def mtp_layer(folder: Path) -> transformers.PreTrainedModel:
    """The MTP layer of a checkpoint: a model of one layer, and `enorm`, `hnorm` and `fc` beside it."""
    from outrider.models.folder import tensors_with_layer
    from outrider.models.hf.skeleton import module_of
    from outrider.models.native.mtp import changes

    tensors: Any = tensors_with_layer(str(folder), transformers.AutoConfig.from_pretrained(folder))
    small = copy.deepcopy(tensors.config)
    small.update(changes(small) | {"tie_word_embeddings": False, "pad_token_id": None})
    model: Any = module_of(_Below(tensors, "mtp."), small, "float32")
    model.enorm, model.hnorm = copy.deepcopy(model.base_model.norm), copy.deepcopy(model.base_model.norm)
    model.fc = torch.nn.Linear(2 * small.hidden_size, small.hidden_size, bias=False)
    for name in ("enorm", "hnorm", "fc"):
        getattr(model, name).weight.data = torch.tensor(tensors.get(f"mtp.{name}.weight"))
    model.base_model.embed_tokens = None
    if not tensors.has("mtp.lm_head.weight"):
        model.lm_head = None
    return model


def _mtp(
    layer: transformers.PreTrainedModel, architecture: str, kind: str | Callable[[str], str], block: int
) -> dict[str, tuple[np.ndarray, str]]:
    """The tensors of an MTP layer: those of a model of one layer, and three others."""
    layer = copy.deepcopy(layer)
    parts = {name: layer._modules.pop(name).weight.detach() for name in ("enorm", "hnorm", "fc")}  # type: ignore[union-attr]
    start, one = f"blk.{block}.", 1 if architecture in ONE_ADDED else 0
    found = {n.replace("blk.0.", start): t for n, t in _tensors(layer, architecture, kind).items()}
    found[f"{start}nextn.shared_head_norm.weight"] = found.pop("output_norm.weight")
    found |= {f"{start}nextn.{n}.weight": ((parts[n] + one).numpy(), "F32") for n in ("enorm", "hnorm")}
    given = kind if isinstance(kind, str) else kind(f"{start}nextn.eh_proj.weight")
    return found | {f"{start}nextn.eh_proj.weight": _matrix(parts["fc"], None, given)}


def _latent(values: torch.Tensor, layer: str, config: Any, kind: str) -> dict[str, tuple[np.ndarray, str]]:
    """The matrices that make keys and values of a latent. Those of keys are transposed, head by head."""
    both = values.view(config.num_attention_heads, -1, values.shape[1])
    keys = config.qk_nope_head_dim
    first, last = both[:, :keys].transpose(1, 2).contiguous(), both[:, keys:].contiguous()
    out = {}
    for name, part in (("k", first), ("v", last)):
        data, made = _matrix(rows := part.flatten(0, 1), None, kind)
        out[f"{layer}.attn_{name}_b.weight"] = (data.reshape(*part.shape[:2], -1), made)
        part.copy_(rows.view(part.shape))
    both[:, :keys], both[:, keys:] = first.transpose(1, 2), last
    return out


def _by_part(values: torch.Tensor, layer: str, config: Any, kind: str) -> dict[str, tuple[np.ndarray, str]]:
    """Qwen3-Next has queries, keys, values and gates of one key head after another. The converter sorts them."""
    groups, keys = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // groups * config.linear_value_head_dim
    parts = values.view(groups, -1, values.shape[1]).split([keys, keys, each, each], 1)
    mixed, gate = torch.cat([p.flatten(0, 1) for p in parts[:3]]), parts[3].flatten(0, 1).clone()
    out = {
        f"blk.{layer}.attn_{name}.weight": _matrix(rows, None, kind) for name, rows in (("qkv", mixed), ("gate", gate))
    }
    for part, rows in zip(parts, (*mixed.split([groups * keys, groups * keys, groups * each]), gate), strict=True):
        part.copy_(rows.view(part.shape))
    return out


def _recurrent(
    names: TensorNameMap, path: str, suffix: str, values: torch.Tensor, config: Any
) -> dict[str, tuple[np.ndarray, str]] | None:
    """The tensor of a parameter that only recurrent layers have, as llama.cpp's converter makes it."""
    path = path.replace("model.", "backbone.", 1) if "mixer" in path else path
    order = _value_heads(f"{path}.{suffix}" if suffix in ("A_log", "dt_bias") else path, config)
    values = values if order is None else values[order]
    if suffix == "A_log":
        decay = -values.exp()
        return {f"{names.get_name(f'{path}.A_log')}": ((decay if order is not None else decay[:, None]).numpy(), "F32")}
    if suffix == "D":
        return {f"{names.get_name(f'{path}.D')}": (values[:, None].numpy(), "F32")}
    if suffix == "dt_bias":
        return {f"{names.get_name(f'{path}.dt_proj')}.bias": (values.numpy(), "F32")}
    if path.endswith(("conv1d", "conv.conv")):
        return {
            f"{names.get_name(path)}.{suffix}": (
                values.flatten(1).numpy() if values.dim() > 1 else values.numpy(),
                "F32",
            )
        }
    if path.endswith(("mamba.norm", "mixer.norm")):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        return {f"{names.get_name(path)}.weight": (values.view(groups, -1).numpy(), "F32")}
    return None


def _value_heads(path: str, config: Any) -> torch.Tensor | None:
    """int64: the first value head of each key head, then the second of each: as the converter orders those of Qwen 3.5."""
    if ".linear_attn." not in path or config.model_type == "qwen3_next":
        return None
    keys, values, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim
    width = 1 if path.endswith(("in_proj_a", "in_proj_b", "A_log", "dt_bias")) else width
    order = torch.arange(values * width).view(keys, values // keys, width).permute(1, 0, 2).reshape(-1)
    if path.endswith(("in_proj_qkv", "conv1d")):
        return torch.cat([torch.arange(first), first + order])
    return None if path.endswith("norm") else order


def _multiplier(path: str, config: Any) -> float | torch.Tensor:
    """By what the converter multiplies a matrix of Falcon-H1."""
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    parts = torch.tensor(config.ssm_multipliers).repeat_interleave(
        torch.tensor([inner, inner, state, state, config.mamba_n_heads])
    )
    given = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * parts[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return given.get(path.rpartition(".")[2], 1.0)


def _experts(
    values: torch.Tensor, suffix: str, layer: str, architecture: str, kind: str | Callable[[str], str]
) -> dict[str, tuple[np.ndarray, str]]:
    """The tensors of a parameter of all experts. gpt-oss has matrices [in, out], and gate and up in turns; Gemma 4 one tensor."""
    out, bias, alternate = dict[str, tuple[np.ndarray, str]](), suffix.endswith("_bias"), architecture == "gpt-oss"
    matrices = values.transpose(1, 2) if alternate and not bias else values
    if suffix.startswith("gate_up") and architecture != "gemma4":
        halves = (matrices[:, ::2], matrices[:, 1::2]) if alternate else matrices.chunk(2, 1)
        parts = dict(zip(("gate", "up"), halves, strict=True))
    else:
        parts = {suffix.removesuffix("_bias").removesuffix("_proj"): matrices}
    for part, each in parts.items():
        name = f"{layer}.ffn_{part}_exps.{'bias' if bias else 'weight'}"
        if bias:
            out[name] = (each.contiguous().numpy(), "F32")
            continue
        made = [_matrix(m, None, kind if isinstance(kind, str) else kind(name)) for m in each]
        out[name] = (np.stack([data for data, _ in made]), made[0][1])
    return out


def _matrix(values: torch.Tensor, order: torch.Tensor | None, kind: str) -> tuple[np.ndarray, str]:
    """The bytes in the file. `values` becomes what they mean."""
    rows = (values if order is None else values[order]).contiguous().numpy()
    if rows.shape[1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:
        kind = "F16"
    known = GGMLQuantizationType[kind]
    data = random_blocks(kind, *rows.shape).data if kind in RANDOM else quants.quantize(rows, known)
    meant = torch.from_numpy(np.ascontiguousarray(quants.dequantize(data, known), dtype=np.float32)).view(rows.shape)
    values[... if order is None else order] = meant
    return data, kind


def _metadata(model: transformers.PreTrainedModel, architecture: str) -> dict[str, Any]:
    config: Any = model.config
    if architecture == "mamba2":
        own = {
            "block_count": 2,
            "context_length": 2**20,
            "embedding_length": config.hidden_size,
            "feed_forward_length": 0,
        }
        own |= {"attention.head_count": 0, "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon}
        own |= _sizes_of_states(
            config.num_heads, config.head_dim, config.state_size, config.n_groups, config.conv_kernel
        )
        return {"general.architecture": architecture, **{f"{architecture}.{k}": v for k, v in own.items()}}
    if architecture == "gemma4":
        return {"general.architecture": architecture, **{f"gemma4.{k}": v for k, v in _of_gemma4(config).items()}}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    by_layer: dict[str, Any] = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}
    parameters = by_layer.get("full_attention", by_layer)
    own: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": next(
            (getattr(config, n) for n in ("layer_norm_eps", "norm_eps", "norm_epsilon") if hasattr(config, n)), None
        ),
        "rope.freq_base": float(parameters["rope_theta"]),
        "rope.dimension_count": int(head_dim * parameters.get("partial_rotary_factor", 1.0)),
    }
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        own["expert_count"], own["expert_used_count"] = experts, config.num_experts_per_tok
        own["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if hasattr(config, "n_routed_experts"):
        own |= {
            "expert_count": config.n_routed_experts, "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": float(config.routed_scaling_factor), "expert_weights_norm": bool(config.norm_topk_prob),
            "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
            "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
            "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        }  # fmt: skip
    if architecture == "deepseek2":
        own |= _sizes_of_latents(config)
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        own["attention.sliding_window"] = config.sliding_window
    if architecture in ("olmo2", "cohere2", "exaone4", "starcoder2"):
        own["attention.sliding_window"] = getattr(config, "sliding_window", None)
    if architecture == "olmo":
        own["attention.clamp_kqv"] = config.clip_qkv
    if architecture in ("command-r", "cohere2"):
        own["logit_scale"] = float(config.logit_scale)
    if architecture == "gemma2":
        own["attn_logit_softcapping"] = config.attn_logit_softcapping
        own["final_logit_softcapping"] = config.final_logit_softcapping
    if architecture in ("granite", "granitehybrid", "granitemoe") and config.model_type != "bamba":
        own["attention.scale"] = float(config.attention_multiplier)
        own["embedding_scale"] = float(config.embedding_multiplier)
        own["residual_scale"] = float(config.residual_multiplier)
        own["logit_scale"] = float(config.logits_scaling)
    kinds: Any = getattr(config, "layer_types", None)
    if architecture == "olmo2" and kinds:
        own["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in kinds]
    if architecture in ("falcon-h1", "granitehybrid"):
        own |= _sizes_of_states(
            config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state, config.mamba_n_groups, config.mamba_d_conv
        )
    if architecture.startswith("nemotron_h"):
        own["expert_shared_feed_forward_length"] = config.moe_shared_expert_intermediate_size
        own["expert_feed_forward_length"] = config.moe_intermediate_size
        own["attention.layer_norm_rms_epsilon"], kinds = config.layer_norm_epsilon, config.layers_block_type
        widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
        own["feed_forward_length"] = [widths.get(k, 0) for k in kinds]
        own |= _sizes_of_states(
            config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.n_groups, config.conv_kernel
        )
    if architecture in ("qwen35", "qwen35moe", "qwen3next"):
        own |= _sizes_of_states(
            config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim,
            config.linear_num_key_heads, config.linear_conv_kernel_dim,
        )  # fmt: skip
    if architecture in ("qwen35moe", "qwen2moe", "qwen3next"):
        own["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture in ("lfm2moe", "ernie4_5-moe"):
        dense = config.num_dense_layers if architecture == "lfm2moe" else config.moe_layer_start_index
        own |= {"leading_dense_block_count": dense, "expert_feed_forward_length": config.moe_intermediate_size}
    if architecture == "ernie4_5-moe":
        own |= {
            "expert_count": config.moe_num_experts, "expert_used_count": config.moe_k,
            "expert_shared_count": config.moe_num_shared_experts,
        }  # fmt: skip
    if architecture == "lfm2moe":
        own |= {"attention.layer_norm_rms_epsilon": config.norm_eps, "shortconv.l_cache": config.conv_L_cache}
    if architecture == "lfm2":
        own |= {"attention.layer_norm_rms_epsilon": config.norm_eps, "shortconv.l_cache": config.conv_L_cache}
        own["feed_forward_length"] = model.model.layers[0].feed_forward.w1.weight.shape[0]  # pyright: ignore
    if config.model_type == "bamba":
        kinds = ["attention" if i in config.attn_layer_indices else "mamba" for i in range(config.num_hidden_layers)]
    if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe"):
        heads = config.num_key_value_heads
        own["attention.head_count_kv"] = [heads if k in ("full_attention", "attention") else 0 for k in kinds]
    if config.model_type == "bamba":
        own["rope.scaling.finetuned"] = True
    elif architecture == "granitehybrid":
        own["feed_forward_length"], own["rope.scaling.finetuned"] = config.shared_intermediate_size, False
        if experts:
            own["expert_shared_feed_forward_length"] = config.shared_intermediate_size
            own["feed_forward_length"] = own["expert_feed_forward_length"] = config.intermediate_size
    scaling = parameters.get("rope_type", "default")
    if scaling in ("linear", "yarn"):
        own["rope.scaling.type"], own["rope.scaling.factor"] = scaling, float(parameters["factor"])
    if scaling == "yarn" and "mscale_all_dim" in parameters:
        own["rope.scaling.yarn_log_multiplier"] = (0.1 if experts else 1.0) * parameters["mscale_all_dim"]
    if "llama_4_scaling_beta" in parameters:
        own["attention.temperature_scale"] = parameters["llama_4_scaling_beta"]
    if scaling in ("yarn", "longrope"):
        own["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
    return {"general.architecture": architecture, **{f"{architecture}.{k}": v for k, v in own.items()}}


def _of_gemma4(config: Any) -> dict[str, Any]:
    layers, kinds = [*config.per_layer_config], config.layer_types
    last, local = layers[-1], [kind == "sliding_attention" for kind in kinds]
    first = config.num_hidden_layers - config.num_kv_shared_layers
    wide = [
        config.intermediate_size * (2 if config.use_double_wide_mlp and i >= first else 1) for i in range(len(kinds))
    ]
    return {
        "block_count": len(kinds), "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": wide, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [each.num_key_value_heads for each in layers], "attention.key_length": last.head_dim,
        "attention.value_length": last.head_dim, "attention.key_length_swa": layers[0].head_dim,
        "attention.value_length_swa": layers[0].head_dim, "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": local, "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count": last.head_dim, "final_logit_softcapping": config.final_logit_softcapping,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input, "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts, "expert_feed_forward_length": config.moe_intermediate_size,
    }  # fmt: skip


def _sizes_of_latents(config: Any) -> dict[str, Any]:
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    own = {"attention.kv_lora_rank": config.kv_lora_rank, "rope.dimension_count": config.qk_rope_head_dim}
    own |= {"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {}
    if config.model_type == "deepseek_v2":
        return own | {"attention.key_length": key, "attention.value_length": value}
    return own | {
        "attention.head_count_kv": 1, "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank, "attention.key_length_mla": key, "attention.value_length_mla": value,
    }  # fmt: skip


def _sizes_of_states(heads: int, width: int, state: int, groups: int, taps: int) -> dict[str, int]:
    return {
        "ssm.time_step_rank": heads, "ssm.inner_size": heads * width, "ssm.state_size": state, "ssm.group_count": groups,
        "ssm.conv_kernel": taps,
    }  # fmt: skip
