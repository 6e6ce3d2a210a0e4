"""The growing of draft trees over anything that gives logits along the paths of a tree: a draft model, or a trained head.

There are two ways to spend a node budget. *Best first* (EAGLE-2, arXiv 2406.16858; DDTree, 2604.12989) keeps the nodes that are
likeliest to be accepted, by the draft's estimate in this step. *By shape* (Sequoia, 2402.12374) uses a tree that is fixed before
anything is drawn. It is optimal for measured acceptance by rank: how often the child of rank 0, 1, 2... is the one accepted.
Verifiers that read the draft's distribution need a shape: a drawn token must not be dropped because of its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from math import exp, log
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.noise import Stream
from outrider.core.sampling import TokenSubset
from outrider.core.tree import chain
from outrider.core.types import PADDING, Budget, Commit, Draft, Siblings
from outrider.drafters.base import BaseDrafter, DraftContext, TargetPass, draft_of
from outrider.drafters.model.children import children
from outrider.drafters.model.confidence import RIVALS, LogitError
from outrider.drafters.model.shapes import Shape, optimal_shape
from outrider.models.base import Chain, DrawnChain, Want
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes

# (entry, node), the tokens of its children, the log acceptance of each, and the distribution that they were drawn from, if any
Offspring = tuple[tuple[int, int], list[int], list[float], Tensor | None]


class Growth:
    """One sequence's tree while it is drafted. Node 0 is the root; parents precede children.

    weights: the log probability that a node is accepted, by the draft's estimate. places: a node's index in the drafter's
    scratch, -1 if it was not forwarded. roles: the node of the shape that each node fills. bare_siblings: nothing follows the
    less likely children of a node.
    """

    def __init__(self, root: int, budget: Budget, shape: Shape | None = None, bare_siblings: bool = False) -> None:
        self.budget, self.shape, self.bare_siblings = budget, shape, bare_siblings
        self.tokens, self.parents, self.levels = [root], [-1], [0]
        self.weights, self.places, self.roles = [0.0], [0], [0]

    def path(self, node: int) -> list[int]:
        """Tokens below the root, down to a node."""
        out: list[int] = []
        while node > 0:
            out.append(self.tokens[node])
            node = self.parents[node]
        return out[::-1]

    def width(self, node: int) -> int:
        """The most children that a node may have."""
        return self.budget.width if self.shape is None else self.shape.widths[self.roles[node]]

    def add(self, node: int, tokens: Sequence[int], weights: Sequence[float]) -> None:
        """Add children to a node, the best first; -1 ends the list. weights: log acceptance of each, given the node's own."""
        role = self.roles[node]
        for rank, (token, weight) in enumerate(zip(tokens, weights, strict=False)):
            if rank >= self.width(node) or token < 0:
                break
            self.tokens.append(token)
            self.parents.append(node)
            self.levels.append(self.levels[node] + 1)
            self.weights.append(self.weights[node] + min(weight, 0.0))
            self.places.append(-1)
            self.roles.append(0 if self.shape is None else self.shape.children[role, rank])

    def kept(self) -> list[int]:
        """The nodes within the budget, parents first: all nodes of a shape, else the likeliest.

        A parent is never less likely than its child.
        """
        if self.shape is not None:
            return list(range(len(self.tokens)))
        order = sorted(range(len(self.tokens)), key=lambda n: (-self.weights[n], n))
        return sorted(order[: self.budget.max_nodes + 1])

    def open(self, level: int) -> list[int]:
        """Nodes of a level that get children: by shape, or because they are within the budget so far and likely enough."""
        if level >= self.budget.depth:
            return []
        if self.shape is not None:
            return [n for n, d in enumerate(self.levels) if d == level and self.width(n)]
        least = self.budget.min_probability
        found = [n for n in self.kept() if self.levels[n] == level and exp(self.weights[n]) >= least]
        return found[:1] if self.bare_siblings else found


class GrowthSettings(TypedDict, total=False):
    """How a `TreeDrafter` grows its trees. All have a default.

    shape: budget -> a fixed tree, in place of the likeliest nodes. A verifier that needs probs needs a fixed tree. The default
    is the best for usual acceptance by rank, because the shape must not depend on statistics of the text (docs/trees.md).
    siblings: how children are drawn for a verifier that needs probs; the default is without replacement.
    noise_aware: False ranks children by q alone, as other systems do; for comparison.
    """

    shape: Callable[[Budget], Shape] | None
    siblings: Siblings
    noise_aware: bool


class ChainModel(Protocol):
    """What gives the logits: a language model or a head. The members are those of `LanguageModel`."""

    vocab_size: int
    device: torch.device
    has_draft_chains: bool

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache: ...

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]: ...


