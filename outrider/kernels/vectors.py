"""How a slot cache keeps the key, or the value, of a head: as floats, or rounded to bfloat16 or to 8 bit.

In 8 bit a vector is cut into blocks of 32 numbers, as q8_0 of ggml does it. Each block has a scale in float32. First come the
scales of all blocks, then a byte for each number. A vector is rounded on its own, so its bytes do not depend on other tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32


def packed_width(dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that a vector of `dim` numbers takes."""
    return dim + 4 * -(-dim // BLOCK) if dtype == torch.int8 else dim


def vector_dim(packed: Tensor) -> int:
    """How many numbers each packed vector holds. The inverse of `packed_width`."""
    width = packed.shape[-1]
    return width - 4 * -(-width // (BLOCK + 4)) if packed.dtype == torch.int8 else width


def pack_vectors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., dim] as `dtype` keeps it, [..., packed_width(dim)]. The twin of the native kernel, with the same bits.

    int8: the scale of a block is its largest magnitude / 127. That number is then exact, which the outliers of keys need. A
    block that holds NaN or infinity gets the scale NaN, so a damaged model still shows. Another dtype only rounds.
    """
    if dtype != torch.int8:
        return x.to(dtype)
    dim = x.shape[-1]
    blocks = pad(x.float(), (0, -dim % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1) / 127
    finite = blocks.isfinite().all(-1)
    scale = torch.where(finite & (scale >= 2.0**-110), scale, 0.0)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    numbers = torch.where(finite[..., None], blocks, 0.0).mul(inverse[..., None]).round().to(torch.int8)
    stored = torch.where(finite, scale, torch.nan)
    return torch.cat([stored.view(torch.int8), numbers.flatten(-2)[..., :dim]], -1)


def unpack_vectors(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., dim] in `dtype`: the numbers that packed vectors stand for. In float32 they are exact."""
    if packed.dtype != torch.int8:
        return packed.to(dtype)
    dim = vector_dim(packed)
    scales = packed[..., : packed.shape[-1] - dim].contiguous().view(torch.float32)
    return (packed[..., -dim:].float() * scales.repeat_interleave(BLOCK, -1)[..., :dim]).to(dtype)
