"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each head predicts one later token from the last hidden state alone.

Head i gives the logits W_i z of the token i + 2 positions after the state h that it reads. Each of its blocks makes
z = h + SiLU(A h + b). W_i is its own, or one matrix serves all heads, for all tokens or for some.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from outrider.core.sampling import TokenSubset
from outrider.core.types import Array
from outrider.drafters.base import Resources
from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.files import MEDUSA, head_of, settings_named
from outrider.drafters.heads.lattice import Lattice
from outrider.drafters.heads.layers import Linear, Linears, precision_of, silu
from outrider.drafters.heads.reading import OUTPUT, HeadReader, log
from outrider.drafters.heads.selftest import Misreading, examine, parallel_survival
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.base import FINAL_NORM, LanguageModel
from outrider.models.load import Loaded

_BLOCK = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.(weight|bias)")
_OWN = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.(\d+)\.weight")


@dataclass(frozen=True, eq=False)
class MedusaWeights:
    """Medusa heads as they were read."""

    # for each head its blocks, as (A [hidden, hidden], b [hidden] or None)
    blocks: list[list[tuple[Array, Array | None]]]
    # float [kept, hidden], one for each head, or a single one for all; empty for the target's own
    outputs: list[Array]
    token_ids: Array | None  # int64 [kept], ascending; None for all tokens
    vocab_size: int  # tokens of the target
    logit_scale: float = 1.0  # factor of all logits


@settings_named
def read_medusa(folder: str | Path, target: Loaded) -> MedusaWeights:
    """Read the layout of FasterDecoding and TGI, or that of vLLM. Raises ValueError, naming both sides, for what does not fit."""
    reader = HeadReader(folder, target, MEDUSA)
    path, settings, shared = reader.path, reader.given, reader.spare.get(OUTPUT)
    tensors = {n.removeprefix("medusa_heads."): t for n, t in reader.tensors.items()}
    vocab_size, mapped = int(settings.get("vocab_size") or target.model.vocab_size), tensors.pop("token_map", None)
    blocks: dict[int, dict[int, dict[str, Array]]] = {}
    outputs: dict[int, Array] = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            head, layer = (int(match[1]), int(match[2])) if match[1] else (int(match[3]), int(match[4]))
            blocks.setdefault(head, {}).setdefault(layer, {})[match[5]] = tensor
        elif match := _OWN.fullmatch(name):
            outputs[int(match[1] or match[2])] = tensor
        else:
            raise ValueError(f"{path} holds {name}, which no Medusa head has")
    count = int(settings.get("medusa_num_heads", settings.get("num_heads", len(blocks))))
    layers = int(settings.get("medusa_num_layers", settings.get("num_hidden_layers", 1)))
    if sorted(blocks) != list(range(count)) or any(sorted(b) != list(range(layers)) for b in blocks.values()):
        held = {len(b) for b in blocks.values()}
        raise ValueError(
            f"{path} holds {len(blocks)} heads of {' or '.join(map(str, sorted(held))) or 'no'} blocks, and config.json says "
            f"{count} heads of {layers}"
        )
    if shared is None and settings.get("original_lm_head"):
        shared = outputs.get(0)
    if shared is None and outputs and sorted(outputs) != list(range(count)):
        raise ValueError(
            f"{path} has output matrices of the heads {sorted(outputs)}, and config.json says {count} heads"
        )
    every = [shared] if shared is not None else [outputs[i] for i in sorted(outputs)]
    hidden = next((w["weight"].shape[0] for b in blocks.values() for w in b.values()), reader.target_width)
    reader.check_target(vocab_size, hidden)
    ids = _ids(path, mapped, every, vocab_size)
    wanted = (vocab_size if ids is None else len(ids), hidden)
    if wrong := [m.shape for m in every if m.shape != wanted]:
        raise ValueError(f"{path}: an output matrix is {wrong[0]}, and the settings say {wanted}")
    biased = any("bias" in w for b in blocks.values() for w in b.values())
    if biased and settings.get("medusa_fc_bias") is False:
        log.warning("%s has biases and says medusa_fc_bias false; they are used here, and vLLM leaves them out", path)
    heads = [[(b[j]["weight"], b[j].get("bias")) for j in range(layers)] for _, b in sorted(blocks.items())]
    if ids is not None:
        order = ids.argsort()
        ids, every = ids[order], [m[order] for m in every]
    return MedusaWeights(heads, every, ids, vocab_size, float(settings.get("logit_scale") or 1.0))


