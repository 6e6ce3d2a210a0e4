"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each head predicts one later token from the last hidden state alone.

Head i gives the logits W_i z of the token i + 2 positions after the state h it reads, where z = h + SiLU(A h + b), for each of
its blocks. W_i is its own, or one matrix serves all heads, for all tokens or for some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.core.types import Commit
from outrider.drafters.base import DraftContext, TargetPass
from outrider.drafters.heads.checks import check_target, log, target_width
from outrider.drafters.heads.files import MEDUSA, HeadFolder, open_head, settings_named
from outrider.drafters.heads.lattice import ParallelDrafter, chains_only
from outrider.drafters.heads.layers import Linear, Linears, precision_of
from outrider.drafters.heads.selftest import examine_parallel
from outrider.drafters.heads.shipped import head_of
from outrider.drafters.method import DrafterSetup
from outrider.models.base import FINAL_NORM, LanguageModel
from outrider.models.load import Loaded

_BLOCK = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.(weight|bias)")
_OWN = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.(\d+)\.weight")


@dataclass(frozen=True, eq=False)
class MedusaWeights:
    """blocks: for each head its blocks, as (A [hidden, hidden], b [hidden] or None). outputs: float [kept, hidden], one for each
    head, or a single one for all; empty for the target's own. token_ids: int64 [kept], ascending; None for all tokens.
    vocab_size: tokens of the target. logit_scale: factor of all logits."""

    blocks: list[list[tuple[Tensor, Tensor | None]]]
    outputs: list[Tensor]
    token_ids: Tensor | None
    vocab_size: int
    logit_scale: float = 1.0


@settings_named
def read_medusa(folder: str | Path | HeadFolder, target: Loaded) -> MedusaWeights:
    """Read the layout of FasterDecoding and TGI, or that of vLLM. Raises ValueError, naming both sides, for what does not fit."""
    opened = folder if isinstance(folder, HeadFolder) else open_head(folder)
    path, given = opened.path, opened.settings
    if opened.kind != MEDUSA:
        raise ValueError(f"{path} is a head of the kind {opened.kind!r}, not {MEDUSA!r}")
    tensors = {n.removeprefix("medusa_heads."): t for n, t in opened.tensors.items()}
    vocab_size = int(given.get("vocab_size") or target.model.vocab_size)
    blocks: dict[int, dict[int, dict[str, Tensor]]] = {}
    outputs: dict[int, Tensor] = {}
    for name in list(tensors):
        if found := _BLOCK.fullmatch(name):
            head, layer = (int(found[1]), int(found[2])) if found[1] else (int(found[3]), int(found[4]))
            blocks.setdefault(head, {}).setdefault(layer, {})[found[5]] = tensors.pop(name)
        elif found := _OWN.fullmatch(name):
            outputs[int(found[1] or found[2])] = tensors.pop(name)
    shared, mapped = tensors.pop("lm_head.weight", None), tensors.pop("token_map", None)
    if tensors:
        raise ValueError(f"{path} holds {min(tensors)}, which no Medusa head has")
    count = int(given.get("medusa_num_heads", given.get("num_heads", len(blocks))))
    layers = int(given.get("medusa_num_layers", given.get("num_hidden_layers", 1)))
    if sorted(blocks) != list(range(count)) or any(sorted(b) != list(range(layers)) for b in blocks.values()):
        held = {len(b) for b in blocks.values()}
        raise ValueError(
            f"{path} holds {len(blocks)} heads of {' or '.join(map(str, sorted(held))) or 'no'} blocks, and config.json says "
            f"{count} heads of {layers}"
        )
    if shared is None and given.get("original_lm_head"):
        shared = outputs.get(0)
    if shared is None and outputs and sorted(outputs) != list(range(count)):
        raise ValueError(
            f"{path} has output matrices of the heads {sorted(outputs)}, and config.json says {count} heads"
        )
    every = [shared] if shared is not None else [outputs[i] for i in sorted(outputs)]
    hidden = next((w["weight"].shape[0] for b in blocks.values() for w in b.values()), target_width(target))
    check_target(path, vocab_size, hidden, opened.verifier, target)
    ids = _ids(path, mapped, every, vocab_size)
    rows = vocab_size if ids is None else len(ids)
    for matrix in every:
        if tuple(matrix.shape) != (rows, hidden):
            raise ValueError(
                f"{path}: an output matrix is {tuple(matrix.shape)}, and the settings say {(rows, hidden)}"
            )
    biased = any("bias" in w for b in blocks.values() for w in b.values())
    if biased and given.get("medusa_fc_bias") is False:
        log.warning("%s has biases and says medusa_fc_bias false; they are used here, and vLLM leaves them out", path)
    made = [[(b[j]["weight"], b[j].get("bias")) for j in range(layers)] for _, b in sorted(blocks.items())]
    if ids is not None:
        every = [m[ids.argsort()] for m in every]
    scale = float(given.get("logit_scale") or 1.0)
    return MedusaWeights(made, every, None if ids is None else ids.sort().values, vocab_size, scale)


