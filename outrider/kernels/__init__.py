"""The kernels of each device. `kernels.cpu` has compiled ones for the CPU, `kernels.gpu` those in Triton for NVIDIA's GPUs.

Where a device has none, the caller runs its own torch code, which is also the definition.
"""

from __future__ import annotations

from outrider.kernels import cpu

# The version of the native path's arithmetic, from weights to tokens. It is in every fingerprint. Raise it with each change after
# which a text of the native path may have other bits: kernels, packing, rotary tables, sampling, noise.
ARITHMETIC = 3
# A variable. 1: models on a GPU run by `kernels.gpu`, where that can run them. Until it is measured on a card, they else run by
# the modelling code of transformers.
OWN_GPU = "OUTRIDER_GPU"


def why_no_kernels(device: object) -> str | None:
    """Why there are no kernels for numbers on a device; None if there are. device: a name, or torch's device."""
    return cpu.why() if str(device).startswith("cpu") else f"the device is {device}"
