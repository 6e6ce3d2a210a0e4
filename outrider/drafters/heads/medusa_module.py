"""Medusa heads in plain torch: what is trained, and the slow twin of the drafter on packed weights."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from outrider.drafters.heads.medusa import MedusaWeights


class MedusaModule(nn.Module):
    """Medusa heads (Cai et al. 2024, arXiv 2401.10774). The blocks are trained; the output matrices stay as they are.

    given: the heads to begin with. rows: float [kept, hidden], the target's output rows, for heads without any of their own.
    """

    def __init__(self, given: MedusaWeights, rows: Tensor) -> None:
        super().__init__()
        self._given = given
        self.blocks = nn.ModuleList()
        for blocks in given.blocks:
            own = nn.ModuleList()
            for weight, bias in blocks:
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
                linear.load_state_dict({"weight": weight.float()} | ({} if bias is None else {"bias": bias.float()}))
                own.append(linear)
            self.blocks.append(own)
        outputs = given.outputs or [rows]
        self.outputs = nn.ParameterList([nn.Parameter(m.float(), requires_grad=False) for m in outputs])

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """[..., kept] of states [..., hidden], which the target's output head reads."""
        z = hidden
        blocks = self.blocks[head]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            z = z + F.silu(block(z))
        return (z @ self.outputs[min(head, len(self.outputs) - 1)].T) * self._given.logit_scale

    def weights(self) -> MedusaWeights:
        """The heads as they are now, float32."""
        made = [
            [(b.weight.detach().cpu(), None if b.bias is None else b.bias.detach().cpu()) for b in blocks]  # pyright: ignore
            for blocks in self.blocks  # pyright: ignore[reportGeneralTypeIssues]
        ]
        given = self._given
        return MedusaWeights(made, given.outputs, given.token_ids, given.vocab_size, given.logit_scale)
