"""MTP: the layer of a model's own checkpoint that predicts one token further (`models.native.mtp`), as a drafter.

It reads pairs as an EAGLE head does: a token, and the target's state before it. The native step runs it for the models that it
runs. For the others the target's modelling code runs it, as a model of one layer.
"""

from __future__ import annotations

from outrider.core.types import Array
from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.eagle import Pairs
from outrider.drafters.heads.features import HELD, HeadOutput, NativePairs, PairModel, last_nodes
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.base import FINAL_NORM, Want
from outrider.models.cache import SlotCache
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes


def mtp_model(target: Loaded, max_length: int, quantization: str = "auto") -> PairModel:
    """The MTP layer of a target. quantization: of the layer; "auto": that of the target.

    Raises ValueError if there is none that can be run."""
    if target.program is None:
        return ModulePairs(target, max_length, quantization)
    if (program := target.program.mtp) is None:
        raise ValueError(f"{target.name} has no MTP layer that can draft: its files hold none, or loading it said why")
    if quantization in ("int8", "int4") and quantization != target.weights:
        program = program.converted(quantization)
    return NativePairs(program, (FINAL_NORM,), min(max_length, program.max_length, HELD))


class ModulePairs(PairModel):
    """By the target's modelling code. Cell t of a slot holds the keys and values of the pair (x_{t+1}, h_t)."""

    def __init__(self, target: Loaded, max_length: int, quantization: str = "auto") -> None:
        from outrider.models.hf.mtp import HFMtp, layer_of

        try:
            raw = layer_of(target.checkpoint, target.config)
        except ValueError as error:
            raise ValueError(f"the MTP layer of {target.name} cannot draft: {error}") from error
        if raw is None:
            raise ValueError(
                f"{target.name} has no MTP layers: {target.checkpoint} is no folder of safetensors with tensors of the layer "
                "after the last one, or of mtp"
            )
        self.taps, self.vocab_size = (FINAL_NORM,), target.model.vocab_size
        self._layer = HFMtp(raw, target.model, target.weights if quantization in ("auto", "none") else quantization)
        self.max_length = min(max_length, self._layer.model.max_length, HELD)
        self.weight_bytes = self._layer.weight_bytes

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return self._layer.model.new_cache(num_slots, min(max_length, self.max_length))

    def forward(
        self, nodes: Nodes, features: Array | None = None, *, g: Array | None = None, want: Want = "all"
    ) -> HeadOutput:
        logits, fed_back = self._layer.forward(nodes, g if features is None else features, want)
        if want == "last":
            fed_back = fed_back[last_nodes(nodes, 1)]
        return HeadOutput(logits, fed_back[:, :0] if want == "none" else fed_back)


def from_setup(setup: DrafterSetup) -> TreeDrafter[Pairs]:
    """Raises ValueError if the target's checkpoint holds no MTP layer that can be run."""
    if setup.config.model is not None:
        raise ValueError(
            f'MTP layers are part of the target\'s own checkpoint, so leave out "model": "{setup.config.model}"'
        )
    model = mtp_model(setup.target, setup.max_length, setup.config.quantization)
    return TreeDrafter(Pairs(model, setup.num_slots, setup.max_length))
