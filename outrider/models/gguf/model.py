"""The tensors of a GGUF file, by the names that transformers' modules have for them. They stay in the mapped file."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from outrider.kernels import why_no_kernels
from outrider.kernels.blocks import Blocks
from outrider.models import checkpoint, rotary
from outrider.models.checkpoint import LoadRequest, ReadModel, Sizes, UnsupportedModel, token_ids
from outrider.models.config import Config, optional_tensors
from outrider.models.gguf.architectures import architecture_of, config_of, tensor_names
from outrider.models.gguf.reader import FLOATS, PACKED_FORMATS, GGUFFile, StoredExperts, expert_parts, read
from outrider.models.gguf.tokenizer import end_ids, tokenizer_of
from outrider.models.matrix import dense, joined
from outrider.models.mtp import MTP
from outrider.models.native.weights import LATENT
from outrider.models.tensors import Expert, Experts

_KEPT = (*FLOATS, *PACKED_FORMATS)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Tensors that are no parameters: they change the rotary frequencies, see `architectures`.
_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Buffers and parameters whose tensors have names of their own in a layer: -> the name there.
_IN_LAYER = {
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
# Names that a family's table in the gguf package lacks.
_OTHER_NAMES = {"lm_head": "output"}
# Names in a model of one layer, the MTP layer -> those below `nextn` in the layer behind the last one.
_MTP_NAMES = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "fc": "eh_proj",
    "model.norm": "shared_head_norm",
    "lm_head": "shared_head_head",
}
# Tensors of two dimensions that are no matrices, and those whose numbers have another shape in transformers.
_CONVOLUTIONS = ("conv1d.weight", "conv.weight")
_VALUES = ("norm.weight", *_CONVOLUTIONS, "ssm_a", "ssm_d", "ffn_gate_inp.weight")
_FLAT = ("exp_probs_b.bias", "ssm_norm.weight", "ssm_a", "ssm_d")


class _Place(NamedTuple):
    """The tensors of the file that make one of the model. row: the one that it is; None: all rows."""

    names: tuple[str, ...]
    row: int | None = None


def read_model(request: LoadRequest, files: Sequence[Path]) -> ReadModel:
    """A model in GGUF. Raises ValueError, MemoryError or UnsupportedModel, with the reason, for a file that is none."""
    file = read(files)
    architecture_of(file)  # raises for what is no model, before its size is asked
    weights, missing = request.weights, why_no_kernels(request.device)
    if weights is None and missing:
        weights = "float32" if request.device == "cpu" else "bfloat16"
    checkpoint.fits(request.name, sizes(file), weights, request.device)
    config = config_of(file)
    config._name_or_path = request.name
    tensors, tokenizer = GGUFTensors(file, config), tokenizer_of(file) if request.tokenizer else None
    ends = end_ids(file) or token_ids(config.eos_token_id)
    return ReadModel(tensors, tokenizer, request.quantization, ends, config)


def sizes(file: GGUFFile) -> Sizes:
    """The memory that the model needs. The matrices are all tensors of two dimensions, embeddings among them."""
    matrices = [t for t in file.tensors.values() if len(t.shape) > 1]
    rest = sum(4 * t.weights for t in file.tensors.values() if len(t.shape) == 1)
    blocks = sum(t.bytes if t.format in _KEPT else 2 * t.weights for t in matrices)
    return Sizes("gguf", sum(t.weights for t in matrices), rest, blocks)


class GGUFTensors:
    """`Tensors` of a file."""

    floats = "bfloat16"

    def __init__(self, file: GGUFFile, config: Any) -> None:
        """Raises UnsupportedModel for formats that the gguf package cannot read."""
        _check_formats(file)
        self.file, self.config = file, config
        self._family, self._names = architecture_of(file), tensor_names(file)
        self._places, self._asked = dict[str, _Place | None](), set[str]()
        self._optional = (optional_tensors(config) or {}) if isinstance(config, Config) else dict[str, bool]()
        formats = {t.format for t in file.tensors.values() if len(t.shape) > 1}
        head = file.tensors.get("output.weight", file.tensors.get("token_embd.weight"))
        floats = FLOATS.get(head.format, _BFLOAT16) if head else _BFLOAT16
        self.sizes = sizes(file)
        self.precision = "gguf" if formats & {*PACKED_FORMATS} else floats.name

    def has(self, name: str) -> bool:
        if name.endswith(".inv_freq"):
            return "rope_freqs.weight" in self.file.tensors
        place, short = self._place(name), re.sub(r".*layers\.\d+\.", "", name)
        if short not in self._optional or (name.endswith("bias") and self._family.biases_by_tensor):
            return place is not None
        if self._optional[short] and place is None:
            raise self._lacks(*self._names_of(*name.rpartition(".")[::2]))
        return self._optional[short]

    def shape(self, name: str) -> tuple[int, ...]:
        names, row = self._there(name)
        shapes = [_form(n, self.file.tensors[n].shape[row is not None :]) for n in names]
        if _are_latent(names):  # [heads * latent, keys], [heads * values, latent]
            return self.config.num_attention_heads * shapes[0][1] + shapes[1][0], shapes[1][1]
        return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def get(self, name: str) -> np.ndarray | Blocks:
        if name.endswith(".inv_freq"):
            return self._frequencies()
        names, row = self._there(name)
        first, order = names[0], self._order(names[0])
        if _are_latent(names):
            return self._joined_latent(names)
        if first.endswith(_VALUES) or len(self.file.tensors[first].shape) == 1:
            values = self.file.floats(first)
            values = values if order is None else values[order]
            values = values if row is None else values[row]
            if self._family.one_added and first.endswith("norm.weight") and "ssm_norm" not in first:
                values = values - 1
            if first.endswith("ssm_a"):  # the decay of a recurrent head is stored as a = -exp(A_log)
                values = np.log(-values.astype(np.float64)).astype(np.float32)
            return values.reshape(_form(first, values.shape))
        matrix = self._matrix(names, order)
        return matrix.reshape(_form(first, matrix.shape)) if isinstance(matrix, np.ndarray) else matrix

    def experts(self, name: str) -> Experts:
        start, tensors = f"blk.{self._layer_of(name)}.ffn_", self.file.tensors
        ups = ["gate_up"] if f"{start}gate_up_exps.weight" in tensors else ["gate", "up"]
        ups = ups if f"{start}{ups[0]}_exps.weight" in tensors else ["up"]
        kinds = [f"{start}{kind}_exps" for kind in (*ups, "down")]
        weights, biases = ([f"{kind}.{part}" for kind in kinds] for part in ("weight", "bias"))
        biases = [bias for bias in biases if bias in tensors]
        self._asked |= {*weights, *biases}
        if lost := [name for name in weights if name not in tensors]:
            raise self._lacks(*lost)
        count, hidden, width = (*tensors[weights[-1]].shape, 0, 0)[:3]
        for weight in weights[:-1]:
            wanted = count, width * (2 if "gate_up" in weight else 1), hidden
            if tensors[weight].shape != wanted:
                raise self._other_shape(weight, tensors[weight].shape, wanted)
        if biases and (len(biases) != len(weights) or len(ups) != 2):
            raise ValueError(f"{self.file.paths[0]} has {biases} as biases of experts, and not one for each matrix")
        for bias, weight in zip(biases, weights, strict=False):
            if tensors[bias].shape != tensors[weight].shape[:2]:
                raise self._other_shape(bias, tensors[bias].shape, tensors[weight].shape[:2])
        stored = None
        if all(tensors[weight].format in PACKED_FORMATS for weight in weights):
            stored = StoredExperts({n: tensors[n] for n in (*weights, *biases)})

        @cache
        def parts() -> tuple[list[list[Any]], list[np.ndarray]]:
            """The matrices of all experts, and their biases, of each part."""
            mapped = [part for n in weights for part in expert_parts(n, self._matrix([n], None), count)]
            return mapped, [self.file.floats(bias) for bias in biases]

        def expert(i: int) -> Expert:
            *up, down = (part[i] for part in parts()[0])
            *more, last = [bias[i] for bias in parts()[1]] or [None]
            return Expert(tuple(up), down, tuple(more) or None, last)

        return Experts((count, width, hidden), "gate" in ups[0], expert, stored)

    def check(self, further: bool = True) -> None:
        """Raise UnsupportedModel if the file has tensors that were not asked for."""
        tensors, layers = self.file.tensors, self.config.num_hidden_layers
        # Layers behind the last one draft. Layers that share have keys and values in the file that nothing reads.
        drafting = layers + (further and self.has(f"{MTP}.fc.weight"))
        sharing = layers - getattr(self.config, "num_kv_shared_layers", 0)
        where = {n: m for n in tensors if (m := re.match(r"blk\.(\d+)\.(attn_[kv])?", n))}
        unread = {n for n, m in where.items() if int(m[1]) >= (sharing if m[2] and sharing < layers else drafting)}
        unread |= {f"blk.{layers}.nextn.embed_tokens.weight", *_ROTARY}
        if unknown := sorted(tensors.keys() - self._asked - unread):
            raise UnsupportedModel(
                f"{self.file.paths[0]} has {unknown[0]} and {len(unknown) - 1} other tensors that a {self._family.model_type} "
                "does not have, so outrider cannot run it as it was trained"
            )

    def _lacks(self, *names: str) -> ValueError:
        missing = next((name for name in names if name not in self.file.tensors), names[0])
        text = f"{self.file.paths[0]} is no whole {self.file.architecture}: it lacks {missing}"
        return ValueError(f"{text}; download it again")

    def _other_shape(self, name: str, shape: Sequence[int], wanted: Sequence[int]) -> ValueError:
        return ValueError(
            f"{self.file.paths[0]}: tensor {name} has shape {[*shape]}, and its metadata asks for {[*wanted]}; the file is not "
            "consistent"
        )

    def _there(self, name: str) -> _Place:
        if (place := self._place(name)) is None:
            raise self._lacks(*self._names_of(*name.rpartition(".")[::2]))
        return place

    def _place(self, name: str) -> _Place | None:
        if name not in self._places:
            path, _, kind = name.rpartition(".")
            latent = next((i for i, part in enumerate(LATENT) if path.endswith(f".{part}")), None)
            path = path if latent is None else path.rpartition(".")[0]
            each = re.fullmatch(r"(.*)\.norms\.(\d+)", path)  # StableLM has one norm per head, in one tensor
            names, tensors = self._names_of(each[1] if each else path, kind), self.file.tensors
            if (bare := names[0].removesuffix(".weight")) in tensors:  # the second norms of Falcon-H1
                names = (bare,)
            if names[0].endswith("attn_kv_b.weight") and names[0] not in tensors:  # newer files have it in two
                names = tuple(names[0].replace("_kv_b", part) for part in ("_k_b", "_v_b"))
            if latent is not None:
                names = (names[latent],) if len(names) > 1 else ("",)
            self._asked |= {*names}
            place = _Place(names, int(each[2]) if each else None)
            self._places[name] = place if {*names} <= tensors.keys() else None
        return self._places[name]

    def _names_of(self, path: str, kind: str) -> tuple[str, ...]:
        """The names in the file of the tensors that make a parameter."""
        layer = self._layer_of(path)
        if kind in _IN_LAYER:
            return (f"blk.{layer}.{_IN_LAYER[kind]}",)
        if path.startswith(f"{MTP}."):
            path = path.removeprefix(f"{MTP}.")
            if layer is None:
                return (f"blk.{self.config.num_hidden_layers}.nextn.{_MTP_NAMES.get(path)}.{kind}",)
            path = re.sub(r"\.\d+\.", f".{layer}.", path, count=1)
        for ending, others in self._family.joined.items():
            if path.endswith(ending):
                stem = path.removesuffix(ending)
                return tuple(self._names_of(stem + other, kind)[0] for other in others)
        names, prefixes = self._names, (path, path.replace("model.", "backbone.", 1))
        if (stem := next(filter(names.get_name, prefixes), None)) is not None:
            return (f"{names.get_name(stem)}.{kind}",)
        for prefix in prefixes:
            if kind == "dt_bias" and (base := names.get_name(f"{prefix}.dt_proj")):
                return (f"{base}.bias",)
            if base := names.get_name(f"{prefix}.{kind}"):
                return (base if kind in ("A_log", "D") else f"{base}.{'weight' if kind == 'sinks' else kind}",)
        return (f"{_OTHER_NAMES.get(path, path)}.{kind}",)

    def _layer_of(self, path: str) -> int | None:
        number = next((int(part) for part in path.split(".") if part.isdecimal()), None)
        return number if number is None or not path.startswith(f"{MTP}.") else self.config.num_hidden_layers + number

    def _order(self, name: str) -> np.ndarray | None:
        """int64: row i of a tensor in transformers is row order[i] of the file's; None for the same order.

        A file may interleave the two halves of each head, so that the two numbers of a rotary pair are neighbours.
        """
        if not (self._family.interleaved and (match := re.search(r"attn_([qk])\.", name))):
            return self._family.order(name, self.config)
        heads = self.config.num_attention_heads if match[1] == "q" else self.config.num_key_value_heads
        return np.arange(self.file.tensors[name].shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _matrix(self, names: Sequence[str], order: np.ndarray | None) -> np.ndarray | Blocks:
        """The rows of these tensors one after another, in this order."""
        by_column = names[0].endswith("ssm_out.weight")  # an order of its inputs, which may lie in one block
        parts = [self.file.matrix(name, None if by_column or len(names) > 1 else order) for name in names]
        if by_column and order is not None:
            return (dense(parts[0], _BFLOAT16) if isinstance(parts[0], Blocks) else parts[0])[:, order]
        formats = [self.file.tensors[name].format for name in names]
        parts = [p if form in _KEPT else dense(p, _BFLOAT16) for form, p in zip(formats, parts, strict=True)]
        return parts[0] if len(parts) == 1 else joined(parts, order)

    def _joined_latent(self, names: Sequence[str]) -> np.ndarray:
        """float32 [heads * (keys + values), latent], of the two parts of a linear over a latent."""
        first, last = (self.file.floats(name) for name in names)
        return np.concatenate([first.swapaxes(1, 2), last], 1).reshape(-1, last.shape[2])

    def _frequencies(self) -> np.ndarray:
        plain, factors = rotary.of_config(self.config)[0], self.file.floats("rope_freqs.weight")
        if plain.shape != factors.shape:
            text = f"rope_freqs has {len(factors)} factors for {len(plain)} frequencies"
            raise ValueError(f"{self.file.paths[0]}: {text}")
        return plain / factors


def _are_latent(names: Sequence[str]) -> bool:
    return len(names) > 1 and names[0].endswith("attn_k_b.weight")


def _form(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in transformers."""
    if name.endswith(_CONVOLUTIONS):
        return shape[0], 1, math.prod(shape[1:])
    if name.endswith(_FLAT):
        return (math.prod(shape),)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return 1, math.prod(shape)
    return shape if len(shape) < 3 else (shape[0] * shape[1], *shape[2:])


def _check_formats(file: GGUFFile) -> None:
    """Raises UnsupportedModel for formats that the gguf package cannot read. Warns about those that are kept as bfloat16."""
    grown: dict[str, int] = {}
    for name, stored in file.tensors.items():
        if stored.format in _KEPT:
            continue
        if not _can_dequantise(stored.format):
            raise UnsupportedModel(
                f"{file.paths[0]}: tensor {name} has type {stored.format}, which outrider cannot read. It reads "
                f"{', '.join(_KEPT)}; get the model in one of these"
            )
        grown[stored.format] = grown.get(stored.format, 0) + 2 * stored.weights
    if grown:
        size = sum(grown.values()) / 2**30
        warnings.warn(
            f"{file.paths[0].name} has weights in {', '.join(sorted(grown))}, which the kernels do not compute with; outrider "
            f"keeps them as bfloat16, in {size:.1f} GiB of memory. A Q4_K_M file of the model is smaller in memory and faster",
            RuntimeWarning,
            stacklevel=2,
        )


def _can_dequantise(name: str) -> bool:
    kind = GGMLQuantizationType[name]
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
