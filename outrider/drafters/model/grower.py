"""The growing of draft trees over a source of levels: a draft model, the target's own layers, or a trained head.

A source gives the logits after the nodes of a level. `TreeDrafter` decides which nodes get children, and which children.

There are two ways to spend a node budget. *Best first* (EAGLE-2, arXiv 2406.16858; DDTree, 2604.12989) keeps the nodes that are
likeliest to be accepted, by the draft's estimate in this step. *By shape* (Sequoia, 2402.12374) uses a tree that is fixed before
anything is drawn. It is optimal for measured acceptance by rank: how often the child of rank 0, 1, 2... is the one accepted.
Verifiers that read the draft's distribution need a shape: a drawn token must not be dropped because of its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from math import exp, log
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from outrider.core.noise import Stream
from outrider.core.sampling import TokenSubset
from outrider.core.types import Array, Budget, Commit, Draft, Siblings
from outrider.drafters.base import BaseDrafter, DraftContext, Resources, TargetPass, draft_of
from outrider.drafters.model.children import children
from outrider.drafters.model.confidence import RIVALS, START, LogitError
from outrider.drafters.shapes import Shape, optimal_shape
from outrider.models.base import Chain, DrawnChain

Node = tuple[int, int]  # entry of the batch, node of its tree
# a node, the tokens of its children, the log acceptance of each, and the distribution that they were drawn from, if any
Offspring = tuple[Node, list[int], list[float], Array | None]


class Growth:
    """One sequence's tree while it is drafted. Node 0 is the root; parents precede children.

    Attributes:
        budget: Of the tree.
        shape: A fixed tree that it fills; None for the likeliest nodes.
        bare_siblings: Nothing follows the less likely children of a node.
        tokens: Of each node.
        parents: Of each node.
        levels: Of each node, 0 for the root.
        weights: The log probability that each node is accepted, by the draft's estimate.
        places: Index of each node in the drafter's scratch, -1 if it was not forwarded.
        roles: The node of the shape that each node fills.
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
        likely = [n for n in self.kept() if self.levels[n] == level and exp(self.weights[n]) >= least]
        return likely[:1] if self.bare_siblings else likely


class Level(NamedTuple):
    """The logits after some nodes of a level."""

    nodes: list[Node]  # a row each
    logits: Array  # float32 [node, vocab], or of the tokens of `subset`
    subset: TokenSubset | None = None  # tokens of the logits; None for all
    # node -> nodes that have the same children, itself among them. A node that is not here is alone
    alike: Mapping[Node, Sequence[Node]] = {}
    sure: Mapping[Node, float] = {}  # node -> what is added to the log acceptance of its children


class Levels:
    """What gives the logits along the paths of draft trees. Write `room`, `open` and `extend`."""

    vocab_size: int  # tokens of the drafts
    taps: tuple[int, ...] = ()  # layers of the target whose output it reads. See `Drafter`
    learns = True  # its chances are those of its logits alone, so their error can be learned
    scale = START  # of that error, before anything was observed
    # drafts that end at `Budget.min_probability` are chains whose tokens have siblings, `Budget.width` together. Nothing
    # follows those, and they cost nothing: the logits of a level rank them already
    bare_siblings = False
    has_draft_chains = False  # whether `draft_chains` can be called

    def begin(self, context: DraftContext) -> None:
        """A draft begins."""

    def room(self, slot: int, tokens: list[int]) -> int:
        """Draft tokens in a row that can be drafted after the committed ones."""
        raise NotImplementedError

    def open(self, context: DraftContext, grown: Mapping[int, Growth]) -> Iterable[Level]:
        """The logits after the roots. grown: the trees by entry of the batch."""
        raise NotImplementedError

    def extend(
        self, context: DraftContext, grown: Mapping[int, Growth], opened: Mapping[int, list[int]], level: int
    ) -> Iterable[Level]:
        """The logits after the nodes of a level that get children. opened: they, by entry."""
        raise NotImplementedError

    def draft_chains(self, context: DraftContext, chains: Mapping[int, Chain]) -> Sequence[DrawnChain]:
        """Draw whole chains in one call. chains: by entry, without the tokens and features that are read first."""
        raise NotImplementedError

    def proposed(self, slot: int, places: list[int]) -> None:
        """The nodes that are proposed have these places (`Growth.places`)."""

    def add(self, slot: int, features: Array, first: int) -> None:
        """The target has read positions from `first` on. features: float [position, feature], of the taps."""

    def update(self, context: DraftContext, commits: Sequence[Commit]) -> None:
        """What the step committed; features come by `add`."""

    def release(self, slot: int) -> None:
        """The sequence in this slot has left."""

    def missing(self, slot: int, tokens: list[int]) -> int:
        """See `Drafter.missing`."""
        return 0

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        """See `Drafter.read`."""

    def resources(self) -> Resources:
        """See `Drafter.resources`."""
        return Resources()


