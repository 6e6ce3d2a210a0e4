"""What is trained of an EAGLE-3 head, the tokens that it can propose, and its loss on a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.drafters.heads.eagle_module import Eagle
from outrider.train.answers import Answer
from outrider.train.batches import Anchors, Batch
from outrider.train.losses import divergence
from outrider.train.teacher import Taught, Teacher
from outrider.train.unroll import unrolled

STEPS = 4  # of the unroll; drafts on a CPU are seldom longer
DECAY = 0.8  # weight of a step, relative to the one before


def count_tokens(answers: Sequence[Answer], size: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
    """The draft vocabulary, int64 [size] ascending: the most frequent tokens of the answers, then the lowest ids.

    always: tokens that are kept, such as those that end a text. Returns all tokens if size is 0 or vocab_size or more.
    """
    if not 0 < size < vocab_size:
        return torch.arange(vocab_size)
    counts = Counter(t for a in answers for t in a.tokens[a.start :])
    kept = dict.fromkeys([*always, *(t for t, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])))])
    ids = list(kept)[:size]
    ids += [t for t in range(size) if t not in kept][: size - len(ids)]
    return torch.tensor(sorted(ids))


def split(head: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices, the rest) of what is trained. Embedding and output head are the target's and stay as they are."""
    trained = [p for p in head.parameters() if p.requires_grad]
    return [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]


def loss_of(
    head: Eagle, teacher: Teacher, rows: Tensor, batch: Batch, taught: Taught, anchors: Anchors, weight: float
) -> tuple[Tensor, list[float]]:
    """(loss, acceptance of each step) on a batch. The acceptance is 1 - TV over the draft vocabulary, at temperature 1.

    rows: [draft_vocab, hidden], the target's output head. weight: of the total variation in the loss. The teacher is the
    target's distribution over the draft vocabulary, renormalised.
    """
    device = taught.last.device
    tokens, at, valid = batch.tokens.to(device), anchors.at.to(device), anchors.valid.to(device)
    total, accepted = torch.zeros((), device=device), list[float]()
    scale = sum(DECAY**k for k in range(STEPS)) * valid.sum()
    for step, logits in enumerate(unrolled(head, tokens, taught.features, at, STEPS)):
        with torch.no_grad():
            places = (at + 1 + step)[..., None].expand(-1, -1, taught.last.shape[-1])
            target = teacher.logits(taught.last.gather(1, places), rows)
        loss, _, tv = divergence(target, logits, weight)
        total = total + DECAY**step * (loss * valid).sum()
        accepted.append(float(1 - (tv * valid).sum() / valid.sum()))
    return total / scale, accepted
