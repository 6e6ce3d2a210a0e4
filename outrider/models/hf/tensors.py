"""The weights of a model object of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.kernels.border import as_array
from outrider.models.config import Config, config_of
from outrider.models.dtypes import dtype_name
from outrider.models.native.program import NotNative
from outrider.models.tensors import Expert, Experts

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def config_for(model: PreTrainedModel) -> Config:
    """The configuration of a native program. Raises ValueError for modules that no family computes."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            raise NotNative(f"its linears are {type(module).__name__}, not plain matrices")
    for p in model.parameters():
        if p.device.type not in ("cpu", "meta") or p.dtype not in _FLOATS:
            raise NotNative(f"a weight is {p.dtype} on {p.device}")
    config = config_of(model.config.to_dict())
    config.kind, config._name_or_path = type(model).__name__, model.config._name_or_path
    return config


class ModuleTensors:
    """`Tensors` of modules. They are views."""

    sizes = None  # they are in memory already

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: dict[str, Any] = dict(model.named_modules())
        inputs: Any = model.get_input_embeddings()
        outputs: Any = model.get_output_embeddings()
        self._tied = outputs if inputs.weight.data_ptr() == outputs.weight.data_ptr() else None
        self.precision = self.floats = dtype_name(outputs.weight.dtype)

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._there(name).shape)

    def get(self, name: str) -> Any:
        return as_array(self._there(name))

    def experts(self, name: str) -> Experts:
        module = self._modules[name]
        count, hidden, width = module.down_proj.shape
        if module.is_transposed:
            hidden, width = width, hidden
        return Experts((count, width, hidden), module.has_gate, lambda i: _expert(module, i))

    def check(self, further: bool = True) -> None:
        """All that a class of transformers has was asked for by its family, or `outrider.models.hf.checked` would differ."""

    def _there(self, name: str) -> Any:
        if (found := self._find(name)) is None:
            raise KeyError(name)
        return found

    def _find(self, name: str) -> Any:
        path, _, kind = name.rpartition(".")
        module = self._modules.get(path)
        if module is None or (module is self._tied and kind == "weight"):
            return None
        value = (module._parameters | module._buffers).get(kind)
        return None if value is None or (value.is_meta and kind.endswith("inv_freq")) else value


def _expert(module: Any, index: int) -> Expert:
    ups, biases = _parts(module, "gate_up_proj" if module.has_gate else "up_proj", index)
    [down], [last] = _parts(module, "down_proj", index)
    return Expert(tuple(ups), down, tuple(biases) if module.has_bias else None, last)


def _parts(module: Any, name: str, index: int) -> tuple[list[Any], list[Any]]:
    """The matrices [out, in] and biases of an expert: one, or gate and up. Their rows alternate where they are transposed."""
    bias = as_array(getattr(module, f"{name}_bias")[index]) if module.has_bias else None
    values = getattr(module, name)[index]
    matrix = as_array(values.T if module.is_transposed else values)
    half = matrix.shape[0] // 2
    parts = [slice(None)]
    if name.startswith("gate"):
        parts = [slice(0, None, 2), slice(1, None, 2)] if module.is_transposed else [slice(half), slice(half, None)]
    return [matrix[part] for part in parts], [None if bias is None else bias[part] for part in parts]
