"""What Medusa heads and block drafters are made of: packed linears and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from outrider.core.types import Array
from outrider.kernels import cpu as native
from outrider.models.dtypes import DTYPES

Linear = Callable[[Array], Array]
SMALL = 2**22  # weights; a smaller head costs more in calls than in bytes


class Linears:
    """Makes the linears of a head, packed as `precision`.

    tensors: for those that are made by name. eps: of its norms. bytes: of the weights of all linears so far.
    """

    def __init__(self, precision: str, tensors: Mapping[str, Array] | None = None, eps: float = 0.0) -> None:
        self.precision, self.bytes, self.tensors, self._eps = precision, 0, tensors or {}, eps

    def __call__(self, weights: Sequence[Array], biases: Sequence[Array | None] = (None,)) -> Linear:
        """float32 [..., in] -> float32 [..., out] over matrices [out, in], one below the other."""
        packed = native.Packed(weights, self.precision, biases)
        self.bytes += packed.bytes
        return packed.linear

    def named(self, *names: str) -> Linear:
        """The linear over the matrices of these names, with their biases."""
        return self([self.tensors[f"{n}.weight"] for n in names], [self.tensors.get(f"{n}.bias") for n in names])

    def norm(self, name: str) -> Linear:
        """x * weight / sqrt(mean(x^2) + eps), over the last dim."""
        weight, eps = self.tensors[f"{name}.weight"].astype(np.float32), self._eps
        return lambda x: x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(np.minimum(-x, 80)))


def precision_of(quantization: str, tensors: Iterable[Array]) -> str:
    """The precision of a head's linears. quantization: that of the configuration; "auto" rounds large heads to 8 bit.

    Raises ValueError without the native kernels: they run all heads."""
    if not native.available():
        raise ValueError(f"trained heads draft with the native kernels alone, which are not here: {native.why()}")
    matrices = [t for t in tensors if t.ndim == 2]
    stored = matrices[0].dtype.name
    if quantization == "auto":
        large = sum(t.size for t in matrices) >= SMALL
        return "int8" if large else stored if stored in DTYPES else "float32"
    return stored if quantization == "none" else quantization