class TreeDrafter(BaseDrafter):
    """Drafts level by level. Write `_room` and `_after`.

    With `Budget.width` 1 it drafts a chain, else a tree. Under `match` the children of a node are the largest of log q + the
    noise that the target will use at that position. If a verifier needs probs, the children are drawn from q.

    subset: the tokens of the logits; None for all. error: how far its logits are from the target's; learned, unless its chances
    are not those of its logits alone (`learns`). Under `match` it ends drafts at `Budget.min_probability`. bare_siblings: drafts
    that end there are chains whose tokens have siblings, `Budget.width` together, and nothing follows those. They cost a draft
    nothing, because the logits of a level rank them already.
    """

    learns = True
    bare_siblings = False

    def __init__(
        self, vocab_size: int, device: torch.device, subset: TokenSubset | None, **settings: Unpack[GrowthSettings]
    ) -> None:
        """settings: see `GrowthSettings`."""
        self.vocab_size, self.device, self.subset = vocab_size, device, subset
        self.shape = settings.get("shape")
        self.siblings = settings.get("siblings", Siblings.WITHOUT_REPLACEMENT)
        self.noise_aware = settings.get("noise_aware", True)
        self.error = LogitError()

    def propose(self, context: DraftContext) -> Draft:
        # a drafter with a short context drafts less, then nothing; nothing else changes
        depths = [
            min(budget.depth, budget.max_nodes, self._room(slot, tokens)) if budget.depth else 0
            for slot, tokens, budget in zip(context.slots, context.tokens, context.budgets, strict=True)
        ]
        return self._drafted(context, {b: depth for b, depth in enumerate(depths) if depth > 0})

    def _drafted(self, context: DraftContext, depths: dict[int, int]) -> Draft:
        """The draft, with a root alone for entries that are not in `depths`."""
        grown = {b: self._start(context, b, depth) for b, depth in depths.items()}
        return self._draft(context, grown, self._grow(context, grown))

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        self.error.learn(context.slots, commits)

    def release(self, slot: int) -> None:
        self.error.release(slot)

    def _room(self, slot: int, tokens: list[int]) -> int:
        """Draft tokens in a row that can be drafted after the committed ones."""
        raise NotImplementedError

    def _after(
        self, context: DraftContext, grown: dict[int, Growth], opened: dict[int, list[int]], level: int
    ) -> Tensor:
        """float32 [node, vocab]: the logits after the nodes of a level that get children, one entry after the other."""
        raise NotImplementedError

    def _start(self, context: DraftContext, b: int, depth: int) -> Growth:
        budget = context.budgets[b].clipped(depth)
        shape = self.shape or (optimal_shape if context.needs_probs and budget.width > 1 else None)
        return Growth(
            context.tokens[b][-1], budget, shape and shape(budget), self.bare_siblings and budget.min_probability > 0
        )

    def _draft(
        self, context: DraftContext, grown: dict[int, Growth], drawn_from: dict[tuple[int, int], Tensor]
    ) -> Draft:
        """The grown trees, cut to their budgets and renumbered. drawn_from: see `_grow`."""
        kept = {b: growth.kept() for b, growth in grown.items()}
        trees, confidence = [[(tokens[-1], -1)] for tokens in context.tokens], dict[int, list[float]]()
        # an only child is taken, and its probability is computed for a threshold alone
        judged = any(g.budget.width > 1 or g.budget.min_probability for g in grown.values()) and not context.needs_probs
        for b, nodes in kept.items():
            growth, slot, new = grown[b], context.slots[b], {old: n for n, old in enumerate(nodes)}
            trees[b] += [(growth.tokens[n], new[growth.parents[n]]) for n in nodes[1:]]
            self._placed(slot, [growth.places[n] for n in nodes])
            if judged:
                weights = [growth.weights[n] for n in nodes]
                confidence[b] = [*map(exp, weights)]
                if self.noise_aware and self.learns:
                    self.error.state(slot, [parent for _, parent in trees[b]], weights)
        draft = draft_of(trees, confidence)
        if not context.needs_probs:
            return draft
        probs = torch.zeros(*draft.tokens.shape, self.vocab_size, device=self.device)
        for (b, node), distribution in drawn_from.items():
            probs[b, kept[b].index(node)] = distribution
        return replace(draft, probs=probs, siblings=self._siblings(grown))

    def _placed(self, slot: int, places: list[int]) -> None:
        """The nodes that are proposed are at these places of the scratch, -1 for one that was not forwarded."""

    def _siblings(self, grown: dict[int, Growth]) -> Siblings:
        """How the children were drawn. An only child is drawn the same way by every kind, so chains declare the simplest."""
        return Siblings.IID if all(g.budget.width == 1 for g in grown.values()) else self.siblings

    def _grow(self, context: DraftContext, grown: dict[int, Growth]) -> dict[tuple[int, int], Tensor]:
        """Grow the trees level by level. Returns the distributions drawn from, by (entry, node)."""
        drawn_from, opened, level = dict[tuple[int, int], Tensor](), {b: [0] for b in grown}, 0
        while opened:
            at = [(b, n) for b, nodes in opened.items() for n in nodes]
            logits = self._after(context, grown, opened, level)
            made = self._children(context, grown, at, logits, level, self.subset)
            for (b, node), tokens, weights, distribution in made:
                grown[b].add(node, tokens, weights)
                if distribution is not None:
                    drawn_from[b, node] = distribution
            level += 1
            # a tree that has stopped does not grow again
            opened = {b: nodes for b in opened if (nodes := grown[b].open(level))}
        return drawn_from

    def _children(
        self,
        context: DraftContext,
        grown: dict[int, Growth],
        at: list[tuple[int, int]],
        logits: Tensor,
        level: int,
        subset: TokenSubset | None,
    ) -> Iterator[Offspring]:
        """The children of each node in `at`, (entry, node). logits: float32 [len(at), vocab], or of the tokens of `subset`."""
        entries, extra = [b for b, _ in at], [grown[b].path(n) for b, n in at]
        warp, noise = context.warp.select(entries), context.noise.select(entries)
        position = context.positions[entries] + level
        width = max(grown[b].width(n) for b, n in at)
        if context.needs_probs:
            scores = warp.scores(logits, extra, subset)
            node = torch.tensor([n for _, n in at], device=position.device)
            kind = self._siblings(grown)
            # one call for each width: some kinds draw the last child in another way
            for size in {grown[b].width(n) for b, n in at} - {0}:
                lines = [i for i, (b, n) in enumerate(at) if grown[b].width(n) == size]
                made = children(scores[lines], size, kind, noise.select(lines), context.stream, position[lines],
                                node=node[lines], subset=subset)  # fmt: skip
                assert made.probs is not None  # bit for bit what the tokens were drawn from
                for i, tokens, distribution in zip(lines, made.tokens.tolist(), made.probs, strict=True):
                    yield at[i], tokens, [0.0] * size, distribution
            return
        judged = any(grown[b].budget.min_probability for b in entries)
        if width == 1 and not judged and self.noise_aware:  # an only child needs no probability
            drawn = warp.draw(logits, extra, noise, context.stream, position, subset).tolist()
            for key, token in zip(at, drawn, strict=True):
                yield key, [token], [0.0], None
            return
        found, weighed = self.error.likeliest(
            warp, logits, extra, width, noise, context.stream, position, subset, self.noise_aware
        )
        for key, tokens, weights in zip(at, found, weighed, strict=True):
            yield key, tokens[:width], weights, None


