"""What the loop asks of a model: a forward over the nodes of a tree, and a cache that can keep a path."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.models.cache import SlotCache

Want = Literal["all", "last", "none"]


class Output(NamedTuple):
    """logits: float32 [batch, node, vocab] ("last": one node, the row's last real one; "none": no node).
    features: [batch, node, feature], the tapped hidden states side by side, or None without taps."""

    logits: Tensor
    features: Tensor | None


class LanguageModel(Protocol):
    """A causal language model over a slot cache. Row n of the logits is the law of the token after node n."""

    vocab_size: int
    max_length: int
    device: torch.device
    batch_invariant: (
        bool  # are a row's logits, bit for bit, those of decoding it alone? Then match gives plain decoding's tokens
    )

    def new_cache(self, rows: int, max_length: int) -> SlotCache: ...

    def forward(
        self,
        tokens: Tensor,
        cache: SlotCache,
        rows: list[int],
        *,
        parents: Tensor | None = None,
        taps: tuple[int, ...] = (),
        want: Want = "all",
    ) -> Output:
        """tokens: int64 [batch, node]. parents: int64 [batch, node] (root -1, padding -2), None for a full chain.
        Positions and mask follow from `cache.length` and `parents`. Writes the nodes' keys and values to the scratch
        of each row, slot `length + node`, and never changes `cache.length`.

        If `parents` is longer than `tokens`, its first nodes stand in the scratch already, from an earlier call of the
        same step, and `tokens` are the nodes after them: so a tree is drafted level by level. Padding may then stand
        anywhere. Logits and features are those of the given nodes.

        On the CPU torch has one thread during a step (`native.one_torch_thread`); a forward that is torch's own work and
        wants more sets them for its time."""
        ...
