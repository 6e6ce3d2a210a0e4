"""MTP: the layer of a model's own checkpoint that predicts one token further (`models.native.mtp`), as a drafter.

It reads pairs as an EAGLE head does: a token, and the target's state before it. The native kernels run it, as all heads. Of a
target that transformers runs, the layer is read from the target's files.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.eagle import Pairs
from outrider.drafters.heads.features import HELD, PairModel
from outrider.drafters.model.grower import TreeDrafter
from outrider.kernels import why_no_kernels
from outrider.models.base import FINAL_NORM
from outrider.models.folder import tensors_with_layer
from outrider.models.load import Loaded
from outrider.models.mtp import MTP
from outrider.models.native.families import family_of
from outrider.models.native.mtp import BEFORE_NORM, MtpBuilder, OneLayer
from outrider.models.native.program import Program
from outrider.models.native.weights import TensorSource


def mtp_model(target: Loaded, max_length: int, quantization: str = "auto") -> PairModel:
    """The MTP layer of a target. quantization: of the layer; "auto": that of the target.

    Raises ValueError if there is none that can be run."""
    program = _of_files(target) if target.program is None else target.program.mtp
    if program is None:
        raise ValueError(f"{target.name} has no MTP layer that can draft: its files hold none, or loading it said why")
    if quantization in ("int8", "int4") and quantization != target.weights:
        program = program.converted(quantization)
    return PairModel(program, (FINAL_NORM,), min(max_length, program.max_length, HELD))


def _of_files(target: Loaded) -> Program | None:
    """The layer alone, with the embedding and the output head of its model; None if the files hold none."""
    if (tensors := tensors_with_layer(target.checkpoint, target.config)) is None:
        return None
    try:
        if missing := why_no_kernels("cpu"):
            raise ValueError(f"heads need the native kernels: {missing}")
        config, source = tensors.config, TensorSource(tensors, tensors.config, target.weights)
        source.table("model.embed_tokens")  # and the output head, which the layer shares
        part, family = source.part(MTP), family_of(config.kind)
        assert part is not None
        assert family is not None
        builder = MtpBuilder(part, before_norm=config.kind in BEFORE_NORM)
        family(builder, OneLayer(config))
    except (ValueError, LookupError) as error:
        raise ValueError(f"the MTP layer of {target.name} cannot draft: {error}") from error
    return replace(builder.program(), max_length=config.max_position_embeddings)


def from_setup(setup: DrafterSetup) -> TreeDrafter[Pairs]:
    """Raises ValueError if the target's checkpoint holds no MTP layer that can be run."""
    if setup.config.model is not None:
        raise ValueError(
            f'MTP layers are part of the target\'s own checkpoint, so leave out "model": "{setup.config.model}"'
        )
    model = mtp_model(setup.target, setup.max_length, setup.config.quantization)
    return TreeDrafter(Pairs(model, setup.num_slots, setup.max_length))
