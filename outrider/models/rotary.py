"""Rotary frequencies with the same bits on every processor, as transformers defines them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Any

import numpy as np

_ARITHMETIC = Context(prec=40)
_MOST = 2**16  # numbers of a head
# Model types that turn a part of each head also without scaling.
_PARTIAL = [
    "bamba",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "nemotron",
    "phi",
    "phi3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "stablelm",
]


def power(base: float, exponents: np.ndarray) -> np.ndarray:
    """float32 [n]: base ** exponents. base: above 0. exponents: float32 [n]."""
    powers = [float(_ARITHMETIC.power(Decimal(base), Decimal(x))) for x in exponents.tolist()]
    return np.array(powers, np.float32)


def frequencies(rope: Mapping[str, Any], dim: int, longest: int = 0) -> tuple[np.ndarray, float]:
    """(float32 [dim / 2] radians per position, factor of cosines and sines).

    rope: `rope_parameters` of a configuration, whose kind is default, linear, llama3 or yarn. dim: numbers that are turned.
    longest: the configuration's `max_position_embeddings`, which stands for a missing factor of yarn. Raises KeyError for other
    kinds and for settings that are missing.
    """
    scale = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[rope.get("rope_type", "default")]
    return scale(rope, power(float(rope["rope_theta"]), np.arange(0, dim, 2, dtype=np.float32) / dim), longest)


def of_config(config: Any, layer_type: str = "") -> tuple[np.ndarray, float]:
    """`frequencies` of a configuration. layer_type: of models that have them for each kind of layers.

    Those of longrope are for short texts. Raises what `frequencies` raises.
    """
    rope = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind, share, dim = rope["rope_type"], rope.get("partial_rotary_factor", 1.0), _head_dim(config, layer_type)
    if not (type(dim) is int and 0 < dim <= _MOST and 0 < share <= 1):
        raise ValueError(f"it rotates {share} of heads of {dim} numbers")
    if kind == "proportional":
        out, turned = np.zeros(dim // 2, np.float32), int(share * dim // 2)
        out[:turned] = 1.0 / power(float(rope["rope_theta"]), np.arange(0, 2 * turned, 2, dtype=np.float32) / dim)
        return out / rope.get("factor", 1.0), 1.0
    if kind != "default" or config.model_type in _PARTIAL:
        dim = int(dim * share)
    if kind != "longrope":
        return frequencies(rope, dim, config.max_position_embeddings)
    first, scale = rope["original_max_position_embeddings"], rope.get("attention_factor")
    factor = rope.get("factor") or config.max_position_embeddings / first
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(first))
    powers = power(float(rope["rope_theta"]), np.arange(0, dim, 2, dtype=np.float32) / dim)
    return 1.0 / (np.array(rope["short_factor"], np.float32) * powers), float(scale)


def _head_dim(config: Any, layer_type: str) -> int:
    """Numbers of a head, which differ by layer in Gemma 4."""
    if layers := getattr(config, "per_layer_config", None):
        own = {int(i): changes for i, changes in layers.items()}.get(config.layer_types.index(layer_type), {})
        return own.get("head_dim") or config.to_dict()["head_dim"]
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _plain(rope: Mapping[str, Any], powers: np.ndarray, longest: int) -> tuple[np.ndarray, float]:
    return 1.0 / powers, 1.0


def _linear(rope: Mapping[str, Any], powers: np.ndarray, longest: int) -> tuple[np.ndarray, float]:
    return 1.0 / powers / rope["factor"], 1.0


def _llama3(rope: Mapping[str, Any], powers: np.ndarray, longest: int) -> tuple[np.ndarray, float]:
    """High frequencies stay, low ones are divided by the factor, and those between are mixed."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    first, plain = rope["original_max_position_embeddings"], 1.0 / powers
    length = 1.0 / plain * (2 * math.pi)  # torch divides a number by a tensor in two steps
    mixed = np.where(length > first / low, plain / factor, plain)
    smooth = (1.0 / length * first - low) / (high - low)
    between = (1 - smooth) * mixed / factor + smooth * mixed
    return np.where((length < first / high) | (length > first / low), mixed, between), 1.0


def _yarn(rope: Mapping[str, Any], powers: np.ndarray, longest: int) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071)."""
    first, dim, base = rope["original_max_position_embeddings"], 2 * len(powers), rope["rope_theta"]
    factor = rope["factor"] or longest / first

    def grown(scale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = grown(scales[0]) / grown(scales[1]) if scales[0] and scales[1] else grown()
    ends = [
        dim * math.log(first / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    ]
    if rope.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    ramp = (np.arange(len(powers), dtype=np.float32) - low) / (high - low if high != low else 0.001)
    kept = 1 - np.clip(ramp, 0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)
