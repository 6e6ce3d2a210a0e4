"""GGUF files of true shapes with random weights, for the time a token of models that are not at hand.

    python -m benchmarks.shapes FAMILY --gguf FILE                    the names are in `FAMILIES`
    python -m benchmarks.shapes qwen3-30b-a3b --gguf FILE --layers 8  fewer layers, each of its true shape

The matrices have the formats of a Q4_K_M file, also Q5_0 and Q8_0 where a row is not whole blocks. The experts of gpt-oss are
MXFP4. The time of a token is that of the real model. Acceptance says nothing: the text is noise. The tokenizer has a token for
each byte, and fillers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from benchmarks.ruler import parser
from outrider.core.detokenizer import BYTE_OF

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """layer: the tensors of layer i below `blk.i`. dim: of a head. more: keys of the architecture. extra: other tensors."""

    arch: str
    layer: Callable[[Family, int], Shapes]
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv: int
    dim: int
    ffn: int
    theta: float = 1e6
    tied: bool = True
    more: dict[str, Any] = field(default_factory=dict)
    extra: Shapes = field(default_factory=dict)
    final_norm: str = "output_norm"


def _attention(f: Family, *, bias: bool = False, gate: bool = False, norm: int | None = 0) -> Shapes:
    """Four matrices. gate: q has an output gate beside it. norm: of q and k, over a head (its dim) or over all heads (None)."""
    q, kv = f.heads * f.dim, f.kv * f.dim
    tensors: Shapes = {
        "attn_norm.weight": (f.hidden,), "attn_q.weight": (q * (2 if gate else 1), f.hidden), "attn_k.weight": (kv, f.hidden),
        "attn_v.weight": (kv, f.hidden), "attn_output.weight": (f.hidden, q),
    }  # fmt: skip
    if bias:
        tensors |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if norm != 0:
        tensors |= {"attn_q_norm.weight": (norm or q,), "attn_k_norm.weight": (norm or kv,)}
    return tensors


def _mlp(f: Family, norm: str = "ffn_norm") -> Shapes:
    wide = (f.ffn, f.hidden)
    tensors = {"ffn_gate.weight": wide, "ffn_up.weight": wide, "ffn_down.weight": (f.hidden, f.ffn)}
    return tensors | ({f"{norm}.weight": (f.hidden,)} if norm else {})


def _experts(f: Family, norm: str = "ffn_norm") -> Shapes:
    n, each = f.more["expert_count"], f.more["expert_feed_forward_length"]
    return {
        f"{norm}.weight": (f.hidden,), "ffn_gate_inp.weight": (n, f.hidden), "ffn_gate_exps.weight": (n, each, f.hidden),
        "ffn_up_exps.weight": (n, each, f.hidden), "ffn_down_exps.weight": (n, f.hidden, each),
    }  # fmt: skip


def _mamba(f: Family, *, norm: bool) -> Shapes:
    inner, state, heads, groups, taps = (
        f.more[f"ssm.{n}"] for n in ("inner_size", "state_size", "time_step_rank", "group_count", "conv_kernel")
    )
    mixed = inner + 2 * groups * state
    tensors: Shapes = {
        "attn_norm.weight": (f.hidden,), "ssm_in.weight": (inner + mixed + heads, f.hidden), "ssm_conv1d.weight": (mixed, taps),
        "ssm_conv1d.bias": (mixed,), "ssm_dt.bias": (heads,), "ssm_a": (heads, 1), "ssm_d": (heads, 1),
        "ssm_out.weight": (f.hidden, inner),
    }  # fmt: skip
    return tensors | ({"ssm_norm.weight": (groups, inner // groups)} if norm else {})


def _delta_net(f: Family) -> Shapes:
    inner, state, heads, keys, taps = (
        f.more[f"ssm.{n}"] for n in ("inner_size", "state_size", "time_step_rank", "group_count", "conv_kernel")
    )
    mixed = inner + 2 * keys * state
    return {
        "attn_norm.weight": (f.hidden,), "attn_qkv.weight": (mixed, f.hidden), "attn_gate.weight": (inner, f.hidden),
        "ssm_conv1d.weight": (mixed, taps), "ssm_dt.bias": (heads,), "ssm_a": (heads,), "ssm_beta.weight": (heads, f.hidden),
        "ssm_alpha.weight": (heads, f.hidden), "ssm_norm.weight": (state,), "ssm_out.weight": (f.hidden, inner),
    }  # fmt: skip


def _after(f: Family) -> Shapes:
    """Norms behind both blocks."""
    return {"post_attention_norm.weight": (f.hidden,), "post_ffw_norm.weight": (f.hidden,)}


def _plain(f: Family, i: int) -> Shapes:
    return _attention(f) | _mlp(f)


def _qwen2(f: Family, i: int) -> Shapes:
    return _attention(f, bias=True) | _mlp(f)


def _qwen3(f: Family, i: int) -> Shapes:
    return _attention(f, norm=f.dim) | _mlp(f)


def _gemma3(f: Family, i: int) -> Shapes:
    return _qwen3(f, i) | _after(f)


def _olmo2(f: Family, i: int) -> Shapes:
    tensors = _attention(f, norm=None) | _mlp(f, "") | _after(f)
    del tensors["attn_norm.weight"]
    return tensors


def _phi3(f: Family, i: int) -> Shapes:
    return {
        "attn_norm.weight": (f.hidden,), "attn_qkv.weight": ((f.heads + 2 * f.kv) * f.dim, f.hidden),
        "attn_output.weight": (f.hidden, f.heads * f.dim), "ffn_norm.weight": (f.hidden,),
        "ffn_up.weight": (2 * f.ffn, f.hidden), "ffn_down.weight": (f.hidden, f.ffn),
    }  # fmt: skip


def _glm4(f: Family, i: int) -> Shapes:
    joined = {
        "ffn_up.weight": (2 * f.ffn, f.hidden),
        "ffn_down.weight": (f.hidden, f.ffn),
        "ffn_norm.weight": (f.hidden,),
    }
    return _attention(f) | joined | _after(f)


def _granite(f: Family, i: int) -> Shapes:
    return (_attention(replace(f, kv=4)) if f.more["attention.head_count_kv"][i] else _mamba(f, norm=True)) | _mlp(f)


def _falcon(f: Family, i: int) -> Shapes:
    tensors = _attention(f) | _mamba(f, norm=False) | _mlp(f)
    return tensors | {"ffn_norm": tensors.pop("ffn_norm.weight")}  # the name in its files


def _lfm2(f: Family, i: int) -> Shapes:
    if f.more["attention.head_count_kv"][i]:
        return _attention(f, norm=f.dim) | _mlp(f)
    conv = {"conv": (f.hidden, 3), "in_proj": (3 * f.hidden, f.hidden), "out_proj": (f.hidden, f.hidden)}
    return {"attn_norm.weight": (f.hidden,)} | {f"shortconv.{n}.weight": s for n, s in conv.items()} | _mlp(f)


def _qwen3moe(f: Family, i: int) -> Shapes:
    return _attention(f, norm=f.dim) | _experts(f)


def _deepseek(f: Family, i: int) -> Shapes:
    """Keys and values of a latent; experts from the second layer on, and some that all nodes have."""
    key, value, latent, rotated, small = (
        f.more.get(n, 0) for n in (
            "attention.key_length_mla", "attention.value_length_mla", "attention.kv_lora_rank", "rope.dimension_count",
            "attention.q_lora_rank",
        )
    )  # fmt: skip
    asked: Shapes = {"attn_q.weight": (f.heads * key, f.hidden)}
    if small:
        asked = {
            "attn_q_a.weight": (small, f.hidden),
            "attn_q_a_norm.weight": (small,),
            "attn_q_b.weight": (f.heads * key, small),
        }
    tensors: Shapes = asked | {
        "attn_norm.weight": (f.hidden,), "attn_kv_a_mqa.weight": (latent + rotated, f.hidden), "attn_kv_a_norm.weight": (latent,),
        "attn_k_b.weight": (f.heads, latent, key - rotated), "attn_v_b.weight": (f.heads, value, latent),
        "attn_output.weight": (f.hidden, f.heads * value),
    }  # fmt: skip
    if i < 1:
        return tensors | _mlp(f)
    wide = f.more["expert_feed_forward_length"] * f.more["expert_shared_count"]
    shared = {"ffn_gate_shexp": (wide, f.hidden), "ffn_up_shexp": (wide, f.hidden), "ffn_down_shexp": (f.hidden, wide)}
    tensors |= _experts(f) | {f"{n}.weight": s for n, s in shared.items()}
    sigmoid = f.more["expert_gating_func"] == 2
    return tensors | ({"exp_probs_b.bias": (f.more["expert_count"],)} if sigmoid else {})


def _gpt_oss(f: Family, i: int) -> Shapes:
    n, each = f.more["expert_count"], f.more["expert_feed_forward_length"]
    biases = {"gate_exps": (n, each), "up_exps": (n, each), "down_exps": (n, f.hidden), "gate_inp": (n,)}
    more = {"attn_output.bias": (f.hidden,), "attn_sinks.weight": (f.heads,)}
    return (
        _attention(f, bias=True)
        | _experts(f, "post_attention_norm")
        | more
        | {f"ffn_{n}.bias": s for n, s in biases.items()}
    )


def _qwen35(f: Family, i: int) -> Shapes:
    """The last layer predicts one token further: it is always attention, with its own projection of a token and a state."""
    last = i == f.layers - 1
    mix = _attention(f, gate=True, norm=f.dim) if last or i % 4 == 3 else _delta_net(f)
    next_one = {
        "eh_proj": (f.hidden, 2 * f.hidden),
        "enorm": (f.hidden,),
        "hnorm": (f.hidden,),
        "shared_head_norm": (f.hidden,),
    }
    tensors = mix | _mlp(f, "post_attention_norm")
    return tensors | ({f"nextn.{n}.weight": s for n, s in next_one.items()} if last else {})


def _shared(f: Family) -> Shapes:
    """Experts that all nodes have, beside the chosen ones."""
    wide = f.more["expert_shared_feed_forward_length"]
    return {
        "ffn_gate_shexp.weight": (wide, f.hidden), "ffn_up_shexp.weight": (wide, f.hidden),
        "ffn_down_shexp.weight": (f.hidden, wide),
    }  # fmt: skip


def _qwen35moe(f: Family, i: int) -> Shapes:
    mix = _attention(f, gate=True, norm=f.dim) if i % 4 == 3 else _delta_net(f)
    return mix | _experts(f, "post_attention_norm") | _shared(f) | {"ffn_gate_inp_shexp.weight": (f.hidden,)}


def _granite_moe(f: Family, i: int) -> Shapes:
    mix = {n: s for n, s in _granite(f, i).items() if not n.startswith("ffn_")}
    return mix | _experts(f) | _shared(f)


def _lfm2moe(f: Family, i: int) -> Shapes:
    if i < f.more["leading_dense_block_count"]:
        return _lfm2(f, i)
    mix = {n: s for n, s in _lfm2(f, i).items() if not n.startswith("ffn_")}
    return mix | _experts(f) | {"exp_probs_b.bias": (f.more["expert_count"],)}


def _ssm(inner: int, state: int, heads: int, groups: int) -> dict[str, int]:
    return {
        "ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }  # fmt: skip


def _only(layers: int, attention: tuple[int, ...], kv: int) -> dict[str, list[int]]:
    """Heads of keys by layer: none where the layer is no attention."""
    return {"attention.head_count_kv": [kv if i in attention else 0 for i in range(layers)]}


_GEMMA = {"attention.sliding_window": 512, "rope.freq_base_swa": 10000.0}
_SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0], "rope.dimension_count": 64, "full_attention_interval": 4}
_GRANITE = {"attention.scale": 0.0078125, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0}
_GRANITE |= {"rope.scaling.finetuned": False}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}


def _latent(latent: int, key: int, rotated: int, value: int) -> dict[str, Any]:
    return {
        "attention.kv_lora_rank": latent, "attention.key_length_mla": key, "attention.value_length_mla": value,
        "attention.key_length": latent + rotated, "attention.value_length": latent, "rope.dimension_count": rotated,
    }  # fmt: skip


def _routed(count: int, used: int, shared: int, each: int, scale: float, gating: int) -> dict[str, Any]:
    return {
        "expert_count": count, "expert_used_count": used, "expert_shared_count": shared, "expert_feed_forward_length": each,
        "expert_weights_scale": scale, "expert_gating_func": gating, "expert_weights_norm": gating == 2,
        "leading_dense_block_count": 1,
    }  # fmt: skip


# By name: architecture, layer, vocabulary, hidden, layers, heads, heads of keys, dim of a head, feed-forward.
FAMILIES: dict[str, Family] = {
    "gemma3-270m": Family("gemma3", _gemma3, 262144, 640, 18, 4, 1, 256, 2048, more=_GEMMA),
    "gemma3-1b": Family("gemma3", _gemma3, 262144, 1152, 26, 4, 1, 256, 6912, more=_GEMMA),
    "llama3.2-1b": Family("llama", _plain, 128256, 2048, 16, 32, 8, 64, 8192, 5e5),
    "qwen2.5-0.5b": Family("qwen2", _qwen2, 151936, 896, 24, 14, 2, 64, 4864),
    "qwen2.5-1.5b": Family("qwen2", _qwen2, 151936, 1536, 28, 12, 2, 128, 8960),
    "qwen3-0.6b": Family("qwen3", _qwen3, 151936, 1024, 28, 16, 8, 128, 3072),
    "qwen3-1.7b": Family("qwen3", _qwen3, 151936, 2048, 28, 16, 8, 128, 6144),
    "phi-4-mini": Family(
        "phi3", _phi3, 200064, 3072, 32, 24, 8, 128, 8192, 1e4,
        more={"rope.dimension_count": 96, "rope.scaling.original_context_length": 4096, "attention.sliding_window": 262144},
        extra={"rope_factors_long.weight": (48,), "rope_factors_short.weight": (48,)},
    ),
    "smollm3-3b": Family("smollm3", _plain, 128256, 2048, 36, 16, 4, 128, 11008, 5e6),
    "olmo2-1b": Family("olmo2", _olmo2, 100352, 2048, 16, 16, 16, 128, 8192, 5e5, tied=False),
    "glm4-9b": Family("glm4", _glm4, 151552, 4096, 40, 32, 2, 128, 13696, 1e4, tied=False, more={"rope.dimension_count": 64}),
    "granite4-h-1b": Family(
        "granitehybrid", _granite, 100352, 1536, 40, 12, 4, 128, 4096, 1e4,
        more=_GRANITE | _ssm(3072, 128, 48, 1) | _only(40, (5, 15, 25, 35), 4),
    ),
    "falcon-h1-0.5b": Family("falcon-h1", _falcon, 32784, 1024, 36, 8, 2, 64, 2048, 1e11, False, _ssm(1536, 128, 24, 1)),
    "lfm2-1.2b": Family(
        "lfm2", _lfm2, 65536, 2048, 16, 32, 8, 64, 8192, final_norm="token_embd_norm",
        more={"shortconv.l_cache": 3} | _only(16, (2, 5, 8, 10, 12, 14), 8),
    ),
    "qwen3.5-0.8b": Family(
        "qwen35", _qwen35, 248320, 1024, 25, 8, 2, 256, 3584, 1e7, more=_SECTIONS | _ssm(2048, 128, 16, 16),
    ),
    "qwen3.5-2b": Family(
        "qwen35", _qwen35, 248320, 2048, 25, 8, 2, 256, 6144, 1e7, more=_SECTIONS | _ssm(2048, 128, 16, 16),
    ),
    "qwen3-30b-a3b": Family(
        "qwen3moe", _qwen3moe, 151936, 2048, 48, 32, 4, 128, 6144, tied=False,
        more={"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768},
    ),
    "qwen3.5-35b-a3b": Family(
        "qwen35moe", _qwen35moe, 248320, 2048, 40, 16, 2, 256, 512, 1e7, False,
        more=_SECTIONS | _ssm(4096, 128, 32, 16) | {"expert_count": 256, "expert_used_count": 8,
            "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512},
    ),
    "granite4-h-tiny": Family(
        "granitehybrid", _granite_moe, 100352, 1536, 40, 12, 4, 128, 512, 1e4,
        more=_GRANITE | _ssm(3072, 128, 48, 1) | _only(40, (5, 15, 25, 35), 4) | {"expert_count": 64, "expert_used_count": 6,
            "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 1024},
    ),
    "lfm2-8b-a1b": Family(
        "lfm2moe", _lfm2moe, 65536, 2048, 24, 32, 8, 64, 7168, final_norm="token_embd_norm",
        more={"shortconv.l_cache": 3, "leading_dense_block_count": 2, "expert_count": 32, "expert_used_count": 4,
            "expert_feed_forward_length": 1792, "expert_gating_func": 2} | _only(24, (2, 6, 10, 14, 18, 21), 8),
    ),
    "deepseek-v2-lite": Family(
        "deepseek2", _deepseek, 102400, 2048, 27, 16, 1, 576, 10944, 1e4, False,
        more=_latent(512, 192, 64, 128) | _routed(64, 6, 2, 1408, 1.0, 1),
    ),
    "glm-4.7-flash": Family(
        "deepseek2", _deepseek, 154880, 2048, 47, 20, 1, 576, 10240, 1e6, False,
        more=_latent(512, 256, 64, 256) | _routed(64, 4, 1, 1536, 1.8, 2) | {"attention.q_lora_rank": 768},
    ),
    "gpt-oss-20b": Family(
        "gpt-oss", _gpt_oss, 201088, 2880, 24, 64, 8, 64, 2880, 150000.0, False,
        more={"expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880, "attention.sliding_window": 128}
        | _YARN,
    ),
}  # fmt: skip
# Tensors that are float32 in every file: their values, from standard normal ones.
_FLOATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ssm_a": lambda z: -np.exp(z),
    "ssm_d": lambda z: 1 + z / 10,
    "ssm_dt.bias": lambda z: z - 4,
    "ssm_conv1d.weight": lambda z: z / 2,
    "shortconv.conv.weight": lambda z: z / 2,
    "ffn_gate_inp_shexp.weight": lambda z: z / math.sqrt(z.shape[-1]),
    "ffn_gate_inp.weight": lambda z: z / math.sqrt(z.shape[-1]),
    "bias": lambda z: z / 50,
    "": lambda z: 1 + abs(z) / 10,  # norms and factors
}
# A format -> bytes that are alike in each block (from, to, value); where its float16 scale is; that scale for a deviation of 1.
_BLOCKS: dict[str, tuple[tuple[tuple[int, int, int], ...], int, float]] = {
    "Q8_0": ((), 0, 1 / 73.9),
    "Q5_0": ((), 0, 1 / 9.23),
    "Q4_K": (((4, 12, 161), (12, 16, 17)), 0, 1 / (33 * 4.61)),  # all scales and minima are 33
    "Q6_K": (((192, 208, 32),), 208, 1 / (32 * 18.5)),
}
_SHORT = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # where a row is not whole blocks, as llama.cpp does


def cut(family: Family, layers: int) -> Family:
    """The first layers of a family; the layer that predicts further stays the last one."""
    more = {k: v[:layers] if isinstance(v, list) and k.endswith("head_count_kv") else v for k, v in family.more.items()}
    return replace(family, layers=layers, more=more)


def formats(family: Family) -> dict[str, tuple[tuple[int, ...], str]]:
    """Each tensor's shape, [out, in] for a matrix, and its format."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    shapes: Shapes = {
        "token_embd.weight": (family.vocab, family.hidden),
        f"{family.final_norm}.weight": (family.hidden,),
    }
    shapes |= {} if family.tied else {"output.weight": (family.vocab, family.hidden)}
    for i in range(family.layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in family.layer(family, i).items()}
    for name, shape in (shapes | family.extra).items():
        tensors[name] = shape, _format(family, name, shape)
    return tensors


