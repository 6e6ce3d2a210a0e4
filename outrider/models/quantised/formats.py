"""How each method stores a matrix: its exact values, and the same values in a block format of our kernels if there is one.

The names of the tensors tell which matrices are quantised; settings tell only how.
A matrix that a checkpoint leaves in floats has a plain `weight`, whatever the settings say of ignored modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy import ndarray

from outrider.kernels.blocks import Blocks
from outrider.models.checkpoint import UnsupportedModel

_BLOCK = 32  # columns that share a scale in the block formats
_ROWS = 256  # of which `dense` has float32 values at a time
# AutoAWQ's order of eight columns in 32 bits.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# The values of four bits e2m1, doubled (OCP Microscaling Formats 1.0, table 6).
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
_FLOATS4 = np.array([*_FP4, *(-x for x in _FP4)], np.int8)

Tensors = Mapping[str, ndarray]


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A matrix [out, in]: value[i, j] = values[i, j] * scales[i // tile, group[j]]."""

    values: ndarray  # [out, in], integers with the zero point subtracted, or small floats
    scales: ndarray  # floats [tiles of rows, group]
    group: ndarray  # int64 [in], the group of each column
    tile: int = 1  # rows that share a scale; the last tile may be cut

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    def dense(self, dtype: np.dtype[Any]) -> ndarray:
        """[out, in]: the values that the format's own library gives in this dtype."""
        out = np.empty(self.shape, dtype)
        for start in range(0, len(out), _ROWS):
            part = self.values[start : start + _ROWS].astype(np.float32)
            tiles = np.arange(start, start + len(part)) // self.tile
            out[start : start + _ROWS] = part * self.scales[tiles].astype(np.float32)[:, self.group]
        return out

    def blocks(self) -> Blocks | None:
        """The very values in a format of our kernels. None if no format holds them exactly.

        MXFP4 for doubled 4-bit floats under powers of two. Q4_0 for integers of -8 to 7, Q5_0 for -16 to 15 (4 bits with a zero
        point), Q8_0 for 8 bits. A zero point must not become a minimum in float16: it would be rounded.
        """
        rows, columns = self.shape
        if self.values.dtype.kind != "i" or columns % _BLOCK or self.tile != 1:
            return None
        group = self.group.reshape(-1, _BLOCK)
        if not (group == group[:, :1]).all():  # the order of activations mixes the groups
            return None
        scales = self.scales[:, group[:, 0]]
        values = self.values.reshape(rows, -1, _BLOCK)
        if (packed := _mxfp4(values, scales)) is not None:
            return Blocks(packed, "MXFP4", columns)
        with np.errstate(over="ignore"):
            halves = np.ascontiguousarray(scales, np.float16)
        if not np.array_equal(halves.astype(np.float32), scales.astype(np.float32)):
            return None
        low, high = int(values.min()), int(values.max())
        head = halves.view(np.uint8).reshape(rows, -1, 2)
        if low >= -8 and high <= 7:
            name, parts = "Q4_0", [head, _nibbles((values + 8).astype(np.uint8))]
        elif low >= -16 and high <= 15:
            shifted = (values + 16).astype(np.uint8)
            name, parts = "Q5_0", [head, np.packbits(shifted >> 4, -1, "little"), _nibbles(shifted & 15)]
        elif low >= -128 and high <= 127:
            name, parts = "Q8_0", [head, values.astype(np.int8).view(np.uint8)]
        else:
            return None
        return Blocks(np.concatenate(parts, -1).reshape(rows, -1), name, columns)


def _mxfp4(values: ndarray, scales: ndarray) -> ndarray | None:
    """MXFP4's blocks uint8 [out, bytes] of integers [out, block, 32] and scales [out, block], or None if they are others."""
    mantissa, exponent = np.frexp(scales.astype(np.float32))
    if not ((mantissa == 0.5) & (exponent >= -127)).all() or not np.isin(values, _FLOATS4).all():
        return None
    codes = np.searchsorted(_FLOATS4[:8], np.abs(values)) + 8 * (values < 0)
    head = (exponent + 127).astype(np.uint8)[..., None]
    return np.concatenate([head, _nibbles(codes.astype(np.uint8))], -1).reshape(len(values), -1)


