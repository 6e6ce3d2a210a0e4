"""Targets whose text is known in advance. They show what a drafter's tokens are worth along that text.

With the verifier `match` the text does not depend on the drafts. After plain decoding has written it once, most drafters can
be judged without the target's forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.tree import depth
from outrider.models.base import LanguageModel, Output, Want
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes

# Added to a logit, so that no other token can win.
_CERTAIN = 1e4


class KnownTextTarget(LanguageModel):
    """Writes `text` (prompt and answer) and computes nothing. For one sequence.

    The logit of the known next token is far above all others at each node. After a wrong draft token the logits do not matter.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.text = list[int]()
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.device, self.batch_invariant = torch.device("cpu"), True

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, max_length)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`. No features; logits of all nodes of a step, or of none."""
        if want == "none" or nodes.parents is None:
            return Output(torch.zeros(1, 0, self.vocab_size), None)
        logits = torch.zeros(1, nodes.count, self.vocab_size)
        force_text(logits, nodes.parents, nodes.lengths, self.text)
        return Output(logits, None)


def force_text(logits: Tensor, parents: Tensor, lengths: Sequence[int], text: Sequence[int]) -> None:
    """Change logits in place, so that the next token of `text` is certain at each node. The depth of the node decides which
    token is next.

    logits: float [batch, node, vocab]. parents: int [batch, node]. lengths: committed tokens of each sequence.
    """
    for b, levels in enumerate(depth(parents).tolist()):
        for n, level in enumerate(levels):
            at = lengths[b] + level + 1
            if at < len(text):
                logits[b, n, text[at]] += _CERTAIN
