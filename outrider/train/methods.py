"""The kinds of heads that are trained: how each begins, and how one that exists goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.heads.block.files import read_block
from outrider.drafters.heads.eagle.files import read_eagle
from outrider.drafters.heads.files import DFLASH, DSPARK, EAGLE3, MEDUSA, open_head
from outrider.drafters.heads.medusa.drafter import MedusaModule
from outrider.drafters.heads.medusa.files import MedusaWeights, read_medusa, write_medusa
from outrider.models.load import Loaded
from outrider.train.block import continued_block, new_block
from outrider.train.eagle import continued_eagle, new_eagle
from outrider.train.method import Beginning, DraftedToken, TrainedHead
from outrider.train.teacher import Taught, Teacher

HEADS, BLOCKS = 4, 1  # of Medusa


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


@dataclass(frozen=True)
class _Kind:
    """read: a folder, for a target. new, going_on: a head in training."""

    read: Callable[..., Any]
    new: Callable[[Beginning], TrainedHead]
    going_on: Callable[..., TrainedHead]


_BLOCK = _Kind(read_block, new_block, continued_block)
METHODS = {
    EAGLE3: _Kind(read_eagle, new_eagle, continued_eagle),
    MEDUSA: _Kind(read_medusa, new_medusa, TrainedMedusa),
    DFLASH: _BLOCK,
    DSPARK: _BLOCK,
}


def head_to_begin_with(method: str, folder: str, target: Loaded) -> Any:
    """The head of a folder. Raises ValueError for one that is damaged, of another kind, or of another target."""
    opened = open_head(folder)
    if opened.kind != method:
        raise ValueError(
            f"{opened.path} is a head of the kind {opened.kind!r}, and this run trains {method!r}; write: outrider train "
            f"{opened.kind if opened.kind in METHODS else EAGLE3}, or leave out --from"
        )
    return METHODS[method].read(opened, target)


def start_head(start: Beginning, given: Any = None) -> TrainedHead:
    """A new head, or `given` in training. Raises ValueError for a target that cannot teach one."""
    kind = METHODS[start.method]
    if given is None:
        return kind.new(start)
    ids = torch.arange(start.loaded.model.vocab_size) if given.token_ids is None else given.token_ids
    return kind.going_on(given, replace(start, token_ids=ids))
