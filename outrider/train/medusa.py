"""Trains Medusa heads: blocks of their own over one output matrix, the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from outrider.drafters.heads.medusa.drafter import MedusaModule
from outrider.drafters.heads.medusa.files import MedusaWeights, write_medusa
from outrider.train.method import Beginning, DraftedToken, TrainedHead
from outrider.train.teacher import Taught, Teacher

HEADS, BLOCKS = 4, 1


class TrainedMedusa(TrainedHead):
    """Medusa heads. Head k predicts the token after k that the text has not shown yet, so later ones are right less often."""

    module: MedusaModule

    def __init__(self, given: MedusaWeights, start: Beginning) -> None:
        teacher = Teacher(start.loaded, ())
        ids = torch.arange(teacher.vocab_size) if given.token_ids is None else given.token_ids
        rows = torch.empty(0) if given.outputs else teacher.output().cpu()
        super().__init__(MedusaModule(given, rows), teacher, ids, len(given.blocks))
        self._verifier = start.verifier

    def drafts(self, tokens: Tensor, taught: Taught, anchors: Tensor) -> Iterator[DraftedToken]:
        hidden = taught.last.gather(1, anchors[..., None].expand(-1, -1, taught.last.shape[-1]))
        for head in range(self.depth):
            yield DraftedToken(self.module.logits(hidden, head))

    def write(self, folder: Path) -> None:
        made = self.module.weights()
        write_medusa(folder, made, "vllm" if made.outputs else "tgi", verifier=self._verifier)


def new_medusa(start: Beginning) -> TrainedMedusa:
    """Heads that say at first what the target would say next (the paper's beginning: all blocks are zero)."""
    teacher = Teacher(start.loaded, ())
    size, ids = teacher.hidden, start.token_ids
    blocks = [[(torch.zeros(size, size), torch.zeros(size)) for _ in range(BLOCKS)] for _ in range(HEADS)]
    kept = None if len(ids) == teacher.vocab_size else ids
    given = MedusaWeights(blocks, [teacher.output(ids).cpu()], kept, teacher.vocab_size, teacher.scale)  # pyright: ignore
    return TrainedMedusa(given, start)
