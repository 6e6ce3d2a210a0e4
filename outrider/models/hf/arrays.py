"""Tensors of torch and arrays of numpy over the same memory, bfloat16 included."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


def as_array(x: Tensor) -> np.ndarray:
    """An array over the memory of a tensor on the CPU."""
    x = x.detach()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def as_tensor(x: np.ndarray) -> Tensor:
    """A tensor over the memory of an array."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
