"""How each method stores a matrix: its exact values, and the same values in a block format of our kernels if there is one.

The names of the tensors tell which matrices are quantised; settings tell only how.
A matrix that a checkpoint leaves in floats has a plain `weight`, whatever the settings say of ignored modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.kernels.blocks import Blocks
from outrider.models.checkpoint import UnsupportedModel

_BLOCK = 32  # columns that share a scale in the block formats
_ROWS = 256  # of which `dense` has float32 values at a time
# AutoAWQ's order of eight columns in 32 bits.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# The values of four bits e2m1, doubled (OCP Microscaling Formats 1.0, table 6).
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
_FLOATS4 = torch.tensor([*_FP4, *(-x for x in _FP4)])

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A matrix [out, in]: value[i, j] = values[i, j] * scales[i // tile, group[j]]."""

    values: Tensor  # [out, in], integers with the zero point subtracted, or small floats
    scales: Tensor  # floats [tiles of rows, group]
    group: Tensor  # int64 [in], the group of each column
    tile: int = 1  # rows that share a scale; the last tile may be cut

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in]: the values that the format's own library gives in this dtype."""
        out = torch.empty(self.shape, dtype=dtype)
        for start in range(0, len(out), _ROWS):
            part = self.values[start : start + _ROWS].float()
            tiles = torch.arange(start, start + len(part)) // self.tile
            out[start : start + _ROWS] = (part * self.scales[tiles].float()[:, self.group]).to(dtype)
        return out

    def blocks(self) -> Blocks | None:
        """The very values in a format of our kernels. None if no format holds them exactly.

        MXFP4 for doubled 4-bit floats under powers of two. Q4_0 for integers of -8 to 7, Q5_0 for -16 to 15 (4 bits with a zero
        point), Q8_0 for 8 bits. A zero point must not become a minimum in float16: it would be rounded.
        """
        rows, columns = self.shape
        if self.values.is_floating_point() or columns % _BLOCK or self.tile != 1:
            return None
        group = self.group.view(-1, _BLOCK)
        if not bool((group == group[:, :1]).all()):  # the order of activations mixes the groups
            return None
        scales = self.scales[:, group[:, 0]]
        values = self.values.view(rows, -1, _BLOCK)
        if (packed := _mxfp4(values, scales)) is not None:
            return Blocks(packed, "MXFP4", columns)
        halves = scales.half()
        if not torch.equal(halves.float(), scales.float()):
            return None
        low, high = (int(x) for x in self.values.aminmax())
        head = halves.contiguous().view(torch.uint8).view(rows, -1, 2)
        if low >= -8 and high <= 7:
            name, parts = "Q4_0", [head, _nibbles((values + 8).to(torch.uint8))]
        elif low >= -16 and high <= 15:
            shifted = (values + 16).to(torch.uint8)
            name, parts = "Q5_0", [head, _fifth_bits(shifted), _nibbles(shifted & 15)]
        elif low >= -128 and high <= 127:
            name, parts = "Q8_0", [head, values.to(torch.int8).view(torch.uint8)]
        else:
            return None
        return Blocks(torch.cat(parts, dim=-1).view(rows, -1), name, columns)


def _mxfp4(values: Tensor, scales: Tensor) -> Tensor | None:
    """MXFP4's blocks uint8 [out, bytes] of integers [out, block, 32] and scales [out, block], or None if they are others."""
    mantissa, exponent = scales.float().frexp()
    if not bool(((mantissa == 0.5) & (exponent >= -127)).all()) or not bool(torch.isin(values, _FLOATS4).all()):
        return None
    codes = (values[..., None].abs() == _FLOATS4[:8]).to(torch.uint8).argmax(-1) + 8 * (values < 0)
    head = (exponent + 127).to(torch.uint8)[..., None]
    return torch.cat([head, _nibbles(codes.to(torch.uint8))], dim=-1).view(len(values), -1)


