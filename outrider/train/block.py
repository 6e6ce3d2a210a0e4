"""Trains block drafters: DFlash, and DSpark with its Markov bias and its confidence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.heads.block.files import write_block
from outrider.drafters.heads.block.module import BlockConfig, BlockModule
from outrider.drafters.heads.reading import HeadWeights
from outrider.train.answers import TrainingText
from outrider.train.method import Beginning, DraftedToken, TrainedHead
from outrider.train.teacher import Taught, Teacher

LAYERS, DRAFTS = 2, 6  # on a processor a block of six costs hardly more than one token, and few texts reach a seventh
MARKOV = 64, 256  # least and most numbers of the bias by a token; in between, a quarter of the hidden size


class TrainedBlock(TrainedHead):
    """A block drafter, with its blocks at anchors of a text. Weights of later tokens as in DeepSpec."""

    module: BlockModule
    decay = math.exp(-1 / 4)
    share = 0.125  # a block has as many output rows as it has drafts

    def __init__(self, module: BlockModule, teacher: Teacher, stored: HeadWeights[BlockConfig] | None = None) -> None:
        super().__init__(module, teacher, module.token_ids, module.config.drafts)
        self._stored = stored

    def drafts(self, tokens: Tensor, taught: Taught, anchors: Tensor) -> Iterator[DraftedToken]:
        for logits, sure in self.module.drafts(tokens, taught.features, anchors):
            yield DraftedToken(logits, sure)

    def write(self, folder: Path) -> None:
        write_block(folder, self.module.weights(self._stored))

    def kept(self) -> dict[str, Any]:
        return {"mask_token_id": self.module.config.mask_token_id}


def new_block(start: Beginning) -> TrainedBlock:
    """A drafter of two layers whose draft tokens are random at first. The method says whether it is a DSpark one."""
    loaded, ids, dspark = start.loaded, start.token_ids, start.method == "dspark"
    if start.kept is None:
        mask = mask_token(start.answers, loaded.model.vocab_size, loaded.tokenizer, loaded.end_ids)
    else:
        mask = int(start.kept["mask_token_id"])
    least, most, width = *MARKOV, loaded.config.get_text_config().hidden_size
    config = BlockConfig.for_target(
        loaded.config,
        draft_vocab_size=len(ids),
        verifier=start.verifier,
        num_layers=LAYERS,
        block_size=DRAFTS if dspark else DRAFTS + 1,
        mask_token_id=mask,
        from_anchor=dspark,
        markov_rank=min(most, max(least, width // 4)) if dspark else 0,
        confidence=dspark,
        confidence_markov=dspark,
    )
    teacher = Teacher(loaded, config.taps)
    torch.manual_seed(start.seed)
    output = teacher.output(ids).cpu()
    module = BlockModule(config, ids, teacher.embedding().cpu(), output).initialise_()
    return TrainedBlock(module, teacher)


def continued_block(given: HeadWeights[BlockConfig], start: Beginning) -> TrainedBlock:
    """A drafter that was read. Raises ValueError for one with an embedding of its own, which could not be written."""
    if "embed_tokens.weight" in given.tensors:
        raise ValueError("a drafter with an embedding of its own is not trained here; leave out --from")
    teacher = Teacher(start.loaded, given.config.taps)
    output = teacher.output(given.token_ids).cpu()
    return TrainedBlock(BlockModule.of(given, teacher.embedding().cpu(), output), teacher, given)


def mask_token(answers: Sequence[TrainingText], vocab_size: int, tokenizer: Any, ends: Sequence[int] = ()) -> int:
    """The token of a block's open places: one with an embedding that no text uses.

    That is a row beyond the tokenizer's tokens if there is one. Else it is a special token that no answer holds, else the
    highest token that no answer holds, else the rarest one.
    """
    if tokenizer is not None and len(tokenizer) < vocab_size:
        return vocab_size - 1
    counts = Counter(t for a in answers for t in a.tokens)
    special = [] if tokenizer is None else sorted(tokenizer.all_special_ids)
    unused = [t for t in [*range(vocab_size), *special] if not counts[t] and t not in ends]
    return unused[-1] if unused else min(range(vocab_size), key=lambda t: (counts[t], -t))