def _format(family: Family, name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1 or name.endswith((".bias", *(n for n in _FLOATS if n))) or "_norm." in name:
        return "F32"
    if family.arch == "gpt-oss":
        return "MXFP4" if "_exps." in name else "Q8_0"
    kind = "Q4_K"
    if name == "output.weight" or (name == "token_embd.weight" and family.tied):
        kind = "Q6_K"
    elif "attn_v." in name or "ffn_down" in name:
        i, eighth = int(name.split(".")[1]), family.layers // 8
        kind = "Q6_K" if i < eighth or i >= 7 * eighth or (i - eighth) % 3 == 2 else kind
    return kind if shape[-1] % 256 == 0 else _SHORT[kind] if shape[-1] % 32 == 0 else "F16"


def values(name: str, shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Random bytes or floats of a tensor. A matrix of blocks has deviation 1 / sqrt(in)."""
    if kind in ("F32", "F16"):
        z = rng.standard_normal(shape, np.float32)
        if kind == "F16":
            return (z / math.sqrt(shape[-1])).astype(np.float16)
        return next(make for end, make in _FLOATS.items() if name.endswith(end))(z).astype(np.float32)
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.frombuffer(rng.bytes(math.prod(shape) // size * width), np.uint8).reshape(-1, width).copy()
    deviation = 1 / math.sqrt(shape[-1])
    if kind == "MXFP4":
        raw[:, 0] = 127 + round(math.log2(deviation / 2.93))
    else:
        same, at, scale = _BLOCKS[kind]
        for start, end, value in same:
            raw[:, start:end] = value
        raw[:, at : at + 2] = np.array([deviation * scale], np.float16).view(np.uint8)
        if kind == "Q4_K":
            raw[:, 2:4] = np.array([7.5 * deviation * scale], np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def _metadata(family: Family) -> dict[str, Any]:
    keys = {
        "block_count": family.layers, "context_length": 32768, "embedding_length": family.hidden, "vocab_size": family.vocab,
        "feed_forward_length": family.ffn, "attention.head_count": family.heads, "attention.head_count_kv": family.kv,
        "attention.key_length": family.dim, "attention.value_length": family.dim, "rope.freq_base": family.theta,
        "rope.dimension_count": family.dim, "attention.layer_norm_rms_epsilon": 1e-6,
    } | family.more  # fmt: skip
    keys |= {"nextn_predict_layers": 1} if family.arch == "qwen35" else {}
    letters = list(BYTE_OF)
    tokens = [*letters, letters[0] + letters[1], "<|endoftext|>"]
    tokens += [f"[{n}]" for n in range(len(tokens), family.vocab)]
    end = tokens.index("<|endoftext|>")
    return {f"{family.arch}.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i == end else 1 for i in range(family.vocab)],
        "tokenizer.ggml.merges": [f"{letters[0]} {letters[1]}"], "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


def write(family: Family, path: Path) -> None:
    """The file. One tensor at a time is in memory."""
    writer, rng = GGUFWriter(path, family.arch), np.random.default_rng(0)
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in _metadata(family).items():
        add[type(value)](key, value)
    every = formats(family)
    for name, (shape, kind) in every.items():
        of = GGMLQuantizationType[kind]
        size, width = GGML_QUANT_SIZES[of]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) // size * width, of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (shape, kind) in every.items():
        writer.write_tensor_data(values(name, shape, kind, rng))
    writer.close()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("family", choices=FAMILIES)
    options.add_argument("--gguf", type=Path, required=True, help="the file to write")
    options.add_argument("--layers", type=int, help="fewer than the family has")
    args = options.parse_args()
    family = FAMILIES[args.family]
    write(cut(family, args.layers) if args.layers else family, args.gguf)
    print(f"{args.gguf}: {args.gguf.stat().st_size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
