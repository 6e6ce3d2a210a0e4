"""The tokens that a draft model's output head keeps: the most frequent ones (FR-Spec, Zhao et al. 2025, arXiv 2502.14856).

A token outside has probability 0 in the draft, so every verifier stays exact. The price is acceptance where the text has such a
token. A token's frequency is estimated from its id, from the prompts of this package and from the user's texts. The ids of a
tokenizer follow the order of its merges or scores. So a low id means a frequent token where the tokenizer was trained.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.lookup.documents import Entry, read_texts
from outrider.drafters.model.vocabulary import Vocabulary

PROMPTS = Path(__file__).resolve().parents[2] / "data" / "prompts"
_ZIPF = 1000  # the prior probability of id n is proportional to 1 / (n + this); fitted to real tokenizers' texts


def draft_vocab(
    size: int,
    vocab_size: int,
    tokenizer: Any | None,
    end_ids: Sequence[int] = (),
    corpus: Entry | Sequence[Entry] | None = None,
) -> Tensor | None:
    """The tokens to keep, int64 [n] ascending, about `size` of them. None if that is the whole vocabulary.

    Special tokens, end tokens and tokens of single bytes are always among them. corpus: texts like the answers, as for the
    method suffix. Without a tokenizer only the ids count. Raises ValueError for a corpus that cannot be read.
    """
    if size >= vocab_size:
        return None
    score = 1.0 / (torch.arange(vocab_size, dtype=torch.float64) + _ZIPF)
    score /= score.sum()
    always = [i for i in end_ids if i < vocab_size]
    if tokenizer is not None:
        for counts in (token_counts(PROMPTS, tokenizer, vocab_size), token_counts(corpus, tokenizer, vocab_size)):
            score += counts / counts.sum().clamp_min(1)
        known = Vocabulary(tokenizer, vocab_size)
        none = [i for i, piece in enumerate(known.pieces) if piece is None]
        score[none] = -1.0  # unused ids; special tokens come back below
        always += [i for i, piece in enumerate(known.pieces) if piece is not None and len(piece) == 1]
        always += [*known.names.values(), *(i for i in tokenizer.added_tokens_decoder if i < vocab_size)]
    elif corpus is not None:
        score += token_counts(corpus, None, vocab_size)
    score[always] = torch.inf
    kept = max(size, len(set(always)))
    return score.argsort(descending=True, stable=True)[:kept].sort().values


def token_map(path: str | Path, vocab_size: int) -> Tensor:
    """The tokens of a saved map, int64 [n] ascending: a list or tensor of ids that torch.save wrote, as SGLang's
    speculative_token_map. Raises ValueError for another file, and for ids that are not in the vocabulary."""
    try:
        ids = torch.as_tensor(torch.load(path, weights_only=True), dtype=torch.int64).flatten().unique()
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r} for speculative_token_map") from None
    except (
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
        EOFError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(
            f"{str(path)!r} is no token map that torch.load can read; write one with torch.save([...token ids...], {str(path)!r})"
        ) from error
    if not len(ids) or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        what = f"ids from {int(ids[0])} to {int(ids[-1])}" if len(ids) else "no ids"
        raise ValueError(f"the token map {str(path)!r} holds {what}; the draft model has tokens 0 to {vocab_size - 1}")
    return ids


def token_counts(corpus: Entry | Sequence[Entry] | None, tokenizer: Any | None, vocab_size: int) -> Tensor:
    """float64 [vocab]: how often each token is in the texts. Raises ValueError for what cannot be read."""
    counts = np.zeros(vocab_size)
    for _, ids in read_texts([] if corpus is None else corpus, tokenizer, vocab_size):
        counts += np.bincount(np.array(ids, dtype=np.int64), minlength=vocab_size)
    return torch.from_numpy(counts)
