"""Drafts with a trained head of the EAGLE family: EAGLE-1, EAGLE-3 and EAGLE-3.1 as chains and trees, P-EAGLE in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.tree import chain
from outrider.core.types import Commit
from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.eagle.files import read_eagle
from outrider.drafters.heads.eagle.model import eagle_model
from outrider.drafters.heads.eagle.module import EagleConfig
from outrider.drafters.heads.features import PairModel, PairReader
from outrider.drafters.heads.lattice import ParallelDrafter, chains_only
from outrider.drafters.heads.reading import HeadWeights
from outrider.drafters.heads.selftest import DEPTH, DraftHits, head_drafter, parallel_survival
from outrider.drafters.model.confidence import FOR_HEADS, LogitError
from outrider.drafters.model.tree_drafter import GrowthSettings, TreeDrafter
from outrider.models.base import LanguageModel, Want
from outrider.models.nodes import Nodes


class EagleDrafter(PairReader, TreeDrafter):
    """Drafts from the target's features (Li et al. 2025, arXiv 2503.01840; the equations: docs/guides/heads.md).

    The cache holds pairs of the target's features only. What the head feeds back to itself while it drafts is in the scratch,
    which is never committed: the same positions are read again from true features. Pairs wait until they are needed, and all
    but the last one cost only their keys and values.
    """

    def __init__(self, model: PairModel, num_slots: int, max_length: int, **settings: Unpack[GrowthSettings]) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each. settings: see `GrowthSettings`."""
        TreeDrafter.__init__(self, model, num_slots, max_length, subset=model.subset, **settings)
        self.error = LogitError(FOR_HEADS)
        self.model, self.taps = model, model.taps
        self.waiting = {}
        # slot -> g of the children of each node in the scratch, [place, hidden]
        self._fed_back: dict[int, Tensor] = {}

    def release(self, slot: int) -> None:
        super().release(slot)
        self._fed_back.pop(slot, None)

    def _keep(self, slot: int, places: list[int], commit: Commit) -> None:
        """The root's pair alone: it was read from the target's features."""
        self.cache.commit([slot], [[0]])
        self.waiting.pop(slot, None)
        self._fed_back.pop(slot, None)

    def _room(self, slot: int, tokens: list[int]) -> int:
        return self._left(slot, tokens)

    def _unread(self, slot: int, tokens: list[int]) -> tuple[list[int], Tensor | None]:
        return self._pair_tokens(slot, tokens), self.waiting[slot]

    def _forward(self, nodes: Nodes, features: Tensor | None, want: Want) -> Tensor:
        if features is not None:
            logits, g = self.model.forward(nodes, features, want=want)
            self._fed_back |= zip(nodes.slots, g, strict=True)
            return logits
        assert nodes.parents is not None
        above = nodes.parents[:, nodes.held :].clamp_min(0).to(self.device)
        known = [self._fed_back[slot] for slot in nodes.slots]
        logits, g = self.model.forward(nodes, g=torch.stack([k[up] for k, up in zip(known, above, strict=True)]))
        for slot, before, new in zip(nodes.slots, known, g, strict=True):
            self._fed_back[slot] = torch.cat([before, new])
        return logits


class PEagleDrafter(PairReader, ParallelDrafter):
    """P-EAGLE: a head of several layers that drafts all tokens of a step in one forward, from the target's features and masks.

    The slots after the root's pair hold a mask token and a learnt feature in place of the target's. Each slot attends to the
    text and to the slots before it, so the distributions of later tokens do not depend on draft tokens. The
    cache holds pairs of committed tokens only, as `EagleDrafter`'s does.

    num_slots, max_length: slots of the cache, and tokens of each.
    """

    def __init__(
        self,
        head: HeadWeights[EagleConfig],
        target: LanguageModel,
        num_slots: int,
        max_length: int,
        quantization: str = "auto",
    ) -> None:
        config = head.config
        self.model = eagle_model(head, target, max_length, quantization)
        super().__init__(config.vocab_size, target.device, self.model.subset)
        self.cache, self.waiting, self.taps = self.model.new_cache(num_slots, max_length), {}, config.taps
        assert config.mask_token_id is not None
        self._drafts, self._mask = config.parallel_drafts, config.mask_token_id
        self._mask_features = head.tensors["mask_hidden"].float().flatten().to(self.device)

    def _depth(self, slot: int, tokens: Sequence[int]) -> int:
        return min(self._drafts, self._left(slot, tokens))

    def _logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Tensor:
        waiting = [self.waiting[slot] for slot in slots]
        masked = [self._mask] * (depth - 1)
        feeds = [[*self._pair_tokens(slot, t), *masked] for slot, t in zip(slots, texts, strict=True)]
        tokens, parents = chain(feeds)
        masks = self._mask_features.expand(depth - 1, -1)
        features = pad_sequence([torch.cat([own, masks]) for own in waiting], batch_first=True)
        logits = self.model.forward(Nodes(tokens, self.cache, [*slots], parents), features, want=depth).logits
        for slot, own in zip(slots, waiting, strict=True):
            self._ingested(slot, len(own))
        return logits


def from_setup(setup: DrafterSetup) -> EagleDrafter:
    """Read the head of a configuration, and try it on a known text."""

    def made(
        head: HeadWeights[EagleConfig], target: LanguageModel, num_slots: int, max_length: int, quantization: str
    ) -> EagleDrafter:
        return EagleDrafter(eagle_model(head, target, max_length, quantization), num_slots, max_length)

    flags = {name: name for name in ("norm_output", "norm_before_residual")}
    return head_drafter(setup, read_eagle, made, flags, survival)


def parallel_from_setup(setup: DrafterSetup) -> PEagleDrafter:
    """Raises ValueError for trees that heads of several positions do not draw."""
    chains_only(setup)
    flags = {"norm_before_residual": "norm_before_residual"}
    return head_drafter(setup, read_eagle, PEagleDrafter, flags, parallel_survival)


def survival(drafter: EagleDrafter, text: Sequence[int], features: Tensor, right: Sequence[int]) -> DraftHits:
    """Drafts after each position of a text, fed with the text's own tokens. All positions are branches of one tree.

    features: float [position, feature] of the text. right: the target's most likely token after each position.
    """
    count, model = len(text) - 1 - DEPTH, drafter.model
    cache = model.new_cache(1, len(text))
    g = torch.empty(0)
    alive = torch.ones(count, dtype=torch.bool)
    hits: list[float] = []
    parents = torch.arange(-1, count - 1)
    for depth in range(DEPTH):
        # level 0 is the text itself, a chain; each later level has one node below each node of the level before
        tokens = torch.tensor([list(text[1 + depth : 1 + depth + count])])
        if depth:
            parents = torch.cat([parents, torch.arange(count) + (depth - 1) * count])
        nodes = Nodes(tokens, cache, [0], parents[None])
        logits, g = model.forward(nodes, g=g) if depth else model.forward(nodes, features[None, :count])
        best = logits[0].argmax(-1)
        best = best if model.subset is None else model.subset.ids[best]
        alive &= best.cpu() == torch.tensor(right[1 + depth : 1 + depth + count])
        hits.append(float(alive.float().mean()))
    return tuple(hits)
