"""Reads a quantised checkpoint into a model of transformers, one matrix at a time.

transformers asks for each tensor when it needs it. A quantised matrix then gives its values, or a stand-in without memory if our
kernels have its format. The stand-ins are replaced by the blocks when the model is there.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from outrider.kernels.blocks import Blocks
from outrider.models import checkpoint
from outrider.models.checkpoint import Sizes, StoredTensor, UnsupportedModel
from outrider.models.dtypes import dtype_name
from outrider.models.hf.experts import is_mixture
from outrider.models.hf.matrices import EXPERTS, give_matrix_
from outrider.models.hf.powers import ExactPowers
from outrider.models.quantised.formats import FORMATS, Format, QuantisedWeight, joined, mxfp4

# Scales of the cache of keys and values, and of activations: our own cache and kernels do not use them.
_UNUSED = re.compile(
    r"(.*\.)?(k_scale|v_scale|q_scale|kv_scale|k_cache_scale|v_cache_scale|[qkv]_proj\.output_scale|rotary_emb\.inv_freq)"
)
# Of a kept matrix: bytes of a weight in the block format that it most likely gets.
_KEPT = {4: 0.625, 8: 1.0625}
# What transformers joins: the tensor of all experts, and the matrices of one. The first two for a gate.
_JOINED = (
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("up_proj", ("up_proj",)),
    ("down_proj", ("down_proj",)),
    ("down_proj", ("w2",)),
)
_FLOATS = ("F64", "F32", "F16", "BF16")


class Quantised:
    """The tensors of a quantised checkpoint; of its text model, if it also reads images or sound.

    Args:
        name: of the model, for errors.
        folder: with *.safetensors.
        method: of its `quantization_config`.
        settings: its `quantization_config`.

    `plain` has the tensors that are stored as they are, `matrices` the quantised ones, by the name of the tensor that they stand
    for.
    """

    def __init__(self, name: str, folder: Path, method: str, settings: Mapping[str, Any]) -> None:
        """Reads headers only. Raises ValueError or UnsupportedModel, with the name of the tensor, for what does not fit."""
        self.name, self.folder, self.method, self.settings = name, folder, method, settings
        parts = checkpoint.tensors(sorted(folder.glob("*.safetensors")))
        self._names = checkpoint.text_names(parts)
        self._parts = {short: parts[name] for short, name in self._names.items()}
        if not self._parts:
            raise UnsupportedModel(f"{name} is quantised, and has no *.safetensors; outrider reads no other such files")
        self.matrices: dict[str, Callable[[], QuantisedWeight]] = {}
        self.plain = dict(self._parts)
        self.numbers = self.kept = 0  # of the quantised matrices: numbers, and bytes that they will take
        if method == "mxfp4":
            self._find_mxfp4()
        else:
            self._find(FORMATS[method])
        if not self.matrices and not self.numbers:
            first = " or ".join(f"*.{form.suffix}" for form in FORMATS.get(method, ())) or "*_blocks"
            raise ValueError(
                f"config.json of {name} says that weights are quantised by {method}, and no tensor is: it has no {first}. If "
                "the weights are plain, delete quantization_config from config.json; else download the checkpoint again"
            )
        for tensor, part in self.plain.items():
            if part.format not in _FLOATS and not _UNUSED.fullmatch(tensor):
                raise UnsupportedModel(
                    f"tensor {tensor} of {name} has type {part.format}, and no scale for it is known to {method}; outrider "
                    "cannot read this checkpoint exactly"
                )

    def _find(self, formats: tuple[Format, ...]) -> None:
        """Sort the tensors into matrices and plain ones."""
        suffixes = {s for form in formats for s in (*form.needed, *form.optional) if s != "weight"}
        prefixes = dict.fromkeys(t.removesuffix(s) for t in self._parts for s in suffixes if t.endswith(f".{s}"))
        for prefix in prefixes:
            held = {tensor.removeprefix(prefix) for form in formats for tensor in self._held(prefix, form)}
            form = max(formats, key=lambda form: len(held & {*form.needed}) / len(form.needed))
            if lacking := [suffix for suffix in form.needed if suffix not in held]:
                there = next(s for s in (*form.needed, *form.optional, *held) if s in held)
                raise self._half(prefix + there, prefix + lacking[0])
            for tensor in self._held(prefix, form):
                self.plain.pop(tensor, None)
            self.matrices[f"{prefix}weight"] = partial(self._read, prefix, form)
            self._count(self._parts[prefix + form.needed[0]])

    def _held(self, prefix: str, form: Format) -> list[str]:
        """The tensors of a matrix."""
        return [prefix + s for s in (*form.needed, *form.optional, *form.drop) if prefix + s in self._parts]

    def _half(self, there: str, lacks: str) -> ValueError:
        return ValueError(
            f"{self.name} has tensor {there} and lacks {lacks}, without which the weight cannot be read; the checkpoint is not "
            "whole, so download it again"
        )

    def _count(self, part: StoredTensor) -> None:
        """Estimate the memory of a matrix from the header."""
        size, bits = part.weights, int(self.settings.get("bits") or self.settings.get("w_bit") or 4)
        if part.format == "I32":
            scheme = next(iter(self.settings.get("config_groups", {}).values()), {})
            bits = int((scheme.get("weights") or {}).get("num_bits", bits))
            size = size * 32 // bits
            self.kept += int(size * _KEPT[4 if bits <= 4 else 8])
        else:
            size *= 2 if part.format == "U8" else 1
            self.kept += int(size * (_KEPT[8] if part.format == "I8" else 2))
        self.numbers += size

    def _read(self, prefix: str, form: Format) -> QuantisedWeight:
        suffixes = (s for s in (*form.needed, *form.optional) if prefix + s in self._parts)
        return form.read({s: self.tensor(prefix + s) for s in suffixes}, self.settings, prefix)

    def _find_mxfp4(self) -> None:
        """gpt-oss: the experts of a layer in one tensor of blocks and one of scales."""
        for tensor, part in self._parts.items():
            base, _, kind = tensor.rpartition("_")
            if kind == "scales" and f"{base}_blocks" not in self._parts:
                raise self._half(tensor, f"{base}_blocks")
            if kind != "blocks":
                continue
            scales = self._parts.get(f"{base}_scales")
            if scales is None or scales.shape != part.shape[:-1] or len(part.shape) != 4 or part.shape[3] != 16:
                raise ValueError(
                    f"{self.name} has tensor {tensor} of shape {list(part.shape)} and no {base}_scales of shape "
                    f"{list(part.shape[:-1])}; the checkpoint is not whole, so download it again"
                )
            del self.plain[tensor], self.plain[f"{base}_scales"]
            self.numbers += 2 * part.weights
        self.kept = int(self.numbers * 0.5625)

    def experts(self, shell: nn.Module) -> dict[str, list[Callable[[], QuantisedWeight]]]:
        """The tensors of a model that hold all experts of a layer -> one matrix [out, in] of each expert.

        shell: the model without weights. The matrices that are joined in these tensors are no longer in `matrices`.
        """
        out: dict[str, list[Callable[[], QuantisedWeight]]] = {}
        for tensor, part in self._parts.items():
            if self.method == "mxfp4" and tensor.endswith("_blocks"):
                base = tensor.removesuffix("_blocks")
                out[base] = [partial(self._mxfp4, base, i) for i in range(part.shape[0])]
        each = [m for n in self.matrices if (m := re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", n))]
        layers = list(dict.fromkeys(m[1] for m in sorted(each, key=lambda m: dot_natural_key(m[1]))))
        mixtures = {name: m for name, m in shell.named_modules() if is_mixture(m)}
        if len(layers) != len(mixtures):
            return out  # transformers joins them
        for layer, (path, module) in zip(layers, mixtures.items(), strict=True):
            count = 1 + max(int(m[2]) for m in each if m[1] == layer)
            for tensor, names in _JOINED if module.has_gate else _JOINED[2:]:
                sources = [[f"{layer}{i}.{n}.weight" for n in names] for i in range(count)]
                if hasattr(module, tensor) and all(n in self.matrices for ns in sources for n in ns):
                    out[f"{path}.{tensor}"] = [
                        partial(_side_by_side, [self.matrices.pop(n) for n in ns]) for ns in sources
                    ]
        return out

    def _mxfp4(self, base: str, index: int) -> QuantisedWeight:
        parts: list[Tensor] = []
        for suffix in ("blocks", "scales"):
            with safe_open(self._parts[f"{base}_{suffix}"].path, framework="pt") as file:
                parts.append(file.get_slice(self._names[f"{base}_{suffix}"])[index])
        return mxfp4(parts[0], parts[1], f"{base}_scales")

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._parts[name].path, framework="pt") as file:
            return file.get_tensor(self._names[name])

    def sizes(self) -> Sizes:
        """The memory that the model needs."""
        rest = sum(part.bytes for part in self.plain.values())
        return Sizes("gguf", self.numbers, rest, self.kept)


def _side_by_side(reads: list[Callable[[], QuantisedWeight]]) -> QuantisedWeight:
    """Matrices over the same inputs as one."""
    weights = [read() for read in reads]
    return weights[0] if len(weights) == 1 else joined(weights)


class _LazyWeight:
    """What transformers takes for a tensor of a file: it is read when it is indexed."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> Tensor:
        return self._read()

    def get_dtype(self) -> str:
        return "BF16"


