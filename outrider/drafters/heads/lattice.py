"""Drafts of heads that give the distributions of several positions at once: Medusa, P-EAGLE and blocks.

The children of a node depend on its depth, and in DSpark and DFlash2 on the node's own token too. So a draft tree is a
part of a lattice (DDTree, arXiv 2604.12989), and it grows without a further forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.core.sampling import TokenSubset, largest
from outrider.core.types import Array
from outrider.drafters.base import DraftContext, Resources
from outrider.drafters.heads.features import FeatureCache
from outrider.drafters.model.confidence import FOR_HEADS
from outrider.drafters.model.grower import Growth, Level, Levels, Node

_SHORTLIST = 64  # tokens of a depth whose bias is computed


class Lattice(Levels):
    """Levels of a head whose forward gives all depths of a draft. Write `logits`, and `after_token` for a first-order head.

    A head that keeps something else than `features` writes `room`, `add`, `release` and `resources`.

    Attributes:
        drafts: Draft tokens in a row, at most.
        model: The head, with `weight_bytes`.
        features: What it holds of each text.
        first_order: The logits of a level depend on the token before it.
        candidates: So many of the likeliest columns are what a level drafts from; 0 for all.
        subset: Tokens of the logits; None for all.
    """

    first_order, candidates = False, 0
    scale = FOR_HEADS
    model: Any
    features: FeatureCache

    def __init__(self, vocab_size: int, drafts: int, subset: TokenSubset | None = None) -> None:
        self.vocab_size, self.drafts, self.subset = vocab_size, drafts, subset
        self._lines = dict[int, int]()  # entry -> its line in the logits of the step
        self._levels = np.empty(0)

    def room(self, slot: int, tokens: list[int]) -> int:
        return min(self.drafts, self.features.room(slot, tokens))

    def add(self, slot: int, features: Array, first: int) -> None:
        self.features.add(slot, features, first)

    def release(self, slot: int) -> None:
        self.features.release(slot)

    def resources(self) -> Resources:
        return Resources(self.model, self.features.cache)

    def logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Array:
        """float32 [slot, depth, kept]: the logits of each depth, without the token before. texts: the committed tokens."""
        raise NotImplementedError

    def after_token(self, line: int, level: int, token: int, logits: Array, places: Array | None) -> Array:
        """float32 [kept]: the logits of a level after `token`.

        Args:
            line: Index in the slots of `self.logits`.
            level: 0 after the root.
            token: At the level before.
            logits: Those of `self.logits`.
            places: int64, the columns of the logits if they are some only.
        """
        raise NotImplementedError

    def possible(self, logits: Array) -> Array | None:
        """int64, ascending: the columns that a level drafts from; None for all. logits: float32 [kept], of the level."""
        return largest_places(logits, self.candidates) if self.candidates else None

    def log_confidence(self, line: int, level: int, token: int) -> float:
        """Log probability that the token of a level is right if those before it are. line: index in the slots of `logits`."""
        return 0.0

    def best(self, slot: int, tokens: list[int], following: Sequence[int]) -> list[int]:
        """The most likely token of each depth, if those before it are the ones that follow the text. Without noise.

        tokens: the committed ones of the slot. following: as many as are to be known; one draft token more is given, if the
        drafter has so many.
        """
        depth = min(len(following) + 1, self.room(slot, tokens))
        if not depth:
            return []
        logits = self.logits([slot], [tokens], depth)[0]
        rows = [(row, self.subset) for row in logits]
        if self.first_order:
            before = zip(logits, [tokens[-1], *following], strict=False)
            rows = [
                self.given_token(0, level, token, row, self.possible(row)) for level, (row, token) in enumerate(before)
            ]
        best = [(int(row.argmax()), subset) for row, subset in rows]
        return [at if subset is None else int(subset.ids[at]) for at, subset in best]

    def open(self, context: DraftContext, grown: Mapping[int, Growth]) -> list[Level]:
        self._lines = {b: line for line, b in enumerate(grown)}
        slots, texts = [context.slots[b] for b in grown], [context.tokens[b] for b in grown]
        self._levels = self.logits(slots, texts, max(growth.budget.depth for growth in grown.values()))
        return self.extend(context, grown, {b: [0] for b in grown}, 0)

    def extend(
        self, context: DraftContext, grown: Mapping[int, Growth], opened: Mapping[int, list[int]], level: int
    ) -> list[Level]:
        """Nodes of a level whose children are the same share one computation."""
        alike = dict[tuple[int, int], list[Node]]()
        for b, nodes in opened.items():
            alone = context.needs_probs or context.warp.active[b]  # draws, and parameters that read the path
            for n in nodes:
                alike.setdefault((b, n if alone else grown[b].tokens[n] if self.first_order else 0), []).append((b, n))
        sharing = {nodes[0]: nodes for nodes in alike.values()}
        if self.first_order:
            return [self._after(context, grown, b, sharing, level) for b in dict.fromkeys(b for b, _ in sharing)]
        return [Level([*sharing], self._levels[[self._lines[b] for b, _ in sharing], level], self.subset, sharing)]

    def _after(
        self, context: DraftContext, grown: Mapping[int, Growth], b: int, sharing: Mapping[Node, list[Node]], level: int
    ) -> Level:
        """After nodes of one entry of a first-order head, which has columns of its own."""
        line, nodes = self._lines[b], [node for node in sharing if node[0] == b]
        logits = self._levels[line, level]
        places = self.possible(logits)
        if places is None and not context.needs_probs and not context.warp.active[b]:
            places = self._shortlist(context, b, level, logits)
        tokens = [grown[b].tokens[n] for _, n in nodes]
        after = [self.given_token(line, level, token, logits, places) for token in tokens]
        sure = {node: self.log_confidence(line, level, token) for node, token in zip(nodes, tokens, strict=True)}
        return Level(nodes, np.stack([row for row, _ in after]), after[0][1], sharing, sure)

    def given_token(
        self, line: int, level: int, token: int, logits: Array, places: Array | None
    ) -> tuple[Array, TokenSubset | None]:
        """The logits of a level after a token, and their tokens. places: the columns to look at; None for all."""
        subset = self.subset
        if places is not None:
            subset = TokenSubset(places if subset is None else subset.ids[places], self.vocab_size)
            logits = logits[places]
        return self.after_token(line, level, token, logits, places), subset

    def _shortlist(self, context: DraftContext, b: int, level: int, logits: Array) -> Array:
        """int64 [short], ascending: the columns whose logits are the largest, with the noise that will be added."""
        params, at = context.warp.histories[b].params, context.positions[[b]] + level
        if not params.greedy:
            ids = None if self.subset is None else self.subset.ids
            noise = context.noise.select([b]).gumbel(context.stream, at, self.vocab_size, ids)
            logits = logits / params.temperature + noise[0]
        return largest_places(logits, _SHORTLIST)


def largest_places(row: Array, count: int) -> Array:
    """int64, ascending: the places of the largest numbers of float32 [n], at most `count`."""
    return np.sort(largest(row[None], min(count, len(row)))[0][0])