def _nibbles(values: ndarray) -> ndarray:
    """uint8 [..., 32] of 0 to 15 -> uint8 [..., 16]: the first half in the low bits, the second in the high ones."""
    return values[..., :16] | (values[..., 16:] << 4)


class Format(NamedTuple):
    """One way to store a matrix."""

    # the matrix, of the tensors by suffix, the settings, and the name for errors.
    read: Callable[[Tensors, Mapping[str, Any], str], QuantisedWeight]
    # [out, in], of the shape of the first tensor, the settings, and what reads another one if it is there.
    shape: Callable[[tuple[int, ...], Mapping[str, Any], Callable[[str], ndarray | None]], tuple[int, ...]]
    # suffixes; before them is the matrix's name without `weight`. The first one tells its size.
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()  # suffixes of tensors that may be there
    drop: tuple[str, ...] = ()  # those that its values do not depend on

    @property
    def suffix(self) -> str:
        """Of a tensor that plain checkpoints do not have."""
        return next(suffix for suffix in self.needed if suffix != "weight")


def unpacked(words: ndarray, bits: int, count: int) -> ndarray:
    """uint8 [..., count]: unsigned numbers of some bits from little-endian 32-bit words [..., word], without gaps."""
    bytes_ = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        return _halves(bytes_)[..., :count]
    start = np.arange(count) * bits
    padded = np.pad(bytes_, [(0, 0)] * (bytes_.ndim - 1) + [(0, 1)]).astype(np.int32)
    window = padded[..., start // 8] | (padded[..., start // 8 + 1] << 8)
    return ((window >> (start % 8)) & ((1 << bits) - 1)).astype(np.uint8)


def _halves(bytes_: ndarray) -> ndarray:
    """uint8 [..., 2 n]: the low and the high four bits of bytes [..., n]."""
    return np.stack((bytes_ & 15, bytes_ >> 4), -1).reshape(*bytes_.shape[:-1], -1)


def _shaped(name: str, tensor: ndarray, wanted: tuple[int, ...]) -> ndarray:
    if tensor.shape != wanted:
        raise ValueError(
            f"tensor {name} has shape {list(tensor.shape)}, and the others of its matrix and the quantization_config of "
            f"config.json ask for {list(wanted)}; one of them is of another checkpoint, so download all files again"
        )
    return tensor


def _groups(name: str, columns: int, size: int, scales: int) -> ndarray:
    """int64 [in]: the group of each column. size: of a group; -1 for one group."""
    size = columns if size in (-1, 0, None) else size
    if -(-columns // size) != scales:
        raise ValueError(
            f"tensor {name} has {scales} groups, and {columns} inputs in groups of {size} have {-(-columns // size)}; the "
            "quantization_config of config.json is not that of the weights, so download all files again"
        )
    return np.arange(columns) // size


def _number(settings: Mapping[str, Any], *names: str, otherwise: int) -> int:
    """The first of these settings that is there."""
    value = next((settings[name] for name in names if settings.get(name) is not None), otherwise)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f'"{names[0]}" of quantization_config in config.json must be a whole number, got {value!r}')
    return value


def _gptq(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    bits = int(settings["bits"])
    words, scales = tensors["qweight"], tensors["scales"]
    columns, rows = words.shape[0] * 32 // bits, words.shape[1]
    size = _number(settings, "group_size", otherwise=-1)
    _shaped(f"{name}scales", scales, (1 if size < 1 else -(-columns // size), rows))
    zeros = _shaped(f"{name}qzeros", tensors["qzeros"], (len(scales), rows * bits // 32))
    order = tensors.get("g_idx")
    if order is not None and len(order):
        group = _shaped(f"{name}g_idx", order, (columns,)).astype(np.int64)
        if not 0 <= int(group.min()) <= int(group.max()) < len(scales):
            raise ValueError(f"tensor {name}g_idx names group {int(group.max())} of {len(scales)}; download it again")
    else:
        group = np.arange(columns) // (size if size > 0 else columns)
    if first := _gptq_format(settings) != "gptq_v2":  # it stores zero points less one
        ones = sum(1 << shift for shift in range(0, 32, bits)) if bits != 3 else 0
        # GPTQModel adds it to whole words, so a zero point may carry into the next.
        zeros = zeros.view(np.uint32) + np.uint32(ones)
    zero = unpacked(zeros, bits, rows).T.astype(np.int16)  # [out, group]
    if first and bits == 3:
        zero = zero + 1 & 7
    values = unpacked(words.T, bits, columns).astype(np.int16) - zero[:, group]
    return QuantisedWeight(values, scales.T, group)


def _gptq_format(settings: Mapping[str, Any]) -> Any:
    stored = settings.get("checkpoint_format", settings.get("format", "gptq"))
    return "marlin" if settings.get("is_marlin_format") else stored


def _awq(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    words, scales = tensors["qweight"], tensors["scales"]
    columns, rows = words.shape[0], words.shape[1] * 8
    _shaped(f"{name}scales", scales, (len(scales), rows))
    zeros = _shaped(f"{name}qzeros", tensors["qzeros"], (len(scales), words.shape[1]))
    group = _groups(
        f"{name}scales", columns, _number(settings, "group_size", "q_group_size", otherwise=128), len(scales)
    )
    values, zero = (
        unpacked(t, 4, rows).reshape(len(t), -1, 8)[..., list(_AWQ_ORDER)].reshape(len(t), rows).T.astype(np.int16)
        for t in (words, zeros)
    )
    return QuantisedWeight(values - zero[:, group], scales.T, group)


def _packed(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    """compressed-tensors: pack-quantized, and the formats of 4-bit floats, whose words are bytes."""
    words, scales = tensors["weight_packed"], tensors["weight_scale"]
    if words.dtype == np.uint8:
        return _fp4(words, scales, tensors.get("weight_global_scale"), f"{name}weight_scale")
    weights = _scheme(settings, name)
    bits = int(weights["num_bits"])
    if "weight_shape" not in tensors:
        raise ValueError(
            f"the checkpoint lacks tensor {name}weight_shape, without which {name}weight_packed has no size"
        )
    rows, columns = (int(n) for n in tensors["weight_shape"])
    _shaped(f"{name}weight_packed", words, (rows, -(-columns * bits // 32)))
    values = unpacked(words, bits, columns).astype(np.int16) - (1 << bits - 1)
    zero = None
    if (stored := tensors.get("weight_zero_point")) is not None:
        zero = unpacked(stored.T, bits, rows).T.astype(np.int16) - (1 << bits - 1)
    if weights.get("strategy") == "group" and scales.ndim == 2:
        _groups(f"{name}weight_scale", columns, _number(weights, "group_size", otherwise=-1), scales.shape[1])
    return _integers(values, scales, zero, tensors.get("weight_g_idx"), name)


def _packed_shape(words: tuple[int, ...], _: object, read: Callable[[str], ndarray | None]) -> tuple[int, ...]:
    shape = read("weight_shape")
    return (words[0], 2 * words[1]) if shape is None else (int(shape[0]), int(shape[1]))


def _scheme(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings of the weights. All groups of settings with the same number of bits are alike to us."""
    schemes = [group["weights"] for group in settings.get("config_groups", {}).values() if group.get("weights")]
    bits = {weights["num_bits"] for weights in schemes}
    if len(bits) == 1:
        return schemes[0]
    raise UnsupportedModel(
        f"{name}weight_packed is one of matrices of {sorted(bits)} bits, which outrider does not tell apart"
    )


def _integers(
    values: ndarray, scales: ndarray, zero: ndarray | None, order: ndarray | None, name: str
) -> QuantisedWeight:
    """compressed-tensors' integers. scales: [1], [out, 1] or [out, group]. zero: as the scales."""
    rows, columns = values.shape
    scales = np.broadcast_to(scales.reshape(1, 1), (rows, 1)) if scales.size == 1 else scales
    scales = _shaped(f"{name}weight_scale", scales, (rows, scales.shape[-1]))
    count = scales.shape[1]
    if order is not None and int(order.max()) >= 0:
        group = _shaped(f"{name}weight_g_idx", order, (columns,)).astype(np.int64)
    else:
        if columns % count:
            raise ValueError(f"tensor {name}weight_scale has {count} groups for {columns} inputs; download it again")
        group = np.arange(columns) // (columns // count)
    if zero is not None:
        zero = np.broadcast_to(zero.reshape(1, 1), (rows, 1)) if zero.size == 1 else zero
        zero = _shaped(f"{name}weight_zero_point", zero, scales.shape)
        values = values.astype(np.int16) - zero.astype(np.int16)[:, group]
    return QuantisedWeight(values, scales, group)


def _scaled(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    """int8 or float8 with a `weight_scale` or `weight_scale_inv`: compressed-tensors, fbgemm_fp8 and fp8.

    The scale of a tile multiplies, also where its name says `inv`.
    """
    weight = tensors["weight"]
    which = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    scales = tensors[which]
    if weight.dtype == np.int8:
        return _integers(weight, scales, tensors.get("weight_zero_point"), None, name)
    rows, columns = weight.shape
    scales = scales.reshape(1, 1) if scales.size == 1 else scales
    scales = scales[:, None] if scales.ndim == 1 else scales
    block = settings.get("weight_block_size") or _block_structure(settings)
    if block and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    ):
        raise ValueError(
            f"a block of quantization_config in config.json must be two numbers as [128, 128], got {block!r}"
        )
    if block and scales.shape == tuple(-(-n // b) for n, b in zip((rows, columns), block, strict=True)):
        return QuantisedWeight(weight, scales, np.arange(columns) // int(block[1]), int(block[0]))
    if scales.shape not in ((1, 1), (rows, 1)):
        raise ValueError(
            f"tensor {name}{which} has shape {list(scales.shape)}, which fits neither the {rows} x {columns} of "
            f"{name}weight nor blocks of {block}; the checkpoint is not consistent"
        )
    return QuantisedWeight(weight, scales, np.zeros(columns, np.int64), 1 if len(scales) > 1 else rows)


def _block_structure(settings: Mapping[str, Any]) -> Any:
    schemes = [group.get("weights") or {} for group in settings.get("config_groups", {}).values()]
    return next((weights["block_structure"] for weights in schemes if weights.get("block_structure")), None)


def _fp4(packed: ndarray, scales: ndarray, whole: ndarray | None, name: str) -> QuantisedWeight:
    """4-bit floats, two in a byte. scales: uint8 powers of two (MXFP4), or float8 under one float32 (NVFP4)."""
    values = _FLOATS4[_halves(packed)]
    rows, columns = values.shape
    if scales.dtype in (np.uint8, ml_dtypes.float8_e8m0fnu):
        scales = np.ldexp(np.float32(1), scales.view(np.uint8).astype(np.int32) - 127)
    else:
        scales = scales.astype(np.float32) / (1 if whole is None else whole.astype(np.float32))
    if scales.shape[0] != rows or columns % scales.shape[1]:
        raise ValueError(f"tensor {name} has shape {list(scales.shape)} for a matrix of {rows} x {columns}")
    return QuantisedWeight(values, scales / 2, np.arange(columns) // (columns // scales.shape[1]))


def mxfp4(packed: ndarray, scales: ndarray, name: str) -> QuantisedWeight:
    """One expert of gpt-oss. packed: uint8 [out, block, 16]. scales: uint8 [out, block]."""
    return _fp4(packed.reshape(len(packed), -1), scales, None, name)


def _coded_shape(_: object, settings: object, read: Callable[[str], ndarray | None]) -> tuple[int, ...]:
    state = next((t for t in map(read, _STATES) if t is not None), None)
    return () if state is None else tuple(json.loads(state.tobytes())["shape"])


def _coded(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    state = next((t for n, t in tensors.items() if ".quant_state." in n), None)
    if state is None:
        raise ValueError(f"the checkpoint lacks tensor {name}weight.quant_state.bitsandbytes__nf4, which has the shape")
    details = json.loads(state.tobytes())
    packed, scales = tensors["weight"].reshape(-1), tensors["weight.absmax"]
    index = np.stack((packed >> 4, packed & 15), -1).reshape(-1)
    if "weight.nested_absmax" in tensors:
        inner = tensors["weight.nested_quant_map"][scales]
        outer = tensors["weight.nested_absmax"].repeat(int(details["nested_blocksize"]))[: len(inner)]
        scales = inner * outer + np.float32(details["nested_offset"])
    rows, columns = details["shape"]
    if len(index) < rows * columns or len(scales) * details["blocksize"] < rows * columns:
        raise ValueError(f"tensor {name}weight is too short for {rows} x {columns} numbers; download it again")
    values = tensors["weight.quant_map"][index[: rows * columns]].reshape(rows, columns)
    scales = scales.astype(np.float32).repeat(int(details["blocksize"]))[: rows * columns].reshape(rows, columns)
    return QuantisedWeight(values, scales, np.arange(columns))


def _same(shape: tuple[int, ...], *_: object) -> tuple[int, ...]:
    return shape


_ACTIVATIONS = (
    "input_scale", "activation_scale", "input_zero_point", "input_global_scale", "output_scale", "input_scale_ub",
)  # fmt: skip
_PACKED = ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_AS_STORED = ("weight", "weight_scale")
_WORDS = ("qweight", "qzeros", "scales")
FORMATS: dict[str, tuple[Format, ...]] = {
    "gptq": (Format(_gptq, lambda n, given, _: (n[1], n[0] * 32 // int(given["bits"])), _WORDS, ("g_idx",)),),
    "awq": (Format(_awq, lambda n, *_: (n[1] * 8, n[0]), _WORDS),),
    "compressed-tensors": (
        Format(_packed, _packed_shape, ("weight_packed", "weight_scale"), _PACKED, _ACTIVATIONS),
        Format(_scaled, _same, _AS_STORED, ("weight_zero_point",), _ACTIVATIONS),
    ),
    "fp8": (
        Format(_scaled, _same, ("weight", "weight_scale_inv"), drop=_ACTIVATIONS),
        Format(_scaled, _same, _AS_STORED, drop=_ACTIVATIONS),
    ),
    "fbgemm_fp8": (Format(_scaled, _same, _AS_STORED, drop=_ACTIVATIONS),),
    "bitsandbytes": (
        Format(_coded, _coded_shape, ("weight", "weight.absmax", "weight.quant_map"), (*_NESTED, *_STATES)),
    ),
}
"""The formats that are read, by the `quant_method` of a configuration. gpt-oss's mxfp4 is read by `mxfp4`."""

_OTHER_NAMES = {"fbgemm-fp8": "fbgemm_fp8", "bitsandbytes-4bit": "bitsandbytes"}


def _odd(method: str, settings: Mapping[str, Any]) -> str:
    """What is not read of a method, in words."""
    if method == "gptq":
        bits, form = settings.get("bits"), _gptq_format(settings)
        if form not in ("gptq", "gptq_v2"):
            return f"in the format {form}"
        if not bits:
            return 'in a number of bits that quantization_config in config.json does not say ("bits")'
        return "" if bits in (2, 3, 4, 8) else f"in {bits} bits"
    if method == "awq":
        bits, layout = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
        if layout not in ("gemm", "exllama", "ipex"):
            return f"in the layout {layout}"
        return "" if bits == 4 else f"in {bits} bits"
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return "in 8 bits"
    stored = (settings.get("sparsity_config") or {}).get("format", "dense")
    return f"and stored sparse ({stored})" if method == "compressed-tensors" and stored != "dense" else ""


def check(name: str, settings: Mapping[str, Any]) -> str:
    """The method of a `quantization_config`. Raises UnsupportedModel, with what can be read, for others."""
    method = str(settings.get("quant_method", "")).replace("_", "-").lower()
    method = _OTHER_NAMES.get(method, method)
    otherwise = "give the unquantised model, with quantization='int8' or 'int4' if it should be small"
    if method not in (*FORMATS, "mxfp4"):
        raise UnsupportedModel(
            f"the weights of {name} are quantised by {method or 'an unnamed method'}, which outrider does not read. It reads "
            f"{', '.join((*FORMATS, 'mxfp4'))}; {otherwise}"
        )
    if odd := _odd(method, settings):
        raise UnsupportedModel(
            f"the weights of {name} are quantised by {method} {odd}, which outrider does not read; {otherwise}"
        )
    return method
