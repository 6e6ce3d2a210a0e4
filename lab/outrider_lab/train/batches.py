"""Which texts a training step reads, at which positions it learns, and which tokens a head can propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider_lab.train.answers import TrainingText


class Batch(NamedTuple):
    """tokens: int64 [batch, n], with zeros after a text. starts, ends: of each text: its first answer token, its number of
    tokens."""

    tokens: Tensor
    starts: list[int]
    ends: list[int]

    @property
    def size(self) -> int:
        """Tokens of the texts."""
        return sum(self.ends)


class Anchors(NamedTuple):
    """Positions to learn at. at: int64 [batch, anchor]. valid: bool [batch, anchor]; the others fill the row."""

    at: Tensor
    valid: Tensor


def batch_of(answers: Sequence[TrainingText]) -> Batch:
    """The texts as one batch."""
    ends = [len(a.tokens) for a in answers]
    tokens = torch.zeros(len(ends), max(ends), dtype=torch.int64)
    for row, answer in zip(tokens, answers, strict=True):
        row[: len(answer.tokens)] = torch.tensor(answer.tokens)
    return Batch(tokens, [a.start for a in answers], ends)


def epoch(lengths: Sequence[int], tokens: int, seed: int, number: int) -> list[list[int]]:
    """The batches of one pass: indices of texts. Every text once, in an order of its own for each pass.

    lengths: tokens of each text. tokens: of a batch with its filling, at most (at least one text). Texts of nearly the same
    length come together, so that little is filled.
    """
    random = np.random.default_rng([seed, number])
    order, batches = random.permutation(len(lengths)), list[list[int]]()
    pool = 16 * max(1, tokens // max(lengths))
    for first in range(0, len(order), pool):
        batch: list[int] = []
        for i in sorted(order[first : first + pool].tolist(), key=lambda i: lengths[i]):
            if batch and (len(batch) + 1) * lengths[i] > tokens:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
    return [batches[i] for i in random.permutation(len(batches))]


def positions(batch: Batch, steps: int) -> list[range]:
    """Where drafts of `steps` tokens can start in each text: t such that token t + 2 is of the answer, and all t + 1 + steps
    exist."""
    return [
        range(max(start - 2, 0), max(end - 1 - steps, 0)) for start, end in zip(batch.starts, batch.ends, strict=True)
    ]


def draw_anchors(batch: Batch, steps: int, share: float, generator: torch.Generator) -> Anchors:
    """A random share of the possible positions of each text, one at least. Raises ValueError for a text that has none."""
    drawn: list[Tensor] = []
    for places in positions(batch, steps):
        if not places:
            raise ValueError(f"a text has no position from which {steps} tokens can be drafted; leave it out")
        shuffled = torch.randperm(len(places), generator=generator)[: max(1, round(share * len(places)))]
        drawn.append(shuffled.sort().values + places.start)
    width = max(map(len, drawn))
    at, valid = torch.zeros(len(drawn), width, dtype=torch.int64), torch.zeros(len(drawn), width, dtype=torch.bool)
    for row, mark, places in zip(at, valid, drawn, strict=True):
        row[: len(places)], mark[: len(places)] = places, True
    return Anchors(at, valid)


def count_tokens(answers: Sequence[TrainingText], size: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
    """The draft vocabulary, int64 [size] ascending: the most frequent tokens of the answers, then the lowest ids.

    always: tokens that are kept, such as those that end a text. Returns all tokens if size is 0 or vocab_size or more.
    """
    if not 0 < size < vocab_size:
        return torch.arange(vocab_size)
    counts = Counter(t for a in answers for t in a.tokens[a.start :])
    ordered = dict.fromkeys([*always, *(t for t, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])))])
    ids = list(ordered)[:size]
    ids += [t for t in range(size) if t not in ordered][: size - len(ids)]
    return torch.tensor(sorted(ids))
