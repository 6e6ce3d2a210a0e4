"""Where a part that still holds torch tensors meets one that holds numpy arrays. Temporary: it goes with the last of them."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np


def is_tensor(x: object) -> bool:
    """Whether x is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_array(x: Any) -> np.ndarray:
    """An array as it is; a tensor on the CPU as an array over the same memory."""
    if not is_tensor(x):
        return np.asarray(x)
    torch = sys.modules["torch"]
    x = x.detach()
    if x.is_meta:
        return np.zeros(x.shape, as_dtype(x.dtype))
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def as_dtype(dtype: Any) -> np.dtype:
    """numpy's dtype of one of torch or numpy."""
    return np.dtype(str(dtype).removeprefix("torch.")) if str(dtype).startswith("torch.") else np.dtype(dtype)


def like(x: Any, result: np.ndarray) -> Any:
    """The result as a tensor if x is one."""
    return as_tensor(result) if is_tensor(x) else result


def as_tensor(x: np.ndarray) -> Any:
    """An array as a tensor over the same memory."""
    import torch

    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(x)
    )
