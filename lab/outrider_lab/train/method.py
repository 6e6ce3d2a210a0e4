"""What the trainer asks of a kind of head, and the loss that all kinds share.

All heads draft along a text in one way. At an anchor t the features end at position t, and the token t + 1 is known. Draft
token k stands for the token t + 2 + k.

The loss is the distance of a draft's distribution from the target's. At temperature 1 the acceptance is the mean of
sum(min(p, q)), which is one minus the total variation. The forward KL divergence leads in: it still pulls where the two
distributions hardly overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from outrider.models.load import Loaded
from outrider_lab.train.answers import TrainingText
from outrider_lab.train.batches import Anchors, Batch
from outrider_lab.train.teacher import Taught, Teacher

DECAY = 0.8  # weight of a draft token in the loss, relative to the one before
CONFIDENCE = 0.5  # weight of the confidence in the loss


@dataclass(frozen=True)
class Beginning:
    """What a head is made of."""

    loaded: Loaded
    method: str  # its kind
    seed: int
    answers: Sequence[TrainingText]  # the texts that train it
    token_ids: Tensor  # its draft vocabulary, int64 ascending
    verifier: str  # the target's name
    decisions: dict[str, Any] | None = None  # those of `TrainedHead` before the run was stopped; None in a new run
    intermediate_size: int = 0  # of the MLP of a new EAGLE head; 0 for the target's


class TrainedHead:
    """A head in training. Write `drafts` and `write`."""

    decay = DECAY
    share = 0.5  # of the positions of a text that a step learns at

    def __init__(self, module: nn.Module, teacher: Teacher, token_ids: Tensor, depth: int) -> None:
        """
        Args:
            module: Its parameters.
            teacher: Its target.
            token_ids: int64 [draft_vocab], the token of each row of its logits.
            depth: Draft tokens that it learns.
        """
        self.module, self.teacher, self.depth = module.to(teacher.device), teacher, depth
        self.token_ids = token_ids.to(teacher.device)

    def drafts(self, tokens: Tensor, taught: Taught, anchors: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The draft tokens in order, each after the text's own tokens before it: (logits, confidence).

        Logits are [batch, anchor, draft_vocab]. A confidence is [batch, anchor], before its sigmoid; None without one.

        Args:
            tokens: int64 [batch, n].
            taught: What the target says of them.
            anchors: int64 [batch, anchor], n - 2 - depth at most.
        """
        raise NotImplementedError

    def write(self, folder: Path) -> None:
        """Write the head as it is now, for its users."""
        raise NotImplementedError

    def decisions(self) -> dict[str, Any]:
        """What was decided at the beginning and must stay when the run goes on; plain values."""
        return {}

    def split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(hidden matrices, the rest) of what is trained. Tables of tokens, norms, biases and the confidence are the rest."""
        trained = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        hidden = [p.dim() == 2 and not n.startswith(("markov_head.", "confidence_head.")) for n, p in trained]
        return tuple([p for (_, p), h in zip(trained, hidden, strict=True) if h is want] for want in (True, False))  # pyright: ignore


class _Divergence(torch.autograd.Function):
    """(1 - weight) KL(p || q) + weight TV(p, q), with the gradient in closed form: one pass over the logits in place of a
    dozen."""

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
        log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
        p, q = log_p.exp(), log_q.exp()
        kl = (p * (log_p - log_q)).sum(-1)
        above = (p > q).float()
        tv = ((p - q) * above).sum(-1)
        shared = (q * above).sum(-1, keepdim=True)
        gradient = (1 - weight) * (q - p) + weight * q * (shared - above)
        ctx.save_for_backward(gradient.to(draft.dtype))
        ctx.mark_non_differentiable(kl, tv)
        return (1 - weight) * kl + weight * tv, kl, tv

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][..., None].to(gradient.dtype), None, None


def divergence(target_logits: Tensor, draft_logits: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, KL divergence, total variation) of each position, float32 [...].

    target_logits, draft_logits: [..., vocab] over the same tokens; each is a whole distribution. weight: of the total
    variation, 0 to 1. Only the loss has a gradient, and only towards draft_logits.
    """
    return _Divergence.apply(draft_logits, target_logits, weight)  # pyright: ignore[reportReturnType]


def loss_of(
    head: TrainedHead, rows: Tensor, batch: Batch, taught: Taught, anchors: Anchors, weight: float
) -> tuple[Tensor, Tensor]:
    """(loss, acceptance of each draft token) on a batch, both on its device. The acceptance is 1 - TV over the draft vocabulary,
    at temperature 1.

    rows: [draft_vocab, hidden], the target's output head. weight: of the total variation in the loss. The teacher is the
    target's distribution over the draft vocabulary, renormalised. A confidence learns the acceptance.
    """
    device = taught.last.device
    tokens, at, valid = batch.tokens.to(device), anchors.at.to(device), anchors.valid.to(device)
    total, accepted = torch.zeros((), device=device), list[Tensor]()
    scale = sum(head.decay**k for k in range(head.depth)) * valid.sum()
    for step, (logits, confidence) in enumerate(head.drafts(tokens, taught, at)):
        with torch.no_grad():
            places = (at + 1 + step)[..., None].expand(-1, -1, taught.last.shape[-1])
            target = head.teacher.logits(taught.last.gather(1, places), rows)
        loss, _, tv = divergence(target, logits, weight)
        if confidence is not None:
            sure = F.binary_cross_entropy_with_logits(confidence.float(), 1 - tv.detach(), reduction="none")
            loss = loss + CONFIDENCE * sure
        total = total + head.decay**step * (loss * valid).sum()
        accepted.append(1 - (tv * valid).sum() / valid.sum())
    return total / scale, torch.stack(accepted)