def build(stored: Quantised, config: Any, dtype: torch.dtype, keep: bool) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' report of missing and unexpected tensors.

    dtype: of what is not kept in blocks. keep: keep blocks. Raises ValueError, with the tensor's name, for what does not fit.
    """
    config = copy.deepcopy(config)
    del config.quantization_config
    matrices = set(stored.matrices) if keep else set[str]()
    while True:
        raw, info, left = _build(stored, config, dtype, matrices, keep)
        if not left:
            break
        matrices -= left  # transformers joins these with others, so it needs their values
    unexpected = [n for n in info["unexpected_keys"] if not _UNUSED.fullmatch(n)]
    if unexpected:
        raise ValueError(
            f"{stored.name} has tensor {sorted(unexpected)[0]}, which a {type(raw).__name__} does not have; the checkpoint is "
            "not of this class, or it needs code of its own"
        )
    return raw, info


def _build(
    stored: Quantised, config: Any, dtype: torch.dtype, kept: set[str], keep: bool
) -> tuple[PreTrainedModel, dict[str, Any], set[str]]:
    held: dict[int, tuple[str, Tensor, Blocks]] = {}  # stand-ins by address
    experts: dict[str, list[Blocks]] = {}
    lock, grown = Lock(), list[int]()

    def stand_in(*shape: int) -> Tensor:
        return torch.zeros(1, dtype=dtype).expand(shape)

    def matrix(name: str) -> Tensor:
        weight = stored.matrices[name]()
        blocks = weight.blocks() if name in kept else None
        with lock:
            if blocks is None:
                grown.append(weight.shape[0] * weight.shape[1])
                return weight.dense(dtype)
            empty = stand_in(*weight.shape)
            held[empty.data_ptr()] = name, empty, blocks
            return empty

    def mixture(name: str, reads: list[Callable[[], QuantisedWeight]], transposed: bool) -> Tensor:
        blocks = list[Blocks]()
        for read in reads if keep else ():
            if (block := read().blocks()) is None:
                break
            blocks.append(block)
        if len(blocks) == len(reads):
            experts[name] = blocks
            rows, columns = blocks[0].shape
            return stand_in(len(blocks), *((columns, rows) if transposed else (rows, columns)))
        weights = (read().dense(dtype) for read in reads)
        out = torch.stack([weight.T if transposed else weight for weight in weights])
        grown.append(out.numel())
        return out

    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]  # pyright: ignore
    with torch.device("meta"):
        shell: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, Any] = {n: _LazyWeight(partial(stored.tensor, n)) for n in stored.plain}
    for name, reads in stored.experts(shell).items():
        transposed = bool(shell.get_submodule(name.rpartition(".")[0]).is_transposed)
        tensors[name] = _LazyWeight(partial(mixture, name, reads, transposed))
    tensors |= {n: _LazyWeight(partial(matrix, n)) for n in stored.matrices}
    with ExactPowers():
        raw, info = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True)
    for module in raw.modules():
        if isinstance(module, nn.Linear) and module.weight.data_ptr() in held:
            give_matrix_(module, held.pop(module.weight.data_ptr())[2])
    for name, blocks in experts.items():
        path, _, parameter = name.rpartition(".")
        raw.get_submodule(path).__dict__.setdefault(EXPERTS, {})[parameter] = blocks
    with suppress(OSError):  # without one, the class's own stays
        raw.generation_config = GenerationConfig.from_pretrained(stored.folder)
    if grown and keep and not held:
        warnings.warn(
            f"{len(grown)} matrices of {stored.name} ({stored.method}) have no equal among the kernels' block formats; outrider "
            f"keeps their exact values as {dtype_name(dtype)}, in {sum(grown) * dtype.itemsize / 2**30:.2f} GiB",
            RuntimeWarning,
            stacklevel=6,
        )
    return raw, info, {name for name, _, _ in held.values()}
