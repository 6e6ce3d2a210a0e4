"""Trains heads of EAGLE-3 and EAGLE-3.1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from outrider.drafters.heads.eagle.files import write_eagle
from outrider.drafters.heads.eagle.module import Eagle, EagleConfig
from outrider.drafters.heads.reading import HeadWeights
from outrider.train.batches import batch_of
from outrider.train.beginning import continued_head, new_head
from outrider.train.method import Beginning, DraftedToken, TrainedHead
from outrider.train.teacher import Taught, Teacher
from outrider.train.unroll import unrolled

STEPS = 4  # of the unroll; drafts on a CPU are seldom longer


class TrainedEagle(TrainedHead):
    """An EAGLE-3 head, unrolled over its own states."""

    module: Eagle

    def __init__(self, module: Eagle, teacher: Teacher, token_ids: Tensor, *, own_embedding: bool = False) -> None:
        super().__init__(module, teacher, token_ids, STEPS)
        self._own_embedding = own_embedding

    def drafts(self, tokens: Tensor, taught: Taught, anchors: Tensor) -> Iterator[DraftedToken]:
        return map(DraftedToken, unrolled(self.module, tokens, taught.features, anchors, self.depth))

    def write(self, folder: Path) -> None:
        write_eagle(folder, self.module, embedding=self._own_embedding)


def new_eagle(start: Beginning) -> TrainedEagle:
    """An EAGLE-3.1 head that begins as its target's last layer."""
    loaded, ids = start.loaded, start.token_ids
    config = EagleConfig.for_target(
        loaded.config, draft_vocab_size=len(ids), fc_norm=True, norm_output=True, verifier=start.verifier
    )
    teacher = Teacher(loaded, config.taps)
    head = new_head(loaded, teacher, config, ids, start.seed, batch_of(start.answers[:4]).tokens)
    return TrainedEagle(head, teacher, ids)


def continued_eagle(given: HeadWeights[EagleConfig], start: Beginning) -> TrainedEagle:
    """A head that was read. Raises ValueError for one of EAGLE-1."""
    teacher = Teacher(start.loaded, given.config.taps)
    head = continued_head(given, teacher)
    return TrainedEagle(head, teacher, given.token_ids, own_embedding=given.own_embedding is not None)
