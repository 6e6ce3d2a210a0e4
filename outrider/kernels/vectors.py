"""How a slot cache keeps the key, or the value, of a head: as floats, or rounded to bfloat16 or to 8 bit.

In 8 bit a vector is cut into blocks of 32 numbers, as q8_0 of ggml does it. Each block has a scale in float32. First come the
scales of all blocks, then a byte for each number. A vector is rounded on its own, so its bytes do not depend on other tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

BLOCK = 32


def packed_width(dim: int, dtype: DTypeLike) -> int:
    """Elements of `dtype` that a vector of `dim` numbers takes."""
    return dim + 4 * -(-dim // BLOCK) if np.dtype(dtype) == np.int8 else dim


def vector_dim(packed: Any) -> int:
    """How many numbers each packed vector holds. The inverse of `packed_width`."""
    width = packed.shape[-1]
    return width - 4 * -(-width // (BLOCK + 4)) if packed.itemsize == 1 else width


def pack_vectors(x: Any, dtype: Any, on: Any = np) -> Any:
    """x [..., dim] as `dtype` keeps it, [..., packed_width(dim)]. The twin of the native kernel, with the same bits.

    int8: the scale of a block is its largest magnitude / 127. That number is then exact, which the outliers of keys need. A
    block that holds NaN or infinity gets the scale NaN, so a damaged model still shows. Another dtype only rounds.

    on: the module that x is of, numpy or torch.
    """
    if dtype != on.int8:
        return on.asarray(x, dtype=dtype)
    x, dim = on.asarray(x, dtype=on.float32), x.shape[-1]
    padded = on.concatenate([x, on.zeros_like(x[..., [0] * (-dim % BLOCK)])], -1)
    blocks = padded.reshape(*x.shape[:-1], -1, BLOCK)
    finite = on.isfinite(blocks).all(-1)
    blocks = on.where(finite[..., None], blocks, 0.0)
    scale = on.amax(on.abs(blocks), -1) / 127
    scale = on.where(scale >= 2.0**-110, scale, 0.0)
    inverse = 1 / on.where(scale > 0, scale, 1.0)
    numbers = on.asarray(on.round(blocks * inverse[..., None]), dtype=on.int8).reshape(padded.shape)
    stored = on.where(finite, scale, math.nan).view(on.int8)
    return on.concatenate([stored, numbers[..., :dim]], -1)


def unpack_vectors(packed: Any, on: Any = np) -> Any:
    """float32 [..., dim]: the numbers that packed vectors stand for. They are exact. on: as for `pack_vectors`."""
    if packed.dtype != on.int8:
        return on.asarray(packed, dtype=on.float32)
    dim = vector_dim(packed)
    scales = on.concatenate([packed[..., : packed.shape[-1] - dim]], -1).view(on.float32)
    return packed[..., -dim:] * scales[..., [i // BLOCK for i in range(dim)]]
