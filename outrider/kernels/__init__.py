"""The kernels of each device. `kernels.cpu` has compiled ones for the CPU.

Where a device has none, the caller runs its own torch code, which is also the definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.kernels import cpu

if TYPE_CHECKING:
    import torch

# The version of the native path's arithmetic, from weights to tokens. It is in every fingerprint. Raise it with each change after
# which a text of the native path may have other bits: kernels, packing, rotary tables, sampling, noise.
ARITHMETIC = 2


def why_no_kernels(device: torch.device | str) -> str | None:
    """Why there are no kernels for tensors on a device; None if there are."""
    return cpu.why() if str(device).startswith("cpu") else f"the device is {device}"
