"""Makes a model of transformers from a GGUF file, with matrices that stay in the mapped file until they are packed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, TensorNameMap, quants
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outrider.kernels.blocks import Blocks
from outrider.models import mtp
from outrider.models.checkpoint import Sizes, UnsupportedModel
from outrider.models.gguf.architectures import Architecture, architecture_of, config_of, tensor_names
from outrider.models.gguf.reader import FLOATS, PACKED_FORMATS, GGUFFile, StoredExperts, expert_parts
from outrider.models.gguf.tokenizer import end_ids
from outrider.models.hf.experts import dense_experts_, give_expert_blocks_, is_mixture
from outrider.models.hf.powers import ExactPowers
from outrider.models.matrix import (
    STORED,
    dense,
    give_latent_,
    give_matrix_,
    join_latents_,
    joined,
    matrices_in,
    matrix_of,
)

_KEPT = (*FLOATS, *PACKED_FORMATS)
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
# Names of a layer that predicts one token further -> those in a model of one layer. None: its embedding is the model's own.
_MTP_NAMES = {
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.shared_head_norm.weight": "output_norm.weight",
    "nextn.shared_head_head.weight": "output.weight",
    "nextn.embed_tokens.weight": None,
}

# Tensors with the numbers of a parameter, in another shape.
_RESHAPED = (
    "ffn_gate_inp_shexp.weight", "exp_probs_b.bias", "ssm_conv1d.weight", "shortconv.conv.weight", "ssm_norm.weight", "ssm_a",
    "ssm_d",
)  # fmt: skip


class _Place(NamedTuple):
    """Where a tensor of the file belongs. row: the tensor's row that the parameter is, or None for all of it."""

    module: nn.Module
    kind: str
    row: int | None = None


def build(file: GGUFFile) -> PreTrainedModel:
    """The model. Norms and biases are float32; matrices are views of the file (`models.matrix`).

    Raises ValueError or UnsupportedModel, with the reason, for a file that is no whole model of a known kind.
    """
    config = config_of(file)
    _check_formats(file)
    model = _filled(_skeleton(config), file)
    if config.tie_word_embeddings:
        inputs: Any = model.get_input_embeddings()
        give_matrix_(model.get_output_embeddings(), matrix_of(inputs))  # pyright: ignore[reportArgumentType]
    ends = end_ids(file)
    if model.generation_config is not None and ends:
        model.generation_config.eos_token_id = list(ends)
    return model.eval()


def mtp_of(file: GGUFFile) -> PreTrainedModel | None:
    """The file's MTP layer, as in `models.mtp.of_folder`."""
    if not file.get("nextn_predict_layers"):
        return None
    config = config_of(file)
    block = f"blk.{config.num_hidden_layers}."
    tensors = {name: t for name, t in file.tensors.items() if name in _ROTARY}
    for name, tensor in file.tensors.items():
        if name.startswith(block) and (target := _MTP_NAMES.get(short := name.removeprefix(block), f"blk.0.{short}")):
            tensors[target] = tensor
    model = mtp.joined_(_skeleton(mtp.one_layer(config)), own_head="output.weight" in tensors)
    one = file.metadata | {f"{file.architecture}.block_count": 1}
    return _filled(model, replace(file, tensors=tensors, metadata=one))


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _filled(model: PreTrainedModel, file: GGUFFile) -> PreTrainedModel:
    """The model with the weights of the file."""
    family, config = architecture_of(file), model.config
    _fill_buffers_(model, file)
    for names, place in _places(model, file):
        _check_shape(file, names, place)
        order = family.order(names[0], config)
        if family.interleaved and (match := re.search(r"attn_([qk])\.", names[0])):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            order = _rotary_order(file.tensors[names[0]].shape[0], heads)
        first = names[0]
        if len(names) > 1 and first.endswith("attn_k_b.weight"):
            both = [_matrix(file, (name,), None) for name in names]
            give_latent_(place.module, [m.flatten(0, 1) if isinstance(m, Tensor) else m for m in both])
        elif place.kind == "weight" and isinstance(place.module, (nn.Linear, nn.Embedding)):
            matrix = _matrix(file, names, order)
            give_matrix_(place.module, matrix[None] if isinstance(matrix, Tensor) and matrix.dim() == 1 else matrix)
        else:
            values = file.floats(first)
            values = values if order is None else values[order]
            values = values if place.row is None else values[place.row]
            if family.one_added and first.endswith("norm.weight") and "ssm_norm" not in first:
                values = values - 1
            values = _as_parameter(first, values, getattr(place.module, place.kind).shape)
            if place.kind in place.module._buffers:
                place.module._buffers[place.kind] = values
            else:
                setattr(place.module, place.kind, nn.Parameter(values, requires_grad=False))
    for path, module in _mixtures(model).items():
        _give_experts_(module, file, path)
    return model


