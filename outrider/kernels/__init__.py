"""The kernels of each device, behind one choice: `for_device`.

`kernels.cpu` has compiled kernels for the CPU. A device without kernels uses torch: each field of its `Kernels` is None,
and the caller runs its own torch code, which is also the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import cpu

# The version of the native path's arithmetic, from weights to tokens. It is in every fingerprint. Raise it with each change after
# which a text of the native path may have other bits: kernels, packing, rotary tables, sampling, noise.
ARITHMETIC = 2


@dataclass(frozen=True)
class Kernels:
    """The kernels of one device. None stands for torch.

    attention: see `cpu.attention`. pack_vectors: for the cache, see `cpu.pack_vectors`.
    linear: packs weights, see `cpu.Packed`. gumbel: see `cpu.gumbel`.
    argmax, argmax_gumbel: choose one token of one row, see `cpu.argmax`.
    softmax, log, total: see `kernels.probabilities`.
    missing: why there are no kernels, or None.
    """

    attention: Callable[..., Tensor] | None = None
    pack_vectors: Callable[..., Tensor] | None = None
    linear: type[cpu.Packed] | None = None
    gumbel: Callable[..., Tensor] | None = None
    argmax: Callable[..., int] | None = None
    argmax_gumbel: Callable[..., int] | None = None
    softmax: Callable[..., Tensor] | None = None
    log: Callable[[Tensor], Tensor] | None = None
    total: Callable[[Tensor], Tensor] | None = None
    missing: str | None = None


_CPU = Kernels(
    cpu.attention,
    cpu.pack_vectors,
    cpu.Packed,
    cpu.gumbel,
    cpu.argmax,
    cpu.argmax_gumbel,
    cpu.softmax,
    cpu.log,
    cpu.total,
)


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on a device."""
    if device.type != "cpu":
        return Kernels(missing=f"the device is {device}")
    return _CPU if cpu.available() else Kernels(missing=cpu.why())
