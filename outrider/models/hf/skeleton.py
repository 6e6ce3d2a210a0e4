"""Makes modules of transformers of the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from outrider.kernels.blocks import Blocks
from outrider.models.config import Config
from outrider.models.hf import precision
from outrider.models.hf.arrays import as_tensor
from outrider.models.hf.experts import is_mixture
from outrider.models.hf.linear import linears
from outrider.models.matrix import dense
from outrider.models.native.weights import Tensors


@precision.making()
def skeleton_of(config: Any) -> PreTrainedModel:
    """Modules without memory for their weights. Raises ValueError for settings of which transformers makes none."""
    try:
        own = CONFIG_MAPPING[config.model_type].from_dict(config.to_dict()) if isinstance(config, Config) else config
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    except Exception as error:  # each architecture checks its settings in its own way
        text = f"the configuration of {config._name_or_path} makes no model: {type(error).__name__}: {error}"
        raise ValueError(text) from error


def module_of(tensors: Tensors, config: Any, dtype: str) -> PreTrainedModel:
    """The model of these tensors. Blocks become values of this dtype, and floats stay as they are stored.

    config: of transformers, or of a model that runs natively. Raises what `Tensors` raise, and ValueError for other shapes.
    """
    model, floats = skeleton_of(config), getattr(torch, dtype)
    for path, module in model.named_modules():
        for name, wanted in () if is_mixture(module) else module.named_parameters(path, recurse=False):
            if tensors.has(name):  # before memory is taken for what settings say
                _check_shape(name, tensors.shape(name), wanted.shape)
    _compute_buffers_(model)
    packed = {*linears(model).values()}
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    tied = outputs if model.config.tie_word_embeddings else None
    for path, module in model.named_modules():
        if is_mixture(module):
            _give_experts_(module, tensors, path, floats)
            continue
        for kind, wanted in [*module._parameters.items(), *module._buffers.items()]:
            name = f"{path}.{kind}"
            if wanted is None or (module is tied and kind == "weight"):
                continue
            if tensors.has(name):
                values = _shaped(name, _values(tensors.get(name), floats), wanted.shape)
                _give_(module, kind, values if module in packed else values.clone())  # no file stays mapped
            elif kind == "bias":
                module.register_parameter(kind, None)
            elif wanted.is_meta:
                tensors.get(name)  # raises the error that says what is missing
    if tied is not None:
        tied.weight = inputs.weight
    tensors.check(False)
    return model.eval()


def _values(matrix: Any, dtype: torch.dtype) -> Tensor:
    return as_tensor(dense(matrix)).to(dtype) if isinstance(matrix, Blocks) else as_tensor(np.ascontiguousarray(matrix))


def other_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> ValueError:
    return ValueError(
        f"tensor {name} is {[*shape]} in the weights, and the configuration asks for {[*wanted]}; one of them is of another model"
    )


def _check_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    if [n for n in shape if n > 1] != [n for n in wanted if n > 1]:
        raise other_shape(name, shape, wanted)


def _shaped(name: str, values: Tensor, wanted: torch.Size) -> Tensor:
    _check_shape(name, values.shape, wanted)
    return values.reshape(wanted)


def _give_(module: nn.Module, kind: str, values: Tensor) -> None:
    if kind in module._buffers:
        module._buffers[kind] = values
    else:
        setattr(module, kind, nn.Parameter(values, requires_grad=False))


def _compute_buffers_(model: PreTrainedModel) -> None:
    """Compute what no checkpoint has: rotary frequencies and factors of embeddings."""
    for module in model.modules():
        if any(b is not None and b.is_meta for b in module._buffers.values()):
            module._buffers = {
                n: None if b is None else torch.empty_like(b, device="cpu") for n, b in module._buffers.items()
            }
            model._init_weights(module)
    model._init_weights(model.base_model)  # of Falcon-H1, which fills buffers of its layers


def _give_experts_(module: Any, tensors: Tensors, path: str, dtype: torch.dtype) -> None:
    """The rows of gate and up follow one another, or alternate where the matrices are transposed."""
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    parts: dict[str, list[Tensor]] = {name: [] for name in (*names, *(f"{n}_bias" for n in names if module.has_bias))}
    for expert in tensors.experts(path):
        both = zip(names, (expert.up, (expert.down,)), (expert.up_biases, (expert.down_bias,)), strict=True)
        for name, matrices, biases in both:
            whole = _joined(module, [_values(matrix, dtype) for matrix in matrices])
            parts[name].append(whole.mT if module.is_transposed else whole)
            if module.has_bias:
                parts[f"{name}_bias"].append(
                    _joined(module, [as_tensor(bias) for bias in biases or () if bias is not None])
                )
    for name, each in parts.items():
        _give_(module, name, _shaped(f"{path}.{name}", torch.stack(each), getattr(module, name).shape))


def _joined(module: Any, parts: list[Tensor]) -> Tensor:
    return torch.stack(parts, 1).flatten(0, 1) if module.is_transposed else torch.cat(parts)
