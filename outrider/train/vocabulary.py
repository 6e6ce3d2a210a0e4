"""The tokens that a head can propose, and the one that stands for a token which is not known yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.train.answers import TrainingText


def count_tokens(answers: Sequence[TrainingText], size: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
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