def _ids(path: Path, mapped: Array | None, outputs: Sequence[Array], vocab_size: int) -> Array | None:
    """The token of each row: `token_map` holds ids, not offsets as the map of EAGLE does."""
    if mapped is None:
        if outputs and len(outputs[0]) < vocab_size:
            raise ValueError(
                f"{path}: the output matrix has {len(outputs[0])} rows for {vocab_size} tokens, and there is no token_map"
            )
        return None
    ids = mapped.astype(np.int64)
    if len(np.unique(ids)) != len(ids) or not len(ids) or not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"{path}: token_map must hold different tokens from 0 to {vocab_size - 1}, the id of each row")
    return ids


class MedusaLattice(Lattice):
    """Levels from the hidden state before the root, which predicted the root. It keeps one state for each sequence."""

    taps = (FINAL_NORM,)

    def __init__(self, head: MedusaWeights, target: LanguageModel, quantization: str = "auto") -> None:
        subset = None if head.token_ids is None else TokenSubset(head.token_ids, head.vocab_size)
        super().__init__(head.vocab_size, len(head.blocks), subset)
        self.model = MedusaModel(head, target, quantization)
        self._states: dict[int, tuple[int, Array]] = {}  # slot -> (position, hidden [hidden])

    def room(self, slot: int, tokens: list[int]) -> int:
        position, _ = self._states.get(slot, (-1, None))
        return self.drafts if position == len(tokens) - 2 >= 0 else 0

    def add(self, slot: int, features: Array, first: int) -> None:
        self._states[slot] = first + len(features) - 1, features[-1].astype(np.float32)

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)

    def resources(self) -> Resources:
        return Resources(self.model)

    def logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Array:
        return self.model.logits(np.stack([self._states[slot][1] for slot in slots]), depth)


class MedusaModel:
    """The heads on packed weights. weight_bytes: that a draft of all depths reads, a share of it for each depth."""

    def __init__(self, head: MedusaWeights, target: LanguageModel, quantization: str) -> None:
        matrices = [a for blocks in head.blocks for a, _ in blocks] + head.outputs
        linears = Linears(precision_of(quantization, matrices))
        self._heads = [[linears([a], [b]) for a, b in blocks] for blocks in head.blocks]
        self._outputs: list[Linear] = [linears([m]) for m in head.outputs] or [target.output_head]
        self._scale = head.logit_scale
        self.weight_bytes = linears.bytes // len(self._heads)

    def logits(self, hidden: Array, depth: int) -> Array:
        """float32 [batch, depth, kept] of states [batch, hidden]."""
        states = list[Array]()
        for blocks in self._heads[:depth]:
            z = hidden
            for block in blocks:
                z = z + silu(block(z))
            states.append(z)
        if len(self._outputs) > 1:
            return np.stack([out(z) for out, z in zip(self._outputs, states, strict=False)], 1) * self._scale
        return self._outputs[0](np.stack(states, 1)) * self._scale


def from_setup(setup: DrafterSetup) -> TreeDrafter[MedusaLattice]:
    target, path = setup.target, head_of(setup.config.model, setup.target.name)
    head, last = read_medusa(path, target), (target.model.num_layers - 1,)

    def made(given: MedusaWeights) -> TreeDrafter[MedusaLattice]:
        return TreeDrafter(MedusaLattice(given, target.model, setup.config.quantization))

    drafter = made(head)
    others: list[Misreading[MedusaLattice]] = [("the last layer before the final norm", last, lambda: made(head))]
    if len(head.blocks) > 1:
        later = replace(head, blocks=head.blocks[1:], outputs=head.outputs[1:] or head.outputs)
        others.append(("the first head for the token that is known already", drafter.taps, lambda: made(later)))
    examine(drafter, others, parallel_survival, target, target.model.max_length, path)
    return drafter
