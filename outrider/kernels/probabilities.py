"""From scores to probabilities. Each function of the kernels has one order of operations, so it has the same bits everywhere.

numpy's own functions differ in their last bits between processors. A token at the border of top-p, or an acceptance, could then
differ. Without the kernels numpy computes, which is also the definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.kernels import cpu
from outrider.kernels.border import as_array, like


def softmax(scores: Any) -> Any:
    """float32 [..., n]: the softmax over the last dimension. scores: float32 [..., n]. Probabilities below 1e-38 are 0."""
    x = as_array(scores)
    return like(scores, cpu.softmax(x) if cpu.available() else np.exp(_log_softmax(x)))


def log_softmax(scores: Any) -> Any:
    """float32 [..., n]: the logarithm of the softmax over the last dimension. scores: float32 [..., n]."""
    x = as_array(scores)
    return like(scores, cpu.softmax(x, logarithm=True) if cpu.available() else _log_softmax(x))


def log(probs: Any) -> Any:
    """float64: the natural logarithm of each probability, of any float type; -inf for 0."""
    x = as_array(probs).astype(np.float64, copy=False)
    with np.errstate(divide="ignore"):
        return like(probs, cpu.log(x) if cpu.available() else np.log(x))


def total(values: Any) -> Any:
    """float64 [..., 1]: the sum over the last dimension of float64 values."""
    x = as_array(values)
    return like(values, cpu.total(x)[..., None] if cpu.available() else x.sum(-1, keepdims=True))


def running_total(values: Any) -> Any:
    """float64 [..., n]: the sum of each value and those before it, added one after another. values: float."""
    return like(values, as_array(values).cumsum(-1, dtype=np.float64))  # numpy adds in this order on every processor


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        x = scores - scores.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))
