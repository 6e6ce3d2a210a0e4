"""The tensors of a quantised checkpoint: matrices as blocks of our kernels where a format holds their values, else as floats."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.models.checkpoint import Sizes, StoredTensor, UnsupportedModel
from outrider.models.config import Config
from outrider.models.dtypes import dtype_name
from outrider.models.quantised.formats import FORMATS, Format, QuantisedWeight, check, mxfp4
from outrider.models.safetensors import FolderTensors
from outrider.models.tensors import Matrix

# Scales of the cache of keys and values, and of activations: our own cache and kernels do not use them.
_UNUSED = re.compile(
    r"(.*\.)?(k_scale|v_scale|q_scale|kv_scale|k_cache_scale|v_cache_scale|[qkv]_proj\.output_scale|rotary_emb\.inv_freq)"
)
# Of a kept matrix: bytes of a weight in the block format that it most likely gets.
_KEPT = {4: 0.625, 8: 1.0625}
_FLOATS = ("F64", "F32", "F16", "BF16")


class QuantisedTensors(FolderTensors):
    """The tensors of a checkpoint with a `quantization_config`.

    `plain` has the tensors that are stored as they are, `matrices` the quantised ones: the name before `weight`, and the format.
    """

    def __init__(self, name: str, folder: Path, config: Config | Any, dtype: str = "auto") -> None:
        """Reads headers only. Raises ValueError or UnsupportedModel, with the name of the tensor, for what does not fit."""
        given = config.quantization_config
        self.settings: Mapping[str, Any] = given if isinstance(given, dict) else given.to_dict()
        self.method = method = check(name, self.settings)
        super().__init__(name, folder, config, dtype_name(config.dtype or "float16") if dtype == "auto" else dtype)
        if not self.parts:
            raise UnsupportedModel(f"{name} is quantised, and has no *.safetensors; outrider reads no other such files")
        self.matrices, self.plain = dict[str, tuple[str, Format]](), dict(self.parts)
        self._mxfp4 = set[str]()  # the stacks of experts
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

    def __contains__(self, name: str) -> bool:
        return name in self.plain or name in self.matrices or name in self._mxfp4

    @cached_property
    def precision(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """ "gguf" if matrices become blocks, which is found once. One of each size is read: all of a size are stored alike."""
        kinds = dict[Any, str]()
        for name, (_, form) in sorted(self.matrices.items()):
            kinds.setdefault((form, self.shape(name)), name)
        if self._mxfp4 or any(self.weight(name).blocks() is not None for name in kinds.values()):
            return "gguf"
        warnings.warn(
            f"{len(self.matrices)} matrices of {self.name} ({self.method}) have no equal among the kernels' block formats; "
            f"outrider keeps their exact values as {self.dtype}, in {self.numbers * self.dtype.itemsize / 2**30:.2f} GiB",
            RuntimeWarning,
            stacklevel=5,
        )
        return self.dtype.name

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._mxfp4:
            experts, rows, blocks, _ = self._part(f"{name}_blocks").shape
            return experts, 32 * blocks, rows
        if name not in self.matrices:
            return super().shape(name)
        self.asked.add(name)
        prefix, form = self.matrices[name]
        first = self._part(prefix + form.needed[0]).shape
        return form.shape(first, self.settings, lambda s: self.stored(prefix + s) if prefix + s in self.parts else None)

    def get(self, name: str) -> Matrix:
        return self._kept(self.weight(name)) if name in self.matrices else super().get(name)

    def weight(self, name: str) -> QuantisedWeight:
        """A quantised matrix."""
        self.asked.add(name)
        prefix, form = self.matrices[name]
        suffixes = (s for s in (*form.needed, *form.optional) if prefix + s in self.parts)
        return form.read({s: self.stored(prefix + s) for s in suffixes}, self.settings, prefix)

    def _kept(self, weight: QuantisedWeight) -> Matrix:
        return weight.dense(self.dtype) if (blocks := weight.blocks()) is None else blocks

    def _of_stack(self, mixture: str, part: str, index: int) -> Matrix:
        if (name := f"{mixture}.{part}") not in self._mxfp4:
            return super()._of_stack(mixture, part, index)
        blocks, scales = (self.stored(f"{name}_{kind}")[index] for kind in ("blocks", "scales"))
        return self._kept(mxfp4(blocks, scales, f"{name}_scales"))

    def check(self, further: bool = True) -> None:
        """Of the layers that the model has. An unknown tensor may change what the others mean."""
        for name in sorted({*self.plain, *self.matrices} - self.asked):
            layer = re.search(r"\.layers\.(\d+)\.", name)
            behind = name.startswith("mtp.") or (layer and int(layer[1]) >= self.config.num_hidden_layers)
            if not (behind or _UNUSED.fullmatch(name)):
                raise ValueError(
                    f"{self.name} has tensor {name}, which a {self.config.model_type} does not have; the checkpoint is not of "
                    "this class, or it needs code of its own"
                )

    def _find(self, formats: tuple[Format, ...]) -> None:
        """Sort the tensors into matrices and plain ones."""
        suffixes = {s for form in formats for s in (*form.needed, *form.optional) if s != "weight"}
        prefixes = dict.fromkeys(t.removesuffix(s) for t in self.parts for s in suffixes if t.endswith(f".{s}"))
        for prefix in prefixes:
            held = {tensor.removeprefix(prefix) for form in formats for tensor in self._held(prefix, form)}
            form = max(formats, key=lambda form: len(held & {*form.needed}) / len(form.needed))
            if lacking := [suffix for suffix in form.needed if suffix not in held]:
                there = next(s for s in (*form.needed, *form.optional, *held) if s in held)
                raise self._half(prefix + there, prefix + lacking[0])
            for tensor in self._held(prefix, form):
                self.plain.pop(tensor, None)
            self.matrices[f"{prefix}weight"] = prefix, form
            self._count(self.parts[prefix + form.needed[0]])

    def _held(self, prefix: str, form: Format) -> list[str]:
        """The tensors of a matrix."""
        return [prefix + s for s in (*form.needed, *form.optional, *form.drop) if prefix + s in self.parts]

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

    def _find_mxfp4(self) -> None:
        """gpt-oss: the experts of a layer in one tensor of blocks and one of scales."""
        for tensor, part in self.parts.items():
            base, _, kind = tensor.rpartition("_")
            if kind == "scales" and f"{base}_blocks" not in self.parts:
                raise self._half(tensor, f"{base}_blocks")
            if kind != "blocks":
                continue
            scales = self.parts.get(f"{base}_scales")
            if scales is None or scales.shape != part.shape[:-1] or len(part.shape) != 4 or part.shape[3] != 16:
                raise ValueError(
                    f"{self.name} has tensor {tensor} of shape {list(part.shape)} and no {base}_scales of shape "
                    f"{list(part.shape[:-1])}; the checkpoint is not whole, so download it again"
                )
            del self.plain[tensor], self.plain[f"{base}_scales"]
            self._mxfp4.add(base)
            self.numbers += 2 * part.weights
        self.kept = int(self.numbers * 0.5625)

    @property
    def sizes(self) -> Sizes:
        """The memory that the model needs."""
        rest = sum(part.bytes for part in self.plain.values())
        return Sizes("gguf", self.numbers, rest, self.kept)