def _nibbles(values: Tensor) -> Tensor:
    """uint8 [..., 32] of 0 to 15 -> uint8 [..., 16]: the first half in the low bits, the second in the high ones."""
    return values[..., :16] | (values[..., 16:] << 4)


def _fifth_bits(values: Tensor) -> Tensor:
    """uint8 [..., 32] of 0 to 31 -> uint8 [..., 4]: bit i of the 32 is the fifth bit of value i."""
    bits = (values >> 4).view(*values.shape[:-1], 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Matrices of one format over the same inputs, one below the other."""
    first = weights[0]
    if any(w.tile != 1 or not torch.equal(w.group, first.group) for w in weights):  # then each number has its scale
        each = torch.arange(first.shape[1])
        scales = [w.scales[torch.arange(w.shape[0]) // w.tile].float()[:, w.group] for w in weights]
        return QuantisedWeight(torch.cat([w.values.float() for w in weights]), torch.cat(scales), each)
    values, scales = torch.cat([w.values for w in weights]), torch.cat([w.scales for w in weights])
    return QuantisedWeight(values, scales, first.group)


class Format(NamedTuple):
    """One way to store a matrix."""

    # the matrix, of the tensors by suffix, the settings, and the name for errors.
    read: Callable[[Tensors, Mapping[str, Any], str], QuantisedWeight]
    # suffixes; before them is the matrix's name without `weight`. The first one tells its size.
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()  # suffixes of tensors that may be there
    drop: tuple[str, ...] = ()  # those that its values do not depend on

    @property
    def suffix(self) -> str:
        """Of a tensor that plain checkpoints do not have."""
        return next(suffix for suffix in self.needed if suffix != "weight")


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [..., count]: unsigned numbers of some bits from little-endian 32-bit words [..., word], without gaps."""
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 4:
        return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)[..., :count]
    start = torch.arange(count) * bits
    padded = torch.nn.functional.pad(bytes_, (0, 1)).int()
    window = padded[..., start // 8] | (padded[..., start // 8 + 1] << 8)
    return ((window >> (start % 8)) & ((1 << bits) - 1)).to(torch.uint8)


def _shaped(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != wanted:
        raise ValueError(
            f"tensor {name} has shape {list(tensor.shape)}, and the others of its matrix and the quantization_config of "
            f"config.json ask for {list(wanted)}; one of them is of another checkpoint, so download all files again"
        )
    return tensor


def _groups(name: str, columns: int, size: int, scales: int) -> Tensor:
    """int64 [in]: the group of each column. size: of a group; -1 for one group."""
    size = columns if size in (-1, 0, None) else size
    if -(-columns // size) != scales:
        raise ValueError(
            f"tensor {name} has {scales} groups, and {columns} inputs in groups of {size} have {-(-columns // size)}; the "
            "quantization_config of config.json is not that of the weights, so download all files again"
        )
    return torch.arange(columns) // size


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
        group = _shaped(f"{name}g_idx", order, (columns,)).long()
        if not 0 <= int(group.min()) <= int(group.max()) < len(scales):
            raise ValueError(f"tensor {name}g_idx names group {int(group.max())} of {len(scales)}; download it again")
    else:
        group = torch.arange(columns) // (size if size > 0 else columns)
    if first := _gptq_format(settings) != "gptq_v2":  # it stores zero points less one
        ones = sum(1 << shift for shift in range(0, 32, bits)) if bits != 3 else 0
        # GPTQModel adds it to whole words, so a zero point may carry into the next.
        zeros = ((zeros.long() & 0xFFFFFFFF) + ones & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    zero = unpacked(zeros, bits, rows).T.to(torch.int16)  # [out, group]
    if first and bits == 3:
        zero = zero + 1 & 7
    values = unpacked(words.T, bits, columns).to(torch.int16) - zero[:, group]
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
        unpacked(t, 4, rows).view(len(t), -1, 8)[..., list(_AWQ_ORDER)].reshape(len(t), rows).T.to(torch.int16)
        for t in (words, zeros)
    )
    return QuantisedWeight(values - zero[:, group], scales.T, group)


def _packed(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    """compressed-tensors: pack-quantized, and the formats of 4-bit floats, whose words are bytes."""
    words, scales = tensors["weight_packed"], tensors["weight_scale"]
    if words.dtype == torch.uint8:
        return _fp4(words, scales, tensors.get("weight_global_scale"), f"{name}weight_scale")
    weights = _scheme(settings, name)
    bits = int(weights["num_bits"])
    if "weight_shape" not in tensors:
        raise ValueError(
            f"the checkpoint lacks tensor {name}weight_shape, without which {name}weight_packed has no size"
        )
    rows, columns = (int(n) for n in tensors["weight_shape"])
    _shaped(f"{name}weight_packed", words, (rows, -(-columns * bits // 32)))
    values = unpacked(words, bits, columns).to(torch.int16) - (1 << bits - 1)
    zero = None
    if (stored := tensors.get("weight_zero_point")) is not None:
        zero = unpacked(stored.T, bits, rows).T.to(torch.int16) - (1 << bits - 1)
    if weights.get("strategy") == "group" and scales.dim() == 2:
        _groups(f"{name}weight_scale", columns, _number(weights, "group_size", otherwise=-1), scales.shape[1])
    return _integers(values, scales, zero, tensors.get("weight_g_idx"), name)


def _scheme(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings of the weights. All groups of settings with the same number of bits are alike to us."""
    schemes = [group["weights"] for group in settings.get("config_groups", {}).values() if group.get("weights")]
    bits = {weights["num_bits"] for weights in schemes}
    if len(bits) == 1:
        return schemes[0]
    raise UnsupportedModel(
        f"{name}weight_packed is one of matrices of {sorted(bits)} bits, which outrider does not tell apart"
    )


def _integers(values: Tensor, scales: Tensor, zero: Tensor | None, order: Tensor | None, name: str) -> QuantisedWeight:
    """compressed-tensors' integers. scales: [1], [out, 1] or [out, group]. zero: as the scales."""
    rows, columns = values.shape
    scales = scales.reshape(1, 1).expand(rows, 1) if scales.numel() == 1 else scales
    scales = _shaped(f"{name}weight_scale", scales, (rows, scales.shape[-1]))
    count = scales.shape[1]
    if order is not None and int(order.max()) >= 0:
        group = _shaped(f"{name}weight_g_idx", order, (columns,)).long()
    else:
        if columns % count:
            raise ValueError(f"tensor {name}weight_scale has {count} groups for {columns} inputs; download it again")
        group = torch.arange(columns) // (columns // count)
    if zero is not None:
        zero = zero.reshape(1, 1).expand(rows, 1) if zero.numel() == 1 else zero
        zero = _shaped(f"{name}weight_zero_point", zero, tuple(scales.shape))
        values = values.to(torch.int16) - zero.to(torch.int16)[:, group]
    return QuantisedWeight(values, scales, group)


def _scaled(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    """int8 or float8 with a `weight_scale` or `weight_scale_inv`: compressed-tensors, fbgemm_fp8 and fp8.

    The scale of a tile multiplies, also where its name says `inv`.
    """
    weight = tensors["weight"]
    which = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    scales = tensors[which]
    if weight.dtype == torch.int8:
        return _integers(weight, scales, tensors.get("weight_zero_point"), None, name)
    rows, columns = weight.shape
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
    scales = scales[:, None] if scales.dim() == 1 else scales
    block = settings.get("weight_block_size") or _block_structure(settings)
    if block and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    ):
        raise ValueError(
            f"a block of quantization_config in config.json must be two numbers as [128, 128], got {block!r}"
        )
    if block and tuple(scales.shape) == tuple(-(-n // b) for n, b in zip((rows, columns), block, strict=True)):
        return QuantisedWeight(weight, scales, torch.arange(columns) // int(block[1]), int(block[0]))
    if tuple(scales.shape) not in ((1, 1), (rows, 1)):
        raise ValueError(
            f"tensor {name}{which} has shape {list(scales.shape)}, which fits neither the {rows} x {columns} of "
            f"{name}weight nor blocks of {block}; the checkpoint is not consistent"
        )
    return QuantisedWeight(weight, scales, torch.zeros(columns, dtype=torch.int64), 1 if len(scales) > 1 else rows)


def _block_structure(settings: Mapping[str, Any]) -> Any:
    schemes = [group.get("weights") or {} for group in settings.get("config_groups", {}).values()]
    return next((weights["block_structure"] for weights in schemes if weights.get("block_structure")), None)


def _fp4(packed: Tensor, scales: Tensor, whole: Tensor | None, name: str) -> QuantisedWeight:
    """4-bit floats, two in a byte. scales: uint8 powers of two (MXFP4), or float8 under one float32 (NVFP4)."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    values = _FLOATS4.to(torch.int8)[nibbles.long()]
    rows, columns = values.shape
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = torch.ldexp(torch.ones(scales.shape), scales.view(torch.uint8).int() - 127)
    else:
        scales = scales.float() if whole is None else scales.float() / whole.float()
    if scales.shape[0] != rows or columns % scales.shape[1]:
        raise ValueError(f"tensor {name} has shape {list(scales.shape)} for a matrix of {rows} x {columns}")
    return QuantisedWeight(values, scales / 2, torch.arange(columns) // (columns // scales.shape[1]))


def mxfp4(packed: Tensor, scales: Tensor, name: str) -> QuantisedWeight:
    """One expert of gpt-oss. packed: uint8 [out, block, 16]. scales: uint8 [out, block]."""
    return _fp4(packed.flatten(1), scales, None, name)


def _coded(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    state = next((t for n, t in tensors.items() if ".quant_state." in n), None)
    if state is None:
        raise ValueError(f"the checkpoint lacks tensor {name}weight.quant_state.bitsandbytes__nf4, which has the shape")
    details = json.loads(bytes(state.tolist()))
    packed, scales = tensors["weight"].flatten(), tensors["weight.absmax"]
    index = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
    if "weight.nested_absmax" in tensors:
        inner = tensors["weight.nested_quant_map"][scales.long()]
        outer = tensors["weight.nested_absmax"].repeat_interleave(int(details["nested_blocksize"]))[: len(inner)]
        scales = inner * outer + details["nested_offset"]
    rows, columns = details["shape"]
    if len(index) < rows * columns or len(scales) * details["blocksize"] < rows * columns:
        raise ValueError(f"tensor {name}weight is too short for {rows} x {columns} numbers; download it again")
    values = tensors["weight.quant_map"][index[: rows * columns].long()].view(rows, columns)
    scales = scales.float().repeat_interleave(int(details["blocksize"]))[: rows * columns].view(rows, columns)
    return QuantisedWeight(values, scales, torch.arange(columns))


_ACTIVATIONS = (
    "input_scale", "activation_scale", "input_zero_point", "input_global_scale", "output_scale", "input_scale_ub",
)  # fmt: skip
_PACKED = ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
FORMATS: dict[str, tuple[Format, ...]] = {
    "gptq": (Format(_gptq, ("qweight", "qzeros", "scales"), ("g_idx",)),),
    "awq": (Format(_awq, ("qweight", "qzeros", "scales")),),
    "compressed-tensors": (
        Format(_packed, ("weight_packed", "weight_scale"), _PACKED, _ACTIVATIONS),
        Format(_scaled, ("weight", "weight_scale"), ("weight_zero_point",), _ACTIVATIONS),
    ),
    "fp8": (
        Format(_scaled, ("weight", "weight_scale_inv"), drop=_ACTIVATIONS),
        Format(_scaled, ("weight", "weight_scale"), drop=_ACTIVATIONS),
    ),
    "fbgemm_fp8": (Format(_scaled, ("weight", "weight_scale"), drop=_ACTIVATIONS),),
    "bitsandbytes": (Format(_coded, ("weight", "weight.absmax", "weight.quant_map"), (*_NESTED, *_STATES)),),
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
