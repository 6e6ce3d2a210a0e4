"""Which copies of a model are cheaper to read than the model itself. No torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.models.load import Loaded

LOWER_PRECISION = {
    "float32": ("int8", "int4"),
    "bfloat16": ("int8", "int4"),
    "float16": ("int8", "int4"),
    "int8": ("int4",),
    "gguf": ("int4",),  # files of 8 bits gain; those of 4 do not
}
"""Weights of a model -> the weights that are cheaper to read, and so can draft for it."""

QUANTIZED = ("int8", "int4")


def copy_weights(quantization: str) -> str:
    """The weights of a model's copy. quantization: that of the configuration."""
    return "int8" if quantization == "auto" else quantization


def require_lower_precision(target: Loaded, weights: str) -> None:
    """Raise ValueError if a copy with these weights is not cheaper to read than the target."""
    if weights not in LOWER_PRECISION.get(target.weights, ()):
        raise ValueError(
            f"a copy with {weights} weights would gain nothing for a target with {target.weights} weights; "
            'use {"method": "quantized_self", "quantization": "int4"}, or a target with 16 or 32 bit weights'
        )
