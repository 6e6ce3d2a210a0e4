"""From scores to probabilities. On the CPU each function has one order of operations, so it has the same bits everywhere.

torch's own functions differ in their last bits between AVX2, AVX-512, older processors and ARM. A token at the border of
top-p, or an acceptance, could then differ. A device without kernels uses torch, which is also the definition.
"""

from __future__ import annotations

from torch import Tensor

from outrider.kernels import cpu, why_no_kernels


def softmax(scores: Tensor) -> Tensor:
    """float32 [..., n]: the softmax over the last dimension. scores: float32 [..., n]. Probabilities below 1e-38 are 0."""
    return scores.softmax(-1) if why_no_kernels(scores.device) else cpu.softmax(scores)


def log_softmax(scores: Tensor) -> Tensor:
    """float32 [..., n]: the logarithm of the softmax over the last dimension. scores: float32 [..., n]."""
    return scores.log_softmax(-1) if why_no_kernels(scores.device) else cpu.softmax(scores, logarithm=True)


def log(probs: Tensor) -> Tensor:
    """float64: the natural logarithm of each probability, of any float type; -inf for 0."""
    return probs.double().log() if why_no_kernels(probs.device) else cpu.log(probs.double())


def total(values: Tensor) -> Tensor:
    """float64 [..., 1]: the sum over the last dimension of float64 values."""
    return values.sum(-1, keepdim=True) if why_no_kernels(values.device) else cpu.total(values)[..., None]


def running_total(values: Tensor) -> Tensor:
    """float64 [..., n]: the sum of each value and those before it, added one after another. values: float."""
    return values.double().cumsum(-1)  # torch adds in this order on every processor
