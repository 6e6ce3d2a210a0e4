"""The MTP layer of a checkpoint, run by the modelling code of its target as a model of one layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.types import Array
from outrider.models.base import FINAL_NORM, LanguageModel, Want
from outrider.models.config import config_of, native_kind
from outrider.models.hf.arrays import as_tensor
from outrider.models.hf.model import HFModel
from outrider.models.hf.skeleton import filled, skeleton_of
from outrider.models.mtp import JOIN, MTP
from outrider.models.native.mtp import BEFORE_NORM, changes
from outrider.models.nodes import Nodes
from outrider.models.safetensors import FolderTensors


def tensors_with_layer(name: str, config: Any) -> FolderTensors | None:
    """The tensors of a checkpoint, if it is here and has an MTP layer. name: the folder, or its name on the hub."""
    path = Path(name).expanduser()
    if name and not path.exists() and name.count("/") == 1:
        cached = try_to_load_from_cache(name, "config.json")
        path = Path(cached).parent if isinstance(cached, str) else path
    if not (name and path.is_dir() and any(path.glob("*.safetensors")) and native_kind(config.to_dict())):
        return None
    tensors = FolderTensors(name, path, config_of(config.to_dict()))
    return tensors if tensors.has(f"{MTP}.{JOIN[-1]}.weight") else None


def layer_of(name: str, config: Any) -> PreTrainedModel | None:
    """The layer as a model of one layer, with the modules of `JOIN`. None for a checkpoint without one. Its embedding is that of
    the whole model, and so is its output head unless it has its own.

    name: as for `tensors_with_layer`. Raises ValueError for a layer that is not whole."""
    if (tensors := tensors_with_layer(name, config)) is None:
        return None
    small: Any = copy.deepcopy(tensors.config)
    small.update(changes(small) | {"tie_word_embeddings": False, "pad_token_id": None})
    model: Any = skeleton_of(small)
    for norm in JOIN[:2]:
        model.add_module(norm, copy.deepcopy(model.base_model.norm))
    model.add_module(JOIN[2], nn.Linear(2 * small.hidden_size, small.hidden_size, bias=False, device="meta"))
    model.base_model.embed_tokens = None
    if not tensors.has(f"{MTP}.lm_head.weight"):
        model.lm_head = None
    return filled(model, tensors, torch.float32, f"{MTP}.")


class HFMtp:
    """model: of the layer. weight_bytes: that a forward of one pair reads."""

    def __init__(self, raw: PreTrainedModel, target: LanguageModel, weights: str) -> None:
        """raw: of `layer_of`. weights: the precision."""
        layer, head = cast("Any", raw), raw.lm_head
        self._join = _Join(layer, target)
        layer.set_input_embeddings(self._join)
        layer.lm_head = _TargetHead(target) if head is None else head
        layer._is_stateful = False  # its layer is attention, also where the target has others
        layer.to(target.device)
        self.model = HFModel(raw, weights=weights if weights in ("int8", "int4") else "auto", own=True)
        self.weight_bytes = self.model.weight_bytes + (target.head_bytes if head is None else 0)
        self._fed_back = 0 if type(raw).__name__ in BEFORE_NORM else FINAL_NORM

    def forward(self, nodes: Nodes, states: Array | None, want: Want) -> tuple[Array, Array]:
        """(logits of the nodes that are wanted, what all nodes feed back). states: float32 [batch, node, hidden]; None: zeros."""
        self._join.states = None if states is None else as_tensor(states)
        try:
            out = self.model.forward(nodes, taps=(self._fed_back,), want=want)
        finally:
            self._join.states = None
        assert out.features is not None
        return out.logits, out.features


class _Join(nn.Module):
    """Takes the place of the embedding: token ids -> W [norm(E[x]) ; norm(h)], with the states of the call.

    states: float [batch, node, hidden]; None for zeros.
    """

    def __init__(self, raw: Any, target: LanguageModel) -> None:
        super().__init__()
        self.states: Tensor | None = None
        self._embed = target.embedding_rows
        self.enorm, self.hnorm, self.fc = raw.enorm, raw.hnorm, raw.fc
        del raw.enorm, raw.hnorm, raw.fc

    def forward(self, tokens: Tensor) -> Tensor:
        weight = cast("Tensor", self.enorm.weight)
        embedded = torch.from_numpy(self._embed(tokens.cpu().numpy())).to(weight)
        states = torch.zeros_like(embedded) if self.states is None else self.states.to(embedded)
        return self.fc(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))


class _TargetHead(nn.Module):
    """The target's output head, over its own memory."""

    def __init__(self, target: LanguageModel) -> None:
        super().__init__()
        self.weight = torch.empty(target.vocab_size, 0)  # its rows are the tokens
        self._read = target.output_head

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.from_numpy(self._read(hidden.float().cpu().numpy())).to(hidden.device)
