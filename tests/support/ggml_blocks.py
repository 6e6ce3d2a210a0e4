"""Matrices in ggml's block formats, filled with random bits and sane scales."""

from __future__ import annotations

import gguf
import numpy as np
from light import torch

from outrider.kernels.blocks import Blocks

# Where each format keeps its float16 values, in bytes from the start of a block. MXFP4 has none.
_HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
BLOCK_FORMATS = tuple(_HALVES)  # those that the kernels compute with
_HALVES |= {"IQ2_XXS": (0,), "IQ3_S": (0,)}


def random_blocks(name: str, rows: int, columns: int, fill: int | None = None) -> Blocks:
    """fill: one byte for everything but the float16 values, which are then 1; None: random."""
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    rng = np.random.default_rng(int(torch.randint(2**31, ())))
    shape = (rows, columns // size, width)
    raw = rng.integers(0, 256, shape, dtype=np.uint8) if fill is None else np.full(shape, fill, dtype=np.uint8)
    for at in _HALVES[name]:
        values = rng.standard_normal((*shape[:2], 1)) * 0.01 if fill is None else np.ones((*shape[:2], 1))
        raw[:, :, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(*shape[:2], 2)
    if name == "MXFP4":  # the exponent of the scale; 128 is that of 1
        raw[:, :, 0] = rng.integers(117, 123, shape[:2], dtype=np.uint8) if fill is None else 128
    return Blocks(raw.reshape(rows, -1), name, columns)


def spread(rows: int, columns: int) -> torch.Tensor:
    """float32 activations with a few outliers."""
    return torch.randn(rows, columns) * (1 + 7 * (torch.rand(rows, columns) < 1 / 64))
