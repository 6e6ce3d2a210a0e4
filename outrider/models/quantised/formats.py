"""How each method stores a matrix. The names of the tensors tell which matrices are quantised; settings tell only how.

A matrix that a checkpoint leaves in floats has a plain `weight`, whatever the settings say of ignored modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.models.hf.hooks import UnsupportedModel
from outrider.models.quantised.weights import QuantisedWeight

# AutoAWQ's order of eight columns in 32 bits.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# The values of four bits e2m1, doubled (OCP Microscaling Formats 1.0, table 6).
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
# The second factor of bitsandbytes' int8: 1 / 127 in float32.
_INT8_FACTOR = 7.874015718698502e-3

Tensors = Mapping[str, Tensor]


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
    """The settings of the weights of a module. All groups of settings with the same numbers of bits are alike to us."""
    schemes = [group["weights"] for group in settings.get("config_groups", {}).values() if group.get("weights")]
    bits = {weights["num_bits"] for weights in schemes}
    if len(bits) == 1:
        return schemes[0]
    named = [g["weights"] for g in settings.get("config_groups", {}).values() if _targets(g.get("targets", ()), name)]
    if len(named) != 1:
        raise UnsupportedModel(f"the settings do not tell how {name}weight_packed is stored: {sorted(bits)} bits")
    return named[0]


def _targets(targets: Any, name: str) -> bool:
    import re

    path = name.removesuffix(".")
    return any(re.match(t[3:], path) if t.startswith("re:") else path == t or path.endswith(f".{t}") for t in targets)


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
    table = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=torch.int8)
    values = table[nibbles.long()]
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


def _int8(tensors: Tensors, settings: Mapping[str, Any], name: str) -> QuantisedWeight:
    weight = tensors["weight"]
    scales = _shaped(f"{name}SCB", tensors["SCB"], (len(weight),))
    return QuantisedWeight(weight, scales[:, None], torch.zeros(weight.shape[1], dtype=torch.int64), 1, _INT8_FACTOR)


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
    "bitsandbytes": (
        Format(_int8, ("weight", "SCB"), drop=("weight_format",)),
        Format(_coded, ("weight", "weight.absmax", "weight.quant_map"), (*_NESTED, *_STATES)),
    ),
}
"""The formats that are read, by the `quant_method` of a configuration. gpt-oss's mxfp4 is read by `mxfp4`."""

_OTHER_NAMES = {"fbgemm-fp8": "fbgemm_fp8", "bitsandbytes-4bit": "bitsandbytes", "bitsandbytes-8bit": "bitsandbytes"}


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
