"""Models of transformers that are built with rotary frequencies of the same bits on every processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.models.rotary import power


class ExactPowers(TorchFunctionMode):
    """Build a model inside: its rotary frequencies, 1 / base ** (2 i / dim) in any scaled form, are then the same everywhere.

    torch's powers differ by one unit in the last place between processors with and without AVX2. Inside, a number to the
    power of a float32 vector on the CPU is computed in decimal numbers, and rounded.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.__rpow__, torch.pow):
            exponents, base = args if func is Tensor.__rpow__ else reversed(args)
            if isinstance(base, int | float) and base > 0 and _is_vector(exponents):
                return torch.from_numpy(power(base, exponents.numpy()))
        return func(*args, **(kwargs or {}))


def _is_vector(exponents: object) -> bool:
    return (
        isinstance(exponents, Tensor)
        and exponents.device.type == "cpu"
        and exponents.dtype == torch.float32
        and exponents.dim() == 1
    )
