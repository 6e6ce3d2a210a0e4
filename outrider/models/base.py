"""What the loop asks of a model: a forward over the nodes of a tree, and a cache that can keep a path."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes

Want = Literal["all", "last", "none"]


class Output(NamedTuple):
    """What a forward gives.

    logits: float32 [batch, node, vocab]. Of all new nodes ("all"), of the last one of each tree ("last": node = 1), or
    of no node ("none": node = 0).
    features: [batch, node, feature], the tapped hidden states side by side, or None without taps.
    """

    logits: Tensor
    features: Tensor | None


class LanguageModel(Protocol):
    """A causal language model over a slot cache. The logits of node n are those of the token after it."""

    vocab_size: int
    max_length: int
    device: torch.device
    # True if the logits of a tree are, bit for bit, those of decoding it alone. Then `match` gives plain decoding's tokens.
    batch_invariant: bool

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache: ...

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """The logits after each new node, and the hidden states that `taps` name.

        Writes the keys and values of the nodes to the scratch of each slot, cell `length + node`. Never changes
        `cache.length`: `SlotCache.commit` does that.

        taps: see `Output.features`. want: the nodes whose logits are needed; "last" is the last node of each tree that is
        not padding.

        On the CPU torch has one thread during a step (`native.one_torch_thread`). A forward that does its own work in
        torch, and wants more threads, sets them for the duration of the forward."""
        ...
