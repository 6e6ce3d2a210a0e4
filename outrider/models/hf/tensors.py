"""The weights of a model object of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.models.config import Config, config_of
from outrider.models.dtypes import dtype_name
from outrider.models.hf.arrays import as_array
from outrider.models.native.program import NotNative
from outrider.models.tensors import Experts, stacked_experts

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
    """`Tensors` of modules. They are views. angles: with the rotary frequencies that torch has computed on this processor."""

    sizes = None  # they are in memory already

    def __init__(self, model: PreTrainedModel, angles: bool = True) -> None:
        self.raw, every = model, (model.named_parameters, model.named_buffers)
        named = {name: t for each in every for name, t in each(remove_duplicate=False)}
        self._named = {n: t for n, t in named.items() if not (n.endswith("inv_freq") and (t.is_meta or not angles))}
        inputs: Any = model.get_input_embeddings()
        outputs: Any = model.get_output_embeddings()
        if inputs.weight.data_ptr() == outputs.weight.data_ptr():
            self._named.pop("lm_head.weight", None)
        self.floats = self.precision = dtype_name(outputs.weight.dtype)

    def has(self, name: str) -> bool:
        return name in self._named

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._named[name].shape)

    def get(self, name: str) -> np.ndarray:
        return as_array(self._named[name])

    def experts(self, name: str) -> Experts:
        module: Any = self.raw.get_submodule(name)
        transposed, (count, hidden, width) = module.is_transposed, module.down_proj.shape

        def get(part: str, i: int) -> np.ndarray:
            values = getattr(module, part)[i]
            return as_array(values.T if transposed and values.dim() == 2 else values)

        if transposed:
            hidden, width = width, hidden
        shape = count, width * (2 if module.has_gate else 1), hidden
        return stacked_experts(get, shape, gated=module.has_gate, alternate=transposed, biased=module.has_bias)

    def check(self, further: bool = True) -> None:
        """All that a class of transformers has was asked for by its family, or `outrider.models.hf.checked` would differ."""
