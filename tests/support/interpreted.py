"""Triton's interpreter, mended so that equal bits mean equal order. Import it before any module of `kernels.gpu`.

With TRITON_INTERPRET=0 in the environment, as on a machine with a GPU, the kernels run there, and nothing is mended. Tests that
use `DEVICE` serve both; others are marked `on_cpu`.

The interpreter multiplies with numpy, whose sums depend on the shape, and takes the bits of bfloat16 for numbers. In its place
`product` adds groups of 16 in order, as a tensor core does, so that another order of sums has other bits.
A number becomes bfloat16 by rounding, not by cutting. A fused multiplication and addition is rounded once.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="needs Triton's interpreter")


def product(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """d + a @ b: groups of 16 along K, each summed in float64 in order and rounded, are added to d one after another."""
    left, right = _numbers(a.data), _numbers(b.data)
    left = left.reshape(len(left), -1, 16).transpose(1, 2, 0)  # [group, 16, m]
    right = right.reshape(len(left), 16, -1)
    total = left[:, 0, :, None] * right[:, 0, None]
    for i in range(1, 16):
        total += left[:, i, :, None] * right[:, i, None]
    out = d.data.copy()
    for group in total.astype(np.float32):
        out += group
    return interpreter.TensorHandle(out, d.dtype.scalar)


def _numbers(bits: np.ndarray) -> np.ndarray:
    """float64, of bfloat16 or other floats."""
    return ((bits.astype(np.uint32) << 16).view(np.float32) if bits.dtype == np.uint16 else bits).astype(np.float64)


def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in the 64 bits of a long double, where a product of two float32 is exact."""
    result = x.data.astype(np.longdouble) * y.data + z.data
    return interpreter.TensorHandle(result.astype(z.data.dtype), z.dtype.scalar)


def rounded(cast: Any) -> Any:
    """A conversion of the interpreter that rounds float32 to the nearest bfloat16, and to the even one of two."""

    def convert(self: Any, source: Any, to: Any, *mode: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, to, *mode)
        numbers = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(numbers, to.scalar)

    return convert


def patched_once(function: Any) -> Any:
    """The interpreter puts its own functions in the place of triton's in each launch and each call of a helper: half of the time.
    Here they stay."""
    languages = {
        value.__name__ for value in vars(sys.modules[function.__module__]).values() if value is tl or value is tl.core
    }
    if not languages <= _patched:
        _patched.update(languages)
        _patch(function)
    return interpreter._LangPatchScope()


_patched, _patch = set[str](), interpreter._patch_lang
if DEVICE == "cpu":
    interpreter._patch_lang = patched_once
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(interpreter.InterpreterBuilder, name, rounded(getattr(interpreter.InterpreterBuilder, name)))
    interpreter.InterpreterBuilder.create_dot = product  # pyright: ignore[reportAttributeAccessIssue]
    interpreter.InterpreterBuilder.create_fma = fused  # pyright: ignore[reportAttributeAccessIssue]
