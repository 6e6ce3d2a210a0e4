"""Levels over a cache: the nodes of a draft are in the scratch behind the committed tokens of a slot.

One forward reads all nodes of a level, over a scratch that holds the earlier nodes. Only `update` commits what was drafted, so
nothing is rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.core.sampling import TokenSubset
from outrider.core.tree import chain
from outrider.core.types import PADDING, Array, Commit
from outrider.drafters.base import DraftContext, Resources
from outrider.drafters.model.grower import Growth, Level, Levels
from outrider.models.base import Chain, DrawnChain, Want
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes

Feed = tuple[list[int], Array | None]  # tokens, and the features of each if they have any


class CachedLevels(Levels):
    """Write `room` and `unread`, and give it a cache.

    Attributes:
        model: Gives the logits: a language model or a head.
        cache: Keys and values of what was read.
        subset: Tokens of the logits; None for all.
        ids: The model's own id of each token of a draft. None means that they are the same.
        places: By slot, the place in the scratch of each proposed node, -1 for one that was not forwarded.
    """

    bare_siblings = True
    cache: SlotCache

    def __init__(self, model: Any, subset: TokenSubset | None = None, ids: Mapping[int, int] | None = None) -> None:
        self.model, self.subset, self.ids = model, subset, ids
        self.vocab_size, self.has_draft_chains = model.vocab_size, model.has_draft_chains
        self.places = dict[int, list[int]]()
        # entry -> parents of the nodes in its scratch, padding included
        self._scratch = dict[int, list[int]]()

    def unread(self, slot: int, tokens: list[int]) -> Feed:
        """What a draft reads first: the tokens that the cache lacks, the root last, and their features if it needs any."""
        raise NotImplementedError

    def forward(self, nodes: Nodes, features: Array | None, want: Want) -> Array:
        """float32 [batch, node, vocab]: the logits after the nodes that are wanted. features: of `unread`, for those nodes."""
        return self.model.forward(nodes, want=want).logits

    def ingested(self, slot: int, count: int) -> None:
        """The first `count` cells of the scratch hold what was missing, the root last. All but the root are committed."""
        self.places.pop(slot, None)  # the scratch was overwritten
        self.cache.commit([slot], [range(count - 1)])

    def ingest(self, slots: list[int], feeds: Sequence[Feed], forward: Callable[..., Array]) -> Array:
        """Read what is missing and the roots, which are then node 0 of the scratch. Returns logits, float32 [slot, vocab], after
        each root. feeds: of `unread`. forward: `self.forward`, or one with other logits."""
        tokens, parents = chain([ids for ids, _ in feeds])
        features = [some for _, some in feeds if some is not None]
        nodes = Nodes(tokens, self.cache, slots, parents)
        logits = forward(nodes, padded(features) if features else None, "last")[:, 0]
        for slot, (ids, _) in zip(slots, feeds, strict=True):
            self.ingested(slot, len(ids))
        return logits

    def open(self, context: DraftContext, grown: Mapping[int, Growth]) -> list[Level]:
        self._scratch = {b: [-1] for b in grown}
        feeds = [self.unread(context.slots[b], context.tokens[b]) for b in grown]
        logits = self.ingest([context.slots[b] for b in grown], feeds, self.forward)
        return [Level([(b, 0) for b in grown], logits, self.subset)]

    def extend(
        self, context: DraftContext, grown: Mapping[int, Growth], opened: Mapping[int, list[int]], level: int
    ) -> list[Level]:
        self._scratch = {b: self._scratch[b] for b in opened}
        counts = [*map(len, opened.values())]
        width = max(counts)
        feed, real = np.zeros((len(opened), width), np.int64), np.arange(width) < np.array(counts)[:, None]
        for line, (b, nodes) in enumerate(opened.items()):
            growth, scratch = grown[b], self._scratch[b]
            for i, n in enumerate(nodes):
                token = growth.tokens[n]
                feed[line, i] = token if self.ids is None else self.ids[token]
                growth.places[n] = len(scratch) + i
            scratch += [growth.places[growth.parents[n]] for n in nodes] + [PADDING] * (width - len(nodes))
        slots, parents = [context.slots[b] for b in opened], np.array([*self._scratch.values()])
        logits = self.forward(Nodes(feed, self.cache, slots, parents), None, "all")[real]
        return [Level([(b, n) for b, nodes in opened.items() for n in nodes], logits, self.subset)]

    def draft_chains(self, context: DraftContext, chains: Mapping[int, Chain]) -> list[DrawnChain]:
        feeds = [self.unread(one.slot, context.tokens[b]) for b, one in chains.items()]
        whole = [one._replace(tokens=t, features=f) for one, (t, f) in zip(chains.values(), feeds, strict=True)]
        drawn = self.model.draft_chains(self.cache, whole)
        for one in whole:
            self.ingested(one.slot, len(one.tokens))
        return drawn

    def proposed(self, slot: int, places: list[int]) -> None:
        self.places[slot] = places

    def update(self, context: DraftContext, commits: Sequence[Commit]) -> None:
        for slot, commit in zip(context.slots, commits, strict=True):
            self.keep(slot, commit)

    def keep(self, slot: int, commit: Commit) -> bool:
        """Commit what was accepted of the scratch. Returns whether it held a draft."""
        places = self.places.pop(slot, None)
        if places is None:
            return False
        self.cache.commit([slot], [[places[n] for n in commit.nodes if places[n] >= 0]])
        return True

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.places.pop(slot, None)

    def resources(self) -> Resources:
        return Resources(self.model, self.cache)


def padded(rows: Sequence[Array]) -> Array:
    """float32 [row, position, feature]: rows [position, feature], with zeros after the shorter ones."""
    out = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), np.float32)
    for to, row in zip(out, rows, strict=True):
        to[: len(row)] = row
    return out
