"""The growing of draft trees over anything that gives logits along the paths of a tree: a draft model, or a trained head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.control.expectation import Shape, optimal_shape
from outrider.core.sampling import TokenSubset
from outrider.core.tree import tree
from outrider.core.types import PADDING, Budget, Draft, Siblings, ints
from outrider.drafters.base import BaseDrafter, DraftContext
from outrider.drafters.model.children import children
from outrider.drafters.model.confidence import LogitError
from outrider.drafters.model.growth import Growth
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes


class TreeDrafter(BaseDrafter):
    """Drafts level by level: `_ingest` gives the logits after each root, `_forward` those after the nodes of a level.

    With `Budget.width` 1 it drafts a chain, else a tree. One forward reads all nodes of a level, over a scratch that holds the
    earlier nodes. Under `match` the children of a node are the largest of log q + the noise that the target will use at that
    position. If a verifier needs probs, the children are drawn from q.

    vocab_size, device: of the logits. cache: keys and values of what is read. subset: the tokens of the logits; None for all.
    shape: budget -> a fixed tree, in place of the likeliest nodes. A verifier that needs probs needs a fixed tree. The default
    is the best for usual acceptance by rank, because the shape must not depend on statistics of the text (docs/trees.md).
    siblings: how children are drawn for a verifier that needs probs.
    noise_aware: False ranks children by q alone, as other systems do; for comparison.
    error: how far its logits are from the target's; learned. Under `match` it ends drafts at `Budget.min_probability`.
    """

    def __init__(
        self,
        cache: SlotCache,
        vocab_size: int,
        device: torch.device,
        *,
        subset: TokenSubset | None = None,
        shape: Callable[[Budget], Shape] | None = None,
        siblings: Siblings = Siblings.WITHOUT_REPLACEMENT,
        noise_aware: bool = True,
    ) -> None:
        self.cache, self.vocab_size, self.device, self.subset = cache, vocab_size, device, subset
        self.shape, self.siblings, self.noise_aware = shape, siblings, noise_aware
        self.error = LogitError()
        # slot -> place in the scratch of each proposed node, -1 if it was not forwarded
        self._places: dict[int, list[int]] = {}

    def propose(self, context: DraftContext) -> Draft:
        # a drafter with a short context stops drafting; nothing else changes
        room = [self._room(slot, tokens) for slot, tokens in zip(context.slots, context.tokens, strict=True)]
        some = [b for b, budget in enumerate(context.budgets) if 0 < min(budget.depth, budget.max_nodes) <= room[b]]
        return self._drafted(context, some)

    def _drafted(self, context: DraftContext, some: list[int]) -> Draft:
        """The draft, with a root alone for entries that are not in `some`."""
        grown = {b: self._start(context, b) for b in some}
        drawn_from = self._grow(context, grown) if some else {}
        return self._draft(context, grown, drawn_from)

    def _room(self, slot: int, tokens: list[int]) -> int:
        """Tokens that can still be read after the committed ones."""
        raise NotImplementedError

    def _ingest(self, context: DraftContext, some: list[int]) -> Tensor:
        """Read the missing tokens and the root. Returns logits, float32 [len(some), vocab], after each root.

        The root is then node 0 of the scratch.
        """
        raise NotImplementedError

    def _forward(self, nodes: Nodes, lines: list[int], columns: list[int]) -> Tensor:
        """Read the nodes of a level. Returns logits, float32 [len(lines), vocab], after nodes (line, column)."""
        raise NotImplementedError

    def _own(self, token: int) -> int:
        """The id by which the drafter itself reads a token that it drafted."""
        return token

    def _start(self, context: DraftContext, b: int) -> Growth:
        budget = context.budgets[b]
        shape = self.shape or (optimal_shape if context.needs_probs and budget.width > 1 else None)
        return Growth(context.tokens[b][-1], budget, shape and shape(budget))

    def _draft(
        self, context: DraftContext, grown: dict[int, Growth], drawn_from: dict[tuple[int, int], Tensor]
    ) -> Draft:
        """The grown trees, cut to their budgets and renumbered. drawn_from: see `_grow`."""
        kept = {b: growth.kept() for b, growth in grown.items()}
        trees: list[list[tuple[int, int]]] = []
        for b, tokens in enumerate(context.tokens):
            growth, nodes = grown.get(b), kept.get(b, [0])
            new = {old: n for n, old in enumerate(nodes)}
            trees.append([(tokens[-1], -1)])
            if growth is not None:
                trees[b] += [(growth.tokens[n], new[growth.parents[n]]) for n in nodes[1:]]
                self._places[context.slots[b]] = [growth.places[n] for n in nodes]
        tokens, parents = tree(trees)
        if not context.needs_probs:
            if not self._has_confidence(grown):
                return Draft(tokens, parents)
            confidence = torch.zeros(tokens.shape)
            for b, nodes in kept.items():
                weights = [grown[b].weights[n] for n in nodes]
                confidence[b, : len(nodes)] = torch.tensor(weights).exp()
                if self.noise_aware:
                    self.error.state(context.slots[b], ints(parents[b]), weights)
            return Draft(tokens, parents, confidence=confidence)
        probs = torch.zeros(*tokens.shape, self.vocab_size, device=self.device)
        for (b, node), distribution in drawn_from.items():
            probs[b, kept[b].index(node)] = distribution
        return Draft(tokens, parents, probs, self._siblings(grown))

    def _has_confidence(self, grown: dict[int, Growth]) -> bool:
        """False for chains without a threshold: an only child is taken, and its probability is not computed."""
        return any(g.budget.width > 1 or g.budget.min_probability for g in grown.values())

    def _siblings(self, grown: dict[int, Growth]) -> Siblings:
        """How the children were drawn. An only child is drawn the same way by every kind, so chains declare the simplest."""
        return Siblings.IID if all(g.budget.width == 1 for g in grown.values()) else self.siblings

    def _grow(self, context: DraftContext, grown: dict[int, Growth]) -> dict[tuple[int, int], Tensor]:
        """Grow the trees level by level, one forward each. Returns the distributions drawn from, by (entry, node)."""
        some, drawn_from = list(grown), dict[tuple[int, int], Tensor]()
        logits = self._ingest(context, some)
        at = [(b, 0) for b in some]  # (entry, node) of each line of `logits`
        scratch = {b: [-1] for b in some}  # parents of the nodes in each entry's scratch, padding included
        level = 0
        while True:
            for (b, node), tokens, weights, distribution in self._children(context, grown, at, logits, level):
                grown[b].add(node, tokens, weights)
                if distribution is not None:
                    drawn_from[b, node] = distribution
            level += 1
            opened = {b: nodes for b, g in grown.items() if (nodes := g.open(level)) and b in scratch}
            if not opened:
                break
            width = max(map(len, opened.values()))
            feed = torch.zeros(len(opened), width, dtype=torch.long)
            for line, (b, nodes) in enumerate(opened.items()):
                growth = grown[b]
                for i, n in enumerate(nodes):
                    feed[line, i] = self._own(growth.tokens[n])
                    growth.places[n] = len(scratch[b]) + i
                parents = [growth.places[growth.parents[n]] for n in nodes]
                padding = [PADDING] * (width - len(nodes))
                scratch[b] += parents + padding
            slots = [context.slots[b] for b in opened]
            parents = torch.tensor([scratch[b] for b in opened])
            at = [(b, n) for b, nodes in opened.items() for n in nodes]
            lines = [i for i, b in enumerate(opened) for _ in opened[b]]
            columns = [i for nodes in opened.values() for i in range(len(nodes))]
            logits = self._forward(Nodes(feed, self.cache, slots, parents), lines, columns)
            scratch = {b: scratch[b] for b in opened}  # a tree that has stopped does not grow again
        return drawn_from

    def _children(
        self, context: DraftContext, grown: dict[int, Growth], at: list[tuple[int, int]], logits: Tensor, level: int
    ):
        """((entry, node), tokens, log acceptance of each, distribution drawn from or None) for each node in `at`.

        logits: float32 [len(at), vocab].
        """
        entries, extra = [b for b, _ in at], [grown[b].path(n) for b, n in at]
        warp, noise = context.warp.select(entries), context.noise.select(entries)
        position = context.positions[entries] + level
        width = max(grown[b].width(n) for b, n in at)
        if context.needs_probs:
            scores = warp.scores(logits, extra, self.subset)
            node = torch.tensor([n for _, n in at], device=position.device)
            kind = self._siblings(grown)
            # one call for each width: some kinds draw the last child in another way
            for size in {grown[b].width(n) for b, n in at} - {0}:
                lines = [i for i, (b, n) in enumerate(at) if grown[b].width(n) == size]
                made = children(scores[lines], size, kind, noise.select(lines), context.stream, position[lines],
                                node=node[lines], subset=self.subset)  # fmt: skip
                assert made.probs is not None  # bit for bit what the tokens were drawn from
                for i, tokens, distribution in zip(lines, made.tokens.tolist(), made.probs, strict=True):
                    yield at[i], tokens, [0.0] * size, distribution
            return
        judged = any(grown[b].budget.min_probability for b in entries)
        if width == 1 and not judged and self.noise_aware:  # an only child needs no probability
            drawn = warp.draw(logits, extra, noise, context.stream, position, self.subset).tolist()
            for key, token in zip(at, drawn, strict=True):
                yield key, [token], [0.0], None
            return
        found, weighed = self.error.likeliest(
            warp, logits, extra, width, noise, context.stream, position, self.subset, self.noise_aware
        )
        for key, tokens, weights in zip(at, found, weighed, strict=True):
            yield key, tokens[:width], weights, None
