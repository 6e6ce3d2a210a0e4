"""A language model that fits on a page: the logits of the next token come from a table over the last few tokens, in float64.

It stores the tokens themselves in the slot cache and reads its context from there. So a wrong commit, a wrong position or a
rejected node left in the cache changes its output. For tests, docs and explaining; exact on every machine.
"""

from __future__ import annotations

import numpy as np

from outrider.models.base import LanguageModel, Output, Want
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes


class ToyModel(LanguageModel):
    """logits(context) = table[hash of the last `order` tokens].

    error: how much of another table is added. A model with the same seed and an error is a draft model for this one.
    """

    def __init__(
        self, vocab_size: int = 11, order: int = 3, seed: int = 0, *, error: float = 0.0, max_length: int = 512
    ) -> None:
        self.vocab_size, self.order, self.max_length = vocab_size, order, max_length
        self.device = "cpu"
        self.batch_invariant = True
        self.table = 2.0 * np.random.default_rng(seed).standard_normal((997, vocab_size))
        if error:
            self.table += error * np.random.default_rng(seed + 1).standard_normal((997, vocab_size))

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, max_length)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`. Every tap is the same feature: the index of the table's line."""
        nodes.cache.reserve(nodes.slots, nodes.total)
        stored, _ = nodes.cache.layer(0, (1, 1), (1, 1), np.float64)
        for b, (slot, length) in enumerate(zip(nodes.slots, nodes.lengths, strict=True)):
            stored[slot, 0, length + nodes.held : length + nodes.total, 0] = nodes.tokens[b]
        lines = np.zeros(nodes.tokens.shape, np.int64)
        for b, slot in enumerate(nodes.slots):
            for n, cells in enumerate(nodes.visible_cells[b]):
                line = 0
                for token in stored[slot, 0, cells[-self.order :], 0].tolist():
                    line = (line * 31 + int(token) + 1) % len(self.table)
                lines[b, n] = line
        logits = self.table[lines].astype(np.float32)
        if want == "none":
            logits = logits[:, :0]
        elif want == "last":
            logits = logits[range(len(nodes.slots)), nodes.last][:, None]
        features = np.tile(lines[..., None].astype(np.float32), len(taps)) if taps else None
        return Output(logits, features)