def sizes(file: GGUFFile) -> Sizes:
    """The memory that the model needs. The matrices are all tensors of two dimensions, embeddings among them."""
    matrices = [t for t in file.tensors.values() if len(t.shape) > 1]
    rest = sum(4 * t.weights for t in file.tensors.values() if len(t.shape) == 1)
    blocks = sum(t.bytes if t.format in _KEPT else 2 * t.weights for t in matrices)
    return Sizes("gguf", sum(t.weights for t in matrices), rest, blocks)


def dense_(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace blocks by values of this dtype, one matrix after another. For devices without kernels."""
    join_latents_(model)
    done: dict[int, Tensor] = {}
    for _, module, blocks in [*matrices_in(model)]:
        give_matrix_(module, done.setdefault(id(blocks), dense(blocks, dtype)))
    for module in _mixtures(model).values():
        dense_experts_(module, dtype)


def _matrix(file: GGUFFile, names: Sequence[str], order: Tensor | None) -> Tensor | Blocks:
    """The rows of these tensors one after another, in this order."""
    by_column = names[0].endswith("ssm_out.weight")  # an order of its inputs, which may lie in one block
    parts = [file.matrix(name, None if by_column or len(names) > 1 else order) for name in names]
    if by_column and order is not None:
        return dense(parts[0], torch.bfloat16)[:, order].contiguous()
    parts = [
        p if file.tensors[n].format in _KEPT else dense(p, torch.bfloat16) for n, p in zip(names, parts, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    rows = joined(parts, order)
    return rows.float() if isinstance(rows, Tensor) else rows


def _tensors_of(names: TensorNameMap, family: Architecture, path: str, kind: str) -> tuple[str, ...]:
    """The names in the file of the tensors that make a parameter."""
    if kind in _IN_LAYER:
        return (f"blk.{_layer_of(path)}.{_IN_LAYER[kind]}",)
    for ending, others in family.joined.items():
        if path.endswith(ending):
            return tuple(_tensors_of(names, family, path.removesuffix(ending) + other, kind)[0] for other in others)
    stem = next((p for p in (path, path.replace("model.", "backbone.", 1)) if names.get_name(p)), None)
    if stem is not None:
        return (f"{names.get_name(stem)}.{kind}",)
    for prefix in (path, path.replace("model.", "backbone.", 1)):
        if kind == "dt_bias" and (base := names.get_name(f"{prefix}.dt_proj")):
            return (f"{base}.bias",)
        if base := names.get_name(f"{prefix}.{kind}"):
            return (base if kind in ("A_log", "D") else f"{base}.{'weight' if kind == 'sinks' else kind}",)
    return (f"{_OTHER_NAMES.get(path, path)}.{kind}",)


def _places(model: PreTrainedModel, file: GGUFFile) -> list[tuple[tuple[str, ...], _Place]]:
    """Each parameter's place, by the names of its tensors. Raises ValueError unless parameters and tensors are the same."""
    names, family = tensor_names(file), architecture_of(file)
    mixtures = _mixtures(model)
    experts = {name for path, module in mixtures.items() for name in _expert_names(file, path, module)}
    places: list[tuple[tuple[str, ...], _Place]] = []
    head = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    missing = []
    for path, module in model.named_modules():
        buffers = {n: b for n, b in module._buffers.items() if n in _IN_LAYER}
        for kind, parameter in [*module._parameters.items(), *buffers.items()]:
            if parameter is None or module is head or path in mixtures:
                continue
            each = re.fullmatch(r"(.*)\.norms\.(\d+)", path)  # StableLM has one norm per head, in one tensor
            sources = _tensors_of(names, family, each[1] if each else path, kind)
            if (bare := sources[0].removesuffix(".weight")) in file.tensors:  # the second norms of Falcon-H1
                sources = (bare,)
            if sources[0].endswith("attn_kv_b.weight") and sources[0] not in file.tensors:  # newer files have it in two
                sources = tuple(sources[0].replace("_kv_b", part) for part in ("_k_b", "_v_b"))
            if {*sources} <= file.tensors.keys():
                places.append((sources, _Place(module, kind, int(each[2]) if each else None)))
            elif kind == "bias" and family.biases_by_tensor:
                module.register_parameter("bias", None)
            else:
                missing += sources
    if missing:
        raise ValueError(
            f"{file.paths[0]} is no whole {file.architecture}: it lacks {missing[0]} and {len(missing) - 1} other tensors; "
            "download it again"
        )
    used = {name for sources, _ in places for name in sources}
    # Layers behind the last one draft. Layers that share have keys and values in the file that nothing reads.
    layers = model.config.num_hidden_layers
    sharing = layers - getattr(model.config, "num_kv_shared_layers", 0)
    where = {n: m for n in file.tensors if (m := re.match(r"blk\.(\d+)\.(attn_[kv])?", n))}
    unread = {n for n, m in where.items() if int(m[1]) >= (sharing if m[2] else layers)}
    if unknown := sorted(file.tensors.keys() - used - experts - unread - {*_ROTARY}):
        raise UnsupportedModel(
            f"{file.paths[0]} has {unknown[0]} and {len(unknown) - 1} other tensors that a {type(model).__name__} does not "
            "have, so outrider cannot run it as it was trained"
        )
    return places


def _mixtures(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if is_mixture(module)}


def _expert_names(file: GGUFFile, path: str, module: Any) -> list[str]:
    """The tensors of the experts of a layer: gate and up, or both in one, or up alone; down; their biases if there are any."""
    start = f"blk.{_layer_of(path)}.ffn_"
    joined = f"{start}gate_up_exps.weight" in file.tensors
    first = ("gate_up",) if joined else ("gate", "up") if module.has_gate else ("up",)
    kinds = [f"{start}{kind}_exps" for kind in (*first, "down")]
    return [f"{n}.weight" for n in kinds] + [f"{n}.bias" for n in kinds if f"{n}.bias" in file.tensors]


def _layer_of(path: str) -> str:
    return next(part for part in path.split(".") if part.isdecimal())


def _give_experts_(module: Any, file: GGUFFile, path: str) -> None:
    """Give a mixture slices of the mapped file. Raises ValueError for tensors that are not there or do not fit."""
    parameter = "gate_up_proj" if module.has_gate else "up_proj"
    _, rows, columns = getattr(module, parameter).shape
    experts, hidden, middle = module.down_proj.shape
    if module.is_transposed:
        rows, columns, hidden, middle = columns, rows, middle, hidden
    names = _expert_names(file, path, module)
    weights = [name for name in names if name.endswith("weight")]
    cut = len(weights) - 1  # matrices that the parameter has
    wanted = [(experts, rows // cut, columns)] * cut + [(experts, hidden, middle)]
    wanted += [shape[:2] for shape in wanted] * (len(names) > len(weights))
    if len(names) != len(weights) * (2 if module.has_bias else 1):
        raise ValueError(
            f"{file.paths[0]} has {names[len(weights) :]} as biases of experts, and a {type(module).__name__} has others"
        )
    for name, shape in zip(names, wanted, strict=True):
        if name not in file.tensors or file.tensors[name].shape != shape:
            got = list(file.tensors[name].shape) if name in file.tensors else "no shape: it is not there"
            raise ValueError(f"{file.paths[0]}: tensor {name} has shape {got}, and its metadata asks for {list(shape)}")
    if all(file.tensors[name].format in PACKED_FORMATS for name in weights):
        module.__dict__[STORED] = StoredExperts({name: file.tensors[name] for name in names})
    *first, down = (part for name in weights for part in expert_parts(name, _matrix(file, (name,), None), experts))
    give_expert_blocks_(module, parameter, [*zip(*first, strict=True)])
    give_expert_blocks_(module, "down_proj", [(matrix,) for matrix in down])
    for name in (parameter, "down_proj"):  # only the shapes are left, in one number
        stand_in = torch.zeros(1).expand(getattr(module, name).shape)
        setattr(module, name, nn.Parameter(stand_in, requires_grad=False))
    if module.has_bias:
        first, second, last = (file.floats(name) for name in names[3:])
        both = torch.stack([first, second], -1).flatten(1)  # gate and up alternate in the modules that have biases
        module.gate_up_proj_bias = nn.Parameter(both, requires_grad=False)
        module.down_proj_bias = nn.Parameter(last, requires_grad=False)


def _check_shape(file: GGUFFile, names: Sequence[str], place: _Place) -> None:
    wanted = tuple(getattr(place.module, place.kind).shape)
    if names[0].endswith("attn_k_b.weight"):  # [head, latent, key], [head, value, latent]
        first, second = (file.tensors[name].shape for name in names)
        fits = len(first) == len(second) == 3 and (first[0], first[1]) == (second[0], second[2])
        if fits and (first[0] * (first[2] + second[1]), first[1]) == wanted:
            return
    shapes = [file.tensors[name].shape[place.row is not None :] for name in names]
    shape = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
    if shape != wanted and not _fits(names[0], shape, wanted):
        raise ValueError(
            f"{file.paths[0]}: tensor {names[0]} has shape {list(shape)}, and its metadata asks for {list(wanted)}; the file is "
            "not consistent"
        )


def _as_parameter(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """The values of a parameter, of those of its tensor. The decay of a recurrent head is stored as a = -exp(A_log)."""
    values = (-values).log() if name.endswith("ssm_a") else values
    return values.reshape(shape) if name.endswith(_RESHAPED) else values


def _fits(name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be such a parameter."""
    same = [n for n in stored if n > 1] == [n for n in shape if n > 1]
    joined = name.endswith("ssm_norm.weight") and torch.Size(stored).numel() == torch.Size(shape).numel()
    return name.endswith(_RESHAPED) and (same or joined)


def _rotary_order(rows: int, heads: int) -> Tensor:
    """int64 [rows]: row i of the model's matrix is row order[i] of the file's.

    The file interleaves the two halves of each head, so that the two numbers of a rotary pair are neighbours.
    """
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _fill_buffers_(model: PreTrainedModel, file: GGUFFile) -> None:
    """Compute what no checkpoint has: rotary frequencies and factors of embeddings."""
    for module in model.modules():
        if any(b is not None and b.is_meta for b in module._buffers.values()):
            module._buffers = {
                n: None if b is None else torch.empty_like(b, device="cpu") for n, b in module._buffers.items()
            }
            with ExactPowers():
                model._init_weights(module)
    model._init_weights(model.base_model)  # of Falcon-H1, which fills buffers of its layers
    if "rope_freqs.weight" not in file.tensors:
        return
    factors = file.floats("rope_freqs.weight")
    for module in model.modules():
        inv_freq = module._buffers.get("inv_freq")
        if inv_freq is None:
            continue
        if inv_freq.shape != factors.shape:
            raise ValueError(f"{file.paths[0]}: rope_freqs has {len(factors)} factors for {len(inv_freq)} frequencies")
        module._buffers["inv_freq"] = module._buffers["original_inv_freq"] = inv_freq / factors


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
