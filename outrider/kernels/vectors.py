"""How a slot cache keeps the key, or the value, of a head: as floats, or rounded to bfloat16 or to 8 bit.

In 8 bit a vector is cut into blocks of 32 numbers, as q8_0 of ggml does it. Each block has a scale in float32. First come the
scales of all blocks, then a byte for each number. A vector is rounded on its own, so its bytes do not depend on other tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from outrider.kernels.border import as_array, as_dtype, like

BLOCK = 32


def packed_width(dim: int, dtype: DTypeLike) -> int:
    """Elements of `dtype` that a vector of `dim` numbers takes."""
    return dim + 4 * -(-dim // BLOCK) if as_dtype(dtype) == np.int8 else dim


def vector_dim(packed: Any) -> int:
    """How many numbers each packed vector holds. The inverse of `packed_width`."""
    width = packed.shape[-1]
    return width - 4 * -(-width // (BLOCK + 4)) if as_dtype(packed.dtype) == np.int8 else width


def pack_vectors(x: Any, dtype: DTypeLike) -> Any:
    """x [..., dim] as `dtype` keeps it, [..., packed_width(dim)]. The twin of the native kernel, with the same bits.

    int8: the scale of a block is its largest magnitude / 127. That number is then exact, which the outliers of keys need. A
    block that holds NaN or infinity gets the scale NaN, so a damaged model still shows. Another dtype only rounds.
    """
    given, x, dtype = x, as_array(x), as_dtype(dtype)
    if dtype != np.int8:
        return like(given, x.astype(dtype))
    dim, zero = x.shape[-1], np.float32(0)
    padded = np.pad(x.astype(np.float32), [(0, 0)] * (x.ndim - 1) + [(0, -dim % BLOCK)])
    blocks = padded.reshape(*x.shape[:-1], -1, BLOCK)
    finite = np.isfinite(blocks).all(-1)
    blocks = np.where(finite[..., None], blocks, zero)
    scale = np.abs(blocks).max(-1, initial=0) / np.float32(127)
    scale = np.where(scale >= 2.0**-110, scale, zero)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    numbers = np.rint(blocks * inverse[..., None]).astype(np.int8).reshape(padded.shape)[..., :dim]
    stored = np.where(finite, scale, np.float32(np.nan))
    return like(given, np.concatenate([stored.view(np.int8), numbers], -1))


def unpack_vectors(packed: Any, dtype: DTypeLike = np.float32) -> Any:
    """[..., dim] in `dtype`: the numbers that packed vectors stand for. In float32 they are exact."""
    given, packed, dtype = packed, as_array(packed), as_dtype(dtype)
    if packed.dtype != np.int8:
        return like(given, packed.astype(dtype))
    dim = vector_dim(packed)
    scales = np.ascontiguousarray(packed[..., : packed.shape[-1] - dim]).view(np.float32)
    return like(given, (packed[..., -dim:] * scales.repeat(BLOCK, -1)[..., :dim]).astype(dtype))