def _ids(path: Path, mapped: Tensor | None, outputs: Sequence[Tensor], vocab_size: int) -> Tensor | None:
    """The token of each row: `token_map` holds ids, not offsets as the map of EAGLE does."""
    if mapped is None:
        if outputs and len(outputs[0]) < vocab_size:
            raise ValueError(
                f"{path}: the output matrix has {len(outputs[0])} rows for {vocab_size} tokens, and there is no token_map"
            )
        return None
    ids = mapped.long()
    if len(ids.unique()) != len(ids) or not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"{path}: token_map must hold different tokens from 0 to {vocab_size - 1}, the id of each row")
    return ids


class MedusaDrafter(ParallelDrafter):
    """Drafts from the hidden state before the root, which predicted the root. It keeps one state for each sequence."""

    taps: tuple[int, ...] = (FINAL_NORM,)

    def __init__(self, head: MedusaWeights, target: LanguageModel, quantization: str = "auto") -> None:
        ids = head.token_ids
        subset = None if ids is None else TokenSubset(ids.to(target.device), head.vocab_size)
        super().__init__(head.vocab_size, target.device, subset)
        self.model = MedusaModel(head, target, quantization)
        self._states: dict[int, tuple[int, Tensor]] = {}  # slot -> (position, hidden [hidden])

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        self._states[slot] = first + len(features) - 1, features[-1].float().clone()

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        self.error.learn(context.slots, commits)
        for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
            if commit.features is not None and len(commit.features):
                self._states[slot] = len(tokens) - 2, commit.features[-1].float().clone()

    def release(self, slot: int) -> None:
        self.error.release(slot)
        self._states.pop(slot, None)

    def _depth(self, slot: int, tokens: Sequence[int]) -> int:
        position, _ = self._states.get(slot, (-1, None))
        return len(self.model.heads) if position == len(tokens) - 2 >= 0 else 0

    def _logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Tensor:
        return self.model.logits(torch.stack([self._states[slot][1] for slot in slots]), depth)


class MedusaModel:
    """The heads on packed weights. weight_bytes: that a draft of all depths reads, a share of it for each depth."""

    def __init__(self, head: MedusaWeights, target: LanguageModel, quantization: str) -> None:
        matrices = [a for blocks in head.blocks for a, _ in blocks] + head.outputs
        linears = Linears(target.device, precision_of(quantization, matrices))
        self.heads = [[linears([a], [b]) for a, b in blocks] for blocks in head.blocks]
        self._outputs: list[Linear] = [linears([m]) for m in head.outputs]
        self._target, self._scale = target, head.logit_scale
        self.weight_bytes = linears.bytes // len(self.heads)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """float32 [batch, depth, kept] of states [batch, hidden]."""
        states: list[Tensor] = []
        for blocks in self.heads[:depth]:
            z = hidden
            for block in blocks:
                z = z + F.silu(block(z))
            states.append(z)
        if len(self._outputs) > 1:
            return torch.stack([out(z) for out, z in zip(self._outputs, states, strict=False)], 1) * self._scale
        read = self._outputs[0] if self._outputs else self._target.output_head
        return read(torch.stack(states, 1)) * self._scale


def from_setup(setup: DrafterSetup) -> MedusaDrafter:
    """Raises ValueError for trees that heads of several positions do not draw."""
    chains_only(setup)
    target, path = setup.target, head_of(setup)
    head, last = read_medusa(path, target), (target.model.num_layers - 1,)

    def made(given: MedusaWeights) -> MedusaDrafter:
        return MedusaDrafter(given, target.model, setup.config.quantization)

    drafter = made(head)
    tries: list[tuple[str, tuple[int, ...], Callable[[], MedusaDrafter]]] = []
    tries.append(("the last layer before the final norm", last, partial(made, head)))
    if len(head.blocks) > 1:
        later = replace(head, blocks=head.blocks[1:], outputs=head.outputs[1:] if head.outputs[1:] else head.outputs)
        tries.append(("the first head for the token that is known already", drafter.taps, partial(made, later)))
    examine_parallel(drafter, tries, target.model.max_length, target, path)
    return drafter
