"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each head predicts one later token from the last hidden state alone.

Head i gives the logits W_i z of the token i + 2 positions after the state h that it reads. Each of its blocks makes
z = h + SiLU(A h + b). W_i is its own, or one matrix serves all heads, for all tokens or for some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from outrider.core.sampling import TokenSubset
from outrider.drafters.base import Resources
from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.files import head_of
from outrider.drafters.heads.lattice import Lattice
from outrider.drafters.heads.layers import Linear, Linears, precision_of
from outrider.drafters.heads.medusa.files import MedusaWeights, read_medusa
from outrider.drafters.heads.selftest import Misreading, examine, parallel_survival
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.base import FINAL_NORM, LanguageModel


class MedusaLattice(Lattice):
    """Levels from the hidden state before the root, which predicted the root. It keeps one state for each sequence."""

    taps = (FINAL_NORM,)

    def __init__(self, head: MedusaWeights, target: LanguageModel, quantization: str = "auto") -> None:
        ids = head.token_ids
        subset = None if ids is None else TokenSubset(ids.to(target.device), head.vocab_size)
        super().__init__(head.vocab_size, target.device, len(head.blocks), subset)
        self.model = MedusaModel(head, target, quantization)
        self._states: dict[int, tuple[int, Tensor]] = {}  # slot -> (position, hidden [hidden])

    def room(self, slot: int, tokens: list[int]) -> int:
        position, _ = self._states.get(slot, (-1, None))
        return self.drafts if position == len(tokens) - 2 >= 0 else 0

    def add(self, slot: int, features: Tensor, first: int) -> None:
        self._states[slot] = first + len(features) - 1, features[-1].float().clone()

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)

    def resources(self) -> Resources:
        return Resources(self.model)

    def logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Tensor:
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
        states = [read_by(blocks, hidden) for blocks in self.heads[:depth]]
        if len(self._outputs) > 1:
            return torch.stack([out(z) for out, z in zip(self._outputs, states, strict=False)], 1) * self._scale
        read = self._outputs[0] if self._outputs else self._target.output_head
        return read(torch.stack(states, 1)) * self._scale


class MedusaModule(nn.Module):
    """The heads in plain torch, to be trained, and the slow twin of `MedusaModel`. The output matrices stay as they are.

    given: the heads to begin with. rows: float [kept, hidden], the target's output rows, for heads without any of their own.
    """

    def __init__(self, given: MedusaWeights, rows: Tensor) -> None:
        super().__init__()
        self._given = given
        self.blocks = nn.ModuleList(nn.ModuleList(_linear(*block) for block in blocks) for blocks in given.blocks)
        outputs = given.outputs or [rows]
        self.outputs = nn.ParameterList([nn.Parameter(m.float(), requires_grad=False) for m in outputs])

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """[..., kept] of states [..., hidden], which the target's output head reads."""
        z = read_by([*self.blocks[head]], hidden)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        return (z @ self.outputs[min(head, len(self.outputs) - 1)].T) * self._given.logit_scale

    def weights(self) -> MedusaWeights:
        """The heads as they are now, float32."""
        trained = [
            [(b.weight.detach().cpu(), None if b.bias is None else b.bias.detach().cpu()) for b in blocks]  # pyright: ignore
            for blocks in self.blocks  # pyright: ignore[reportGeneralTypeIssues]
        ]
        return replace(self._given, blocks=trained)


def read_by(blocks: Sequence[Linear], hidden: Tensor) -> Tensor:
    """What the output matrix of a head reads, of states [..., hidden]."""
    for block in blocks:
        hidden = hidden + F.silu(block(hidden))
    return hidden


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.load_state_dict({"weight": weight.float()} | ({} if bias is None else {"bias": bias.float()}))
    return linear


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
