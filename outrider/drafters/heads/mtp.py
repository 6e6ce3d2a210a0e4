"""MTP: the layer of a model's own checkpoint that predicts one token further (`models.native.mtp`), as a drafter.

It reads pairs as an EAGLE head does: a token, and the target's state before it. The native step runs it for the models that it
runs. For the others the target's modelling code runs it, as a model of one layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.eagle import Pairs
from outrider.drafters.heads.features import HELD, HeadOutput, NativePairs, PairModel, last_nodes
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.base import FINAL_NORM, LanguageModel, Want
from outrider.models.cache import SlotCache
from outrider.models.load import Loaded
from outrider.models.native.mtp import BEFORE_NORM
from outrider.models.nodes import Nodes


def mtp_model(target: Loaded, max_length: int, quantization: str = "auto") -> PairModel:
    """The MTP layer of a target. quantization: of the layer; "auto": that of the target.

    Raises ValueError if there is none that can be run."""
    if target.program is None:
        return TorchMtp(target, max_length, quantization)
    if (program := target.program.mtp) is None:
        raise ValueError(f"{target.name} has no MTP layer that can draft: its files hold none, or loading it said why")
    if quantization in ("int8", "int4") and quantization != target.weights:
        program = program.converted(quantization)
    return NativePairs(program, (FINAL_NORM,), min(max_length, program.max_length, HELD))


class TorchMtp(PairModel):
    """By the target's modelling code. Cell t of a slot holds the keys and values of the pair (x_{t+1}, h_t)."""

    def __init__(self, target: Loaded, max_length: int, quantization: str = "auto") -> None:
        from outrider.models.hf.model import HFModel
        from outrider.models.mtp import of_folder

        model = target.model
        try:
            raw = of_folder(target.checkpoint, target.config)
        except ValueError as error:
            raise ValueError(f"the MTP layer of {target.name} cannot draft: {error}") from error
        if raw is None:
            raise ValueError(
                f"{target.name} has no MTP layers: {target.checkpoint} is no folder of safetensors with tensors of the layer "
                "after the last one, or of mtp"
            )
        self.taps, self.device, self.vocab_size = (FINAL_NORM,), model.device, model.vocab_size
        self._join = _Join(raw, model)
        raw.set_input_embeddings(self._join)
        head: Any = raw.lm_head
        raw.lm_head = _TargetHead(model) if head is None else head  # pyright: ignore[reportAttributeAccessIssue]
        raw._is_stateful = False  # its layer is attention, also where the target has others
        raw.to(self.device)  # pyright: ignore[reportArgumentType]
        weights = target.weights if quantization in ("auto", "none") else quantization
        self._model = HFModel(raw, weights=weights if weights in ("int8", "int4") else "auto", own=True)
        self._fed_back = 0 if type(raw).__name__ in BEFORE_NORM else FINAL_NORM
        self.max_length = min(max_length, self._model.max_length, HELD)
        self.weight_bytes = self._model.weight_bytes + (model.head_bytes if head is None else 0)

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return self._model.new_cache(num_slots, min(max_length, self.max_length))

    def forward(
        self, nodes: Nodes, features: Tensor | None = None, *, g: Tensor | None = None, want: Want | int = "all"
    ) -> HeadOutput:
        self._join.states = features if features is not None else g
        try:
            out = self._model.forward(nodes, taps=(self._fed_back,), want=cast("Want", want))
        finally:
            self._join.states = None
        assert out.features is not None
        fed_back = out.features.float()
        if want == "last":
            fed_back = fed_back[last_nodes(nodes, 1)]
        return HeadOutput(out.logits, fed_back[:, :0] if want == "none" else fed_back)


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


def from_setup(setup: DrafterSetup) -> TreeDrafter[Pairs]:
    """Raises ValueError if the target's checkpoint holds no MTP layer that can be run."""
    if setup.config.model is not None:
        raise ValueError(
            f'MTP layers are part of the target\'s own checkpoint, so leave out "model": "{setup.config.model}"'
        )
    model = mtp_model(setup.target, setup.max_length, setup.config.quantization)
    return TreeDrafter(Pairs(model, setup.num_slots, setup.max_length))
