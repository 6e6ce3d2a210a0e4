"""How GGUF files store models with recurrent layers: Mamba 2, the gated delta rule, and short convolutions.

The decay of a head is stored as a = -exp(A_log). A convolution has the shape [channel, tap]. Sources: as in `architectures`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from outrider.models.gguf.reader import GGUFFile

# Tensors with the numbers of a parameter, in another shape.
_RESHAPED = (
    "ffn_gate_inp_shexp.weight", "exp_probs_b.bias", "ssm_conv1d.weight", "shortconv.conv.weight", "ssm_norm.weight", "ssm_a",
    "ssm_d",
)  # fmt: skip


def as_parameter(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """The values of a parameter of a recurrent layer, of those of its tensor."""
    values = (-values).log() if name.endswith("ssm_a") else values
    return values.reshape(shape) if name.endswith(_RESHAPED) else values


def fits(name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be such a parameter."""
    same = [n for n in stored if n > 1] == [n for n in shape if n > 1]
    joined = name.endswith("ssm_norm.weight") and torch.Size(stored).numel() == torch.Size(shape).numel()
    return name.endswith(_RESHAPED) and (same or joined)


def value_heads(name: str, config: PretrainedConfig) -> Tensor | None:
    """int64: number i along the heads of values in transformers is number order[i] in a file of Qwen 3.5.

    The file has the first value head of each key head, then the second of each. transformers has the value heads of the first
    key head, then those of the next. None for a tensor without such heads.
    """
    text: Any = config
    keys, values, width = text.linear_num_key_heads, text.linear_num_value_heads, text.linear_value_head_dim
    part = name.split(".", 2)[-1]
    heads = torch.arange(values).view(values // keys, keys).T.reshape(-1)
    if part in ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
        return heads
    numbers = (heads[:, None] * width + torch.arange(width)).reshape(-1)
    if part in ("attn_gate.weight", "ssm_out.weight"):
        return numbers
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * keys * text.linear_key_head_dim
        return torch.cat([torch.arange(first), first + numbers])
    return None


def by_group(name: str, config: PretrainedConfig) -> Tensor | None:
    """int64: row i of a matrix of Qwen3-Next is row order[i] of two matrices of its file, one below the other.

    The file has the queries of all key heads, then all keys, values and gates. transformers has those of the first key head, then
    those of the next."""
    text: Any = config
    if not name.endswith("attn_qkv.weight"):
        return None
    groups, keys = text.linear_num_key_heads, text.linear_key_head_dim
    values = text.linear_num_value_heads // groups * text.linear_value_head_dim
    parts = torch.arange(2 * groups * (keys + values)).split([groups * n for n in (keys, keys, values, values)])
    return torch.cat([part.view(groups, -1) for part in parts], 1).reshape(-1)


def mamba2(file: GGUFFile) -> dict[str, Any]:
    return _state_space(file) | {
        "num_heads": _heads(file),
        "head_dim": file.get("ssm.inner_size") // _heads(file),
        "expand": file.get("ssm.inner_size") // file.get("embedding_length"),
        "layer_norm_epsilon": file.get("attention.layer_norm_rms_epsilon", 1e-5),
        "use_bias": "blk.0.ssm_in.bias" in file.tensors,
    }


def nemotron_h(file: GGUFFile) -> dict[str, Any]:
    kinds = {"ssm_in": "mamba", "attn_q": "attention", "ffn_up": "mlp"}
    return _state_space(file) | {
        "mamba_num_heads": _heads(file),
        "mamba_head_dim": file.get("ssm.inner_size") // _heads(file),
        "ssm_state_size": file.get("ssm.state_size"),
        "layers_block_type": [
            next((kind for name, kind in kinds.items() if f"blk.{i}.{name}.weight" in file.tensors), "moe")
            for i in range(file.get("block_count"))
        ],
        "layer_norm_epsilon": file.get("attention.layer_norm_rms_epsilon", 1e-5),
    }


def _state_space(file: GGUFFile) -> dict[str, Any]:
    return {
        "state_size": file.get("ssm.state_size"),
        "n_groups": file.get("ssm.group_count", 1),
        "conv_kernel": file.get("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
    }


def falcon_h1(file: GGUFFile) -> dict[str, Any]:
    """All its multipliers are in the matrices of the file."""
    return _mamba(file) | {
        "mamba_d_ssm": file.get("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": "blk.0.ssm_out.bias" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def bamba(file: GGUFFile) -> dict[str, Any]:
    """It rotates half a head. Yet the converter puts the rows of the whole head in the order of interleaved pairs."""
    return _mamba(file) | {
        "attn_layer_indices": [i for i, n in enumerate(file.get("attention.head_count_kv")) if n],
        "mamba_expand": file.get("ssm.inner_size") // file.get("embedding_length"),
        "num_attention_heads": file.get("attention.head_count"),
        "num_key_value_heads": max(file.get("attention.head_count_kv")),
        "intermediate_size": file.get("feed_forward_length"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": file.get("rope.freq_base", 10000.0),
            "partial_rotary_factor": 0.5,
        },
    }


def granite_hybrid(file: GGUFFile) -> dict[str, Any]:
    heads, hidden = file.get("attention.head_count"), file.get("embedding_length")
    return _mamba(file) | {
        "layer_types": _layer_types(file, "ssm_in", "linear_attention"),
        "mamba_expand": file.get("ssm.inner_size") // hidden,
        "attention_multiplier": file.get("attention.scale") or (hidden // heads) ** -0.5,
        "embedding_multiplier": file.get("embedding_scale", 1.0),
        "residual_multiplier": file.get("residual_scale", 1.0),
        "logits_scaling": file.get("logit_scale", 1.0),
        "num_local_experts": file.get("expert_count", 0),
        "num_experts_per_tok": file.get("expert_used_count", 0),
        "intermediate_size": file.get("expert_feed_forward_length") or file.get("feed_forward_length"),
        "shared_intermediate_size": file.get("expert_shared_feed_forward_length", file.get("feed_forward_length")),
    }


def _mamba(file: GGUFFile) -> dict[str, Any]:
    return {
        "mamba_n_heads": _heads(file),
        "mamba_d_head": file.get("ssm.inner_size") // _heads(file),
        "mamba_d_state": file.get("ssm.state_size"),
        "mamba_n_groups": file.get("ssm.group_count", 1),
        "mamba_d_conv": file.get("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in file.tensors),
    }


def lfm2(file: GGUFFile) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(file, "shortconv.conv", "conv"),
        "conv_L_cache": file.get("shortconv.l_cache"),
        "norm_eps": file.get("attention.layer_norm_rms_epsilon", 1e-5),
        "block_auto_adjust_ff_dim": False,
    }


def qwen35(file: GGUFFile) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(file, "ssm_out", "linear_attention"),
        "linear_num_value_heads": _heads(file),
        "linear_num_key_heads": file.get("ssm.group_count"),
        "linear_key_head_dim": file.get("ssm.state_size"),
        "linear_value_head_dim": file.get("ssm.inner_size") // _heads(file),
        "linear_conv_kernel_dim": file.get("ssm.conv_kernel"),
    }


def _heads(file: GGUFFile) -> int:
    return file.get("ssm.time_step_rank")


def _layer_types(file: GGUFFile, tensor: str, kind: str) -> list[str]:
    """kind: of the layers that have this tensor. The others attend."""
    layers = range(file.get("block_count") - file.get("nextn_predict_layers", 0))
    return [kind if f"blk.{i}.{tensor}.weight" in file.tensors else "full_attention" for i in layers]