Source_co = TypeVar("Source_co", bound=Levels, covariant=True)


class TreeDrafter(BaseDrafter, Generic[Source_co]):
    """Drafts level by level: a `Drafter` over a source of levels.

    With `Budget.width` 1 it drafts a chain, else a tree. Under `match` the children of a node are the largest of log q + the
    noise that the target will use at that position. If a verifier needs probs, the children are drawn from q.

    Attributes:
        levels: the source.
        error: how far its logits are from the target's, as learned. Under `match` it ends drafts at `Budget.min_probability`.
    """

    def __init__(
        self,
        levels: Source_co,
        shape: Callable[[Budget], Shape] | None = None,
        siblings: Siblings = Siblings.WITHOUT_REPLACEMENT,
    ) -> None:
        """
        Args:
            levels: the source.
            shape: budget -> a fixed tree, in place of the likeliest nodes. A verifier that needs probs needs a fixed tree. The
                default is the best for usual acceptance by rank, because the shape must not depend on statistics of the text
                (docs/trees.md).
            siblings: how children are drawn for a verifier that needs probs.
        """
        self.levels, self.taps, self.error = levels, levels.taps, LogitError(levels.scale)
        self.shape, self.siblings = shape, siblings

    def propose(self, context: DraftContext) -> Draft:
        self.levels.begin(context)
        # a drafter with a short context drafts less, then nothing; nothing else changes
        depths = [
            min(budget.depth, budget.max_nodes, self.levels.room(slot, tokens)) if budget.depth else 0
            for slot, tokens, budget in zip(context.slots, context.tokens, context.budgets, strict=True)
        ]
        grown = {b: self._start(context, b, depth) for b, depth in enumerate(depths) if depth > 0}
        if grown and self.levels.has_draft_chains and all(self._is_chain(context, b) for b in grown):
            self._draw(context, grown)
            return self._draft(context, grown, {})
        return self._draft(context, grown, self._grow(context, grown))

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Array) -> None:
        if first == 0:
            self.release(slot)
        self.levels.add(slot, features, first)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        """Keep what may be kept of the draft. The next proposal reads what is missing."""
        self.error.learn(context.slots, commits)
        self.levels.update(context, commits)
        if self.taps:
            for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
                if commit.features is not None and len(commit.features):
                    self.levels.add(slot, commit.features, len(tokens) - 1 - len(commit.features))

    def release(self, slot: int) -> None:
        self.error.release(slot)
        self.levels.release(slot)

    def missing(self, slot: int, tokens: list[int]) -> int:
        return self.levels.missing(slot, tokens)

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        self.levels.read(slot, tokens, count)

    def resources(self) -> Resources:
        return replace(self.levels.resources(), error=self.error, siblings=self.levels.bare_siblings)

    def _start(self, context: DraftContext, b: int, depth: int) -> Growth:
        budget = context.budgets[b].clipped(depth)
        shape = self.shape or (optimal_shape if context.needs_probs and budget.width > 1 else None)
        bare = self.levels.bare_siblings and budget.min_probability > 0
        return Growth(context.tokens[b][-1], budget, shape and shape(budget), bare)

    def _is_chain(self, context: DraftContext, b: int) -> bool:
        """Whether one call of the source can draw what is grown level by level."""
        budget = context.budgets[b]
        simple = (budget.width == 1 or budget.min_probability > 0) and not context.needs_probs and self.shape is None
        return simple and context.warp.simple(b) and context.stream is Stream.TOKEN

    def _draw(self, context: DraftContext, grown: dict[int, Growth]) -> None:
        """What `match` gets, in one call of a source that offers it: it saves the Python between a small model's tokens."""
        judged = any(growth.budget.min_probability for growth in grown.values())
        noise = context.noise.keys(context.stream, [*map(len, context.tokens)])
        chains = {
            b: Chain(
                context.slots[b],
                (),
                growth.budget.depth,
                context.warp.histories[b].params.temperature,
                noise[b],
                self.error.scale if judged else 0.0,
                growth.budget.min_probability,
                None,
                min(growth.budget.width, RIVALS),
            )
            for b, growth in grown.items()
        }
        for growth, drawn in zip(grown.values(), self.levels.draft_chains(context, chains), strict=True):
            at, chances, siblings = 0, drawn.chances or repeat(1.0), drawn.siblings or repeat(())
            for level, (token, chance, others) in enumerate(zip(drawn.tokens, chances, siblings, strict=False)):
                family = [(token, chance), *others]
                growth.places[at] = level
                growth.add(at, [t for t, _ in family], [log(max(p, 1e-9)) for _, p in family])
                at = len(growth.tokens) - len(family)  # the others are siblings that nothing follows

    def _draft(self, context: DraftContext, grown: dict[int, Growth], drawn_from: dict[Node, Array]) -> Draft:
        """The grown trees, cut to their budgets and renumbered. drawn_from: see `_grow`."""
        within = {b: growth.kept() for b, growth in grown.items()}
        trees, confidence = [[(tokens[-1], -1)] for tokens in context.tokens], dict[int, list[float]]()
        # an only child is taken, and its probability is computed for a threshold alone
        judged = any(g.budget.width > 1 or g.budget.min_probability for g in grown.values()) and not context.needs_probs
        for b, nodes in within.items():
            growth, slot, new = grown[b], context.slots[b], {old: n for n, old in enumerate(nodes)}
            trees[b] += [(growth.tokens[n], new[growth.parents[n]]) for n in nodes[1:]]
            self.levels.proposed(slot, [growth.places[n] for n in nodes])
            if judged:
                weights = [growth.weights[n] for n in nodes]
                confidence[b] = [*map(exp, weights)]
                if self.levels.learns:
                    self.error.state(slot, [parent for _, parent in trees[b]], weights)
        draft = draft_of(trees, confidence)
        if not context.needs_probs:
            return draft
        probs = np.zeros((*draft.tokens.shape, self.levels.vocab_size), np.float32)
        for (b, node), distribution in drawn_from.items():
            probs[b, within[b].index(node)] = distribution
        return replace(draft, probs=probs, siblings=self._siblings(grown))

    def _siblings(self, grown: dict[int, Growth]) -> Siblings:
        """How the children were drawn. An only child is drawn the same way by every kind, so chains declare the simplest."""
        return Siblings.IID if all(g.budget.width == 1 for g in grown.values()) else self.siblings

    def _grow(self, context: DraftContext, grown: dict[int, Growth]) -> dict[Node, Array]:
        """Grow the trees level by level. Returns the distributions drawn from, by (entry, node)."""
        drawn_from, opened, level = dict[Node, Array](), {b: [0] for b in grown}, 0
        while opened:
            parts = self.levels.extend(context, grown, opened, level) if level else self.levels.open(context, grown)
            for part in parts:
                for key, tokens, weights, distribution in self._children(context, grown, part, level):
                    if part.sure:
                        weights = [weight + part.sure[key] for weight in weights]
                    for b, node in part.alike.get(key, (key,)):
                        grown[b].add(node, tokens, weights)
                        if distribution is not None:
                            drawn_from[b, node] = distribution
            level += 1
            # a tree that has stopped does not grow again
            opened = {b: nodes for b in opened if (nodes := grown[b].open(level))}
        return drawn_from

    def _children(
        self, context: DraftContext, grown: dict[int, Growth], part: Level, level: int
    ) -> Iterator[Offspring]:
        """The children of each node of a part of a level."""
        at, logits, subset = part.nodes, part.logits, part.subset
        entries, extra = [b for b, _ in at], [grown[b].path(n) for b, n in at]
        warp, noise = context.warp.select(entries), context.noise.select(entries)
        position = context.positions[entries] + level
        width = max(grown[b].width(n) for b, n in at)
        if context.needs_probs:
            scores = warp.scores(logits, extra, subset)
            node = np.array([n for _, n in at])
            kind = self._siblings(grown)
            # one call for each width: some kinds draw the last child in another way
            for size in {grown[b].width(n) for b, n in at} - {0}:
                lines = [i for i, (b, n) in enumerate(at) if grown[b].width(n) == size]
                chosen = children(scores[lines], size, kind, noise.select(lines), context.stream, position[lines],
                                node=node[lines], subset=subset)  # fmt: skip
                assert chosen.probs is not None  # bit for bit what the tokens were drawn from
                for i, tokens, distribution in zip(lines, chosen.tokens.tolist(), chosen.probs, strict=True):
                    yield at[i], tokens, [0.0] * size, distribution
            return
        judged = any(grown[b].budget.min_probability for b in entries)
        if width == 1 and not judged:  # an only child needs no probability
            drawn = warp.draw(logits, extra, noise, context.stream, position, subset).tolist()
            for key, token in zip(at, drawn, strict=True):
                yield key, [token], [0.0], None
            return
        best, weighed = self.error.likeliest(warp, logits, extra, width, noise, context.stream, position, subset)
        for key, tokens, weights in zip(at, best, weighed, strict=True):
            yield key, tokens[:width], weights, None
