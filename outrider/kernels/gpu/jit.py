"""What every kernel is made and launched with."""

from __future__ import annotations

from typing import Any

import triton

jit: Any = triton.jit  # its types know neither the settings of a launch nor that a number may be a constant


def settings(warps: int = 4, stages: int = 3) -> dict[str, Any]:
    """Of a launch. Rule 5: multiplication and addition are not fused."""
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}


def blocks(n: int, size: int) -> int:
    """Blocks of a size that cover n."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