class CachedTreeDrafter(TreeDrafter):
    """A tree drafter with a cache. Write `_room`, `_unread` and `_forward`; `_keep` if not all that was accepted stays in it.

    One forward reads all nodes of a level, over a scratch that holds the earlier nodes. Only `update` commits what was drafted,
    so nothing is rolled back. cache: keys and values of what is read.
    """

    bare_siblings = True

    def __init__(
        self,
        model: ChainModel,
        num_slots: int,
        max_length: int,
        *,
        subset: TokenSubset | None = None,
        **settings: Unpack[GrowthSettings],
    ) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each. settings: see `GrowthSettings`."""
        super().__init__(model.vocab_size, model.device, subset, **settings)
        self._chain_model, self.cache = model, model.new_cache(num_slots, max_length)
        # slot -> place in the scratch of each proposed node, -1 if it was not forwarded
        self._places: dict[int, list[int]] = {}
        # entry -> parents of the nodes in its scratch, padding included
        self._scratch: dict[int, list[int]] = {}

    def _drafted(self, context: DraftContext, depths: dict[int, int]) -> Draft:
        if depths and all(self._has_chain(context, b) for b in depths):
            return self._chains(context, depths)
        return super()._drafted(context, depths)

    def _has_chain(self, context: DraftContext, b: int) -> bool:
        budget = context.budgets[b]
        simple = (budget.width == 1 or budget.min_probability > 0) and not context.needs_probs and self.shape is None
        return (
            simple
            and self.noise_aware
            and self._chain_model.has_draft_chains
            and context.warp.simple(b)
            and context.stream is Stream.TOKEN
        )

    def _chains(self, context: DraftContext, depths: dict[int, int]) -> Draft:
        """What `match` gets, in one call of a model that offers it: it saves the Python between a small model's tokens."""
        grown = {b: self._start(context, b, depth) for b, depth in depths.items()}
        judged = any(growth.budget.min_probability for growth in grown.values())
        noise = context.noise.keys(context.stream, [*map(len, context.tokens)])
        chains: list[Chain] = []
        for b, growth in grown.items():
            tokens, features = self._unread(context.slots[b], context.tokens[b])
            chains.append(
                Chain(
                    context.slots[b],
                    tokens,
                    growth.budget.depth,
                    context.warp.histories[b].params.temperature,
                    noise[b],
                    self.error.scale if judged else 0.0,
                    growth.budget.min_probability,
                    features,
                    min(growth.budget.width, RIVALS),
                )
            )
        for growth, c, drawn in zip(
            grown.values(), chains, self._chain_model.draft_chains(self.cache, chains), strict=True
        ):
            self._ingested(c.slot, len(c.tokens))
            at, chances, siblings = 0, drawn.chances or repeat(1.0), drawn.siblings or repeat(())
            for level, (token, chance, others) in enumerate(zip(drawn.tokens, chances, siblings, strict=False)):
                family = [(token, chance), *others]
                growth.places[at] = level
                growth.add(at, [t for t, _ in family], [log(max(p, 1e-9)) for _, p in family])
                at = len(growth.tokens) - len(family)  # the others are siblings that nothing follows
        return self._draft(context, grown, {})

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        """Keep what may be kept of the scratch. The next proposal reads what is missing."""
        super().update(context, commits, target)
        for slot, commit in zip(context.slots, commits, strict=True):
            places = self._places.pop(slot, None)
            if places is not None:
                self._keep(slot, places, commit)

    def release(self, slot: int) -> None:
        super().release(slot)
        self.cache.release(slot)
        self._places.pop(slot, None)

    def _unread(self, slot: int, tokens: list[int]) -> tuple[list[int], Tensor | None]:
        """What a draft reads first: the tokens that the cache lacks, the root last, and their features if it needs any."""
        raise NotImplementedError

    def _forward(self, nodes: Nodes, features: Tensor | None, want: Want) -> Tensor:
        """float32 [batch, node, vocab]: the logits after the nodes that are wanted. features: of `_unread`, for those nodes."""
        raise NotImplementedError

    def _placed(self, slot: int, places: list[int]) -> None:
        self._places[slot] = places

    def _keep(self, slot: int, places: list[int], commit: Commit) -> None:
        """Commit what was accepted of the scratch. places: of the proposed nodes."""
        self.cache.commit([slot], [[places[n] for n in commit.nodes if places[n] >= 0]])

    def _ingested(self, slot: int, count: int) -> None:
        """The first `count` cells of the scratch hold what was missing, the root last. All but the root are committed."""
        self._places.pop(slot, None)  # the scratch was overwritten
        self.cache.commit([slot], [range(count - 1)])

    def _ingest(self, context: DraftContext, some: Sequence[int]) -> Tensor:
        """Read the missing tokens and the root. Returns logits, float32 [len(some), vocab], after each root.

        The root is then node 0 of the scratch.
        """
        slots = [context.slots[b] for b in some]
        feeds = [self._unread(slot, context.tokens[b]) for slot, b in zip(slots, some, strict=True)]
        tokens, parents = chain([ids for ids, _ in feeds])
        features = [own for _, own in feeds if own is not None]
        padded = pad_sequence(features, batch_first=True) if features else None
        logits = self._forward(Nodes(tokens, self.cache, slots, parents), padded, "last")[:, 0]
        for slot, (ids, _) in zip(slots, feeds, strict=True):
            self._ingested(slot, len(ids))
        return logits

    def _own(self, token: int) -> int:
        """The id by which the drafter itself reads a token that it drafted."""
        return token

    def _after(
        self, context: DraftContext, grown: dict[int, Growth], opened: dict[int, list[int]], level: int
    ) -> Tensor:
        if not level:
            self._scratch = {b: [-1] for b in opened}
            return self._ingest(context, [*opened])
        self._scratch = {b: self._scratch[b] for b in opened}
        width = max(map(len, opened.values()))
        feed = torch.zeros(len(opened), width, dtype=torch.long)
        for line, (b, nodes) in enumerate(opened.items()):
            growth, scratch = grown[b], self._scratch[b]
            for i, n in enumerate(nodes):
                feed[line, i] = self._own(growth.tokens[n])
                growth.places[n] = len(scratch) + i
            scratch += [growth.places[growth.parents[n]] for n in nodes] + [PADDING] * (width - len(nodes))
        slots, parents = [context.slots[b] for b in opened], torch.tensor([*self._scratch.values()])
        lines = [i for i, nodes in enumerate(opened.values()) for _ in nodes]
        columns = [i for nodes in opened.values() for i in range(len(nodes))]
        return self._forward(Nodes(feed, self.cache, slots, parents), None, "all")[lines, columns]
