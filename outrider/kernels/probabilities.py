"""From scores to probabilities. Each function of the kernels has one order of operations, so it has the same bits everywhere.

numpy's own functions differ in their last bits between processors. A token at the border of top-p, or an acceptance, could then
differ. Without the kernels numpy computes, which is also the definition.
"""

from __future__ import annotations

import numpy as np

from outrider.kernels import cpu


def softmax(scores: np.ndarray) -> np.ndarray:
    """float32 [..., n]: the softmax over the last dimension. scores: float32 [..., n]. Probabilities below 1e-38 are 0."""
    return cpu.softmax(scores) if cpu.available() else np.exp(_log_softmax(scores))


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """float32 [..., n]: the logarithm of the softmax over the last dimension. scores: float32 [..., n]."""
    return cpu.softmax(scores, logarithm=True) if cpu.available() else _log_softmax(scores)


def log(probs: np.ndarray) -> np.ndarray:
    """float64: the natural logarithm of each probability, of any float type; -inf for 0."""
    with np.errstate(divide="ignore"):
        return cpu.log(probs) if cpu.available() else np.log(probs, dtype=np.float64)


def total(values: np.ndarray) -> np.ndarray:
    """float64 [..., 1]: the sum over the last dimension of float64 values."""
    return cpu.total(values)[..., None] if cpu.available() else values.sum(-1, keepdims=True)


def running_total(values: np.ndarray) -> np.ndarray:
    """float64 [..., n]: the sum of each value and those before it, added one after another. values: float."""
    return values.cumsum(-1, dtype=np.float64)  # numpy adds in this order on every processor


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        x = scores - scores.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))
