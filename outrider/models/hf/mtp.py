"""The MTP layer of a checkpoint, run by the modelling code of its target as a model of one layer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.types import Array
from outrider.kernels.border import as_array, as_tensor
from outrider.models.base import FINAL_NORM, LanguageModel, Want
from outrider.models.hf.model import HFModel
from outrider.models.native.mtp import BEFORE_NORM
from outrider.models.nodes import Nodes


class HFMtp:
    """model: of the layer. weight_bytes: that a forward of one pair reads."""

    def __init__(self, raw: PreTrainedModel, target: LanguageModel, weights: str) -> None:
        """raw: of `of_folder`. weights: the precision."""
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
        return as_array(out.logits), as_array(out.features.float())


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
        embedded = self._embed(tokens).to(cast("Tensor", self.enorm.weight).dtype)
        states = torch.zeros_like(embedded) if self.states is None else self.states.to(embedded)
        return self.fc(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))


class _TargetHead(nn.Module):
    """The target's output head, over its own memory."""

    def __init__(self, target: LanguageModel) -> None:
        super().__init__()
        self.weight = torch.empty(target.vocab_size, 0)  # its rows are the tokens
        self._read = target.output_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self._read(hidden)
