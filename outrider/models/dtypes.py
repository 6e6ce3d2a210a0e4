"""The precisions of weights: their names, and the bytes of one weight."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from outrider.core.suggest import did_you_mean

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")  # formats that only the kernels know
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.625}  # of one, scales included
# By the code in a safetensors header.
STORED_DTYPES = {
    code: np.dtype(kind)
    for code, kind in (
        ("F64", np.float64), ("F32", np.float32), ("BF16", ml_dtypes.bfloat16), ("F16", np.float16), ("I64", np.int64),
        ("I32", np.int32), ("I16", np.int16), ("I8", np.int8), ("U8", np.uint8), ("BOOL", np.bool_),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2), ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    )
}  # fmt: skip
_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_name(dtype: Any) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(given: Any) -> str:
    """ "auto", or the name of a dtype to compute in; it may be torch's own. Raises ValueError with a hint for anything else."""
    name = dtype_name(given)
    if name in ("auto", *DTYPES):
        return name
    if name in QUANTIZATIONS:
        raise ValueError(f"{name} is no dtype to compute in; for weights of {name} give quantization={name!r}")
    hint = f" (did you mean {_ALIASES[name]!r}?)" if name in _ALIASES else did_you_mean(name, DTYPES)
    raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}{hint}")
