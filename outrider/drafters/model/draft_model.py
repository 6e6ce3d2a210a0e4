"""A second, smaller model drafts chains and trees. Its cache holds committed tokens only, so it needs no rollback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log

import torch
from torch import Tensor

from outrider.control.expectation import Shape, optimal_shape
from outrider.core.noise import Stream
from outrider.core.tree import chain, tree
from outrider.core.types import PADDING, Budget, Commit, Draft, Siblings
from outrider.drafters.base import BaseDrafter, DraftContext, TargetPass
from outrider.drafters.model.children import child_scores, children
from outrider.drafters.model.growth import Growth
from outrider.models.base import Chain, LanguageModel
from outrider.models.nodes import Nodes

_CHUNK = 256  # prompt tokens read per forward
_RIVALS = 8  # candidates that share a node's acceptance probability
ERROR = 0.4  # scale of the errors of a draft's logits, see `_log_acceptance`


class ModelDrafter(BaseDrafter):
    """Drafts from an independent model with the target's vocabulary (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    With `Budget.width` 1 it drafts a chain, else a tree. A tree grows level by level. One forward reads all nodes of a level,
    over a scratch that holds the earlier nodes. Under `match` the children of a node are the largest of log q + the noise that
    the target will use at that position. If a verifier needs probs, the children are drawn from q.

    The cache takes in committed tokens only. `update` keeps the accepted nodes of the scratch, and the next proposal reads
    what is missing. So full acceptance, rejection, steps without a draft and reuse of a slot are one case.

    shape: budget -> a fixed tree, in place of the likeliest nodes. A verifier that needs probs needs a fixed tree. The default
    is the best for usual acceptance by rank, because the shape must not depend on statistics of the text (docs/trees.md).
    siblings: how children are drawn for a verifier that needs probs.
    min_probability: a node gets no children if its probability to be accepted is below this. Only under `match`.
    reduction: what was left out of the model to make it cheaper; None if nothing was. `str` words it.
    noise_aware: False ranks children by q alone, as other systems do; for comparison.
    """

    def __init__(
        self,
        model: LanguageModel,
        num_slots: int,
        max_length: int,
        *,
        shape: Callable[[Budget], Shape] | None = None,
        siblings: Siblings = Siblings.WITHOUT_REPLACEMENT,
        min_probability: float = 0.0,
        noise_aware: bool = True,
    ) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each."""
        self.model = model
        self.cache = model.new_cache(num_slots, max_length)
        self.shape, self.siblings, self.noise_aware = shape, siblings, noise_aware
        self.reduction: object | None = None
        self.least = log(min_probability) if min_probability > 0 else -inf
        # slot -> place in the scratch of each proposed node, -1 if it was not forwarded
        self._places: dict[int, list[int]] = {}

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self._places.pop(slot, None)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        """Commits the root and the accepted nodes that were forwarded. The next proposal reads what is missing."""
        for slot, commit in zip(context.slots, commits, strict=True):
            places = self._places.pop(slot, None)
            if places is not None:
                self.cache.commit([slot], [[places[n] for n in commit.nodes if places[n] >= 0]])

    def missing(self, slot: int, tokens: list[int]) -> int:
        """How many tokens the model must read before it can draft for a sequence, the root not counted.

        Counted in the model's own tokens. 0 if the text is too long for the model: then it does not draft.
        tokens: the committed tokens of the sequence.
        """
        return len(self._context(slot, tokens)) - 1 - self.cache.length[slot] if self._room(slot, tokens) > 0 else 0

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        """Read the next `count` missing tokens, in one forward."""
        have = self.cache.length[slot]
        self._places.pop(slot, None)  # overwritten
        select = self._context(slot, tokens)[have : have + count]
        self.model.forward(Nodes(torch.tensor([select]), self.cache, [slot]), want="none")
        self.cache.commit([slot], [range(len(select))])

    def propose(self, context: DraftContext) -> Draft:
        # a model with a short context stops drafting; nothing else changes
        room = [self._room(slot, tokens) for slot, tokens in zip(context.slots, context.tokens, strict=True)]
        some = [b for b, budget in enumerate(context.budgets) if 0 < min(budget.depth, budget.max_nodes) <= room[b]]
        if some and all(self._has_chain(context, b) for b in some):
            proposals: list[list[int]] = [[] for _ in context.slots]
            for b, drawn in zip(some, self._chains(context, some), strict=True):
                proposals[b] = drawn
            return Draft(*chain([[t[-1], *p] for t, p in zip(context.tokens, proposals, strict=True)]))
        grown = {b: self._start(context, b) for b in some}
        drawn_from = self._grow(context, grown) if some else {}
        return self._draft(context, grown, drawn_from)

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
            confidence = torch.zeros(tokens.shape)
            for b, nodes in kept.items():
                confidence[b, : len(nodes)] = torch.tensor([grown[b].weights[n] for n in nodes]).exp()
            return Draft(tokens, parents, confidence=confidence if self._has_confidence(grown) else None)
        probs = torch.zeros(*tokens.shape, self.model.vocab_size, device=self.model.device)
        for (b, node), distribution in drawn_from.items():
            probs[b, kept[b].index(node)] = distribution
        return Draft(tokens, parents, probs, self._siblings(grown))

    def _has_confidence(self, grown: dict[int, Growth]) -> bool:
        """False for chains without a threshold: an only child is taken, and its probability is not computed."""
        return self.least > -inf or any(g.budget.width > 1 for g in grown.values())

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
            opened = {b: nodes for b, g in grown.items() if (nodes := g.open(level, self.least)) and b in scratch}
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
            out = self.model.forward(Nodes(feed, self.cache, slots, parents)).logits
            at = [(b, n) for b, nodes in opened.items() for n in nodes]
            logits = out[[i for i, b in enumerate(opened) for _ in opened[b]],
                         [i for nodes in opened.values() for i in range(len(nodes))]]  # fmt: skip
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
            scores = warp.scores(logits, extra)
            node = torch.tensor([n for _, n in at], device=position.device)
            kind = self._siblings(grown)
            # one call for each width: some kinds draw the last child in another way
            for size in {grown[b].width(n) for b, n in at} - {0}:
                lines = [i for i, (b, n) in enumerate(at) if grown[b].width(n) == size]
                made = children(scores[lines], size, kind, noise.select(lines), context.stream, position[lines],
                                node=node[lines])  # fmt: skip
                assert made.probs is not None  # bit for bit what the tokens were drawn from
                for i, tokens, distribution in zip(lines, made.tokens.tolist(), made.probs, strict=True):
                    yield at[i], tokens, [0.0] * size, distribution
            return
        if width == 1 and self.least == -inf and self.noise_aware:  # an only child needs no probability
            drawn = warp.draw(logits, extra, noise, context.stream, position).tolist()
            for key, token in zip(at, drawn, strict=True):
                yield key, [token], [0.0], None
            return
        scores = child_scores(warp, logits, extra)
        quiet = [not self.noise_aware or greedy for greedy in warp.greedy]
        made = children(scores, max(width, _RIVALS), Siblings.POINT, noise, context.stream, position, greedy=quiet)
        log_acceptance = made.log_q
        if self.noise_aware:
            log_acceptance = _log_acceptance(made.keys, [h.params.temperature for h in warp.histories])
        for key, tokens, weights in zip(at, made.tokens.tolist(), log_acceptance.tolist(), strict=True):
            yield key, tokens[:width], weights, None

    def _has_chain(self, context: DraftContext, b: int) -> bool:
        simple = context.budgets[b].width == 1 and not context.needs_probs and self.shape is None and self.least == -inf
        return (
            simple
            and self.noise_aware
            and self.model.has_draft_chains
            and context.warp.simple(b)
            and context.stream is Stream.TOKEN
        )

    def _chains(self, context: DraftContext, some: list[int]) -> list[list[int]]:
        """Chains for `match`, in one call of a model that offers it: it saves the Python between a small model's tokens."""
        noise = context.noise.keys(context.stream, context.positions)
        chains = [
            Chain(
                context.slots[b],
                self._level(context.slots[b], context.tokens[b]),
                min(context.budgets[b].depth, context.budgets[b].max_nodes),
                context.warp.histories[b].params.temperature,
                noise[b],
            )
            for b in some
        ]
        drawn = self.model.draft_chains(self.cache, chains)
        for c, tokens in zip(chains, drawn, strict=True):
            self.cache.commit([c.slot], [range(len(c.tokens) - 1)])
            self._places[c.slot] = [*range(len(tokens)), -1]  # the last one drawn was not forwarded
        return drawn

    def _context(self, slot: int, tokens: list[int]) -> list[int]:
        """The committed tokens of a sequence as the model reads them, the root last."""
        return tokens

    def _room(self, slot: int, tokens: list[int]) -> int:
        """Tokens that the model can still read after the committed ones."""
        return self.model.max_length - len(self._context(slot, tokens))

    def _own(self, token: int) -> int:
        """The model's own id of a token that it drafted."""
        return token

    def _level(self, slot: int, tokens: list[int]) -> list[int]:
        """Read missing tokens in chunks until less than a chunk is left. Returns the rest, the root last."""
        while self.missing(slot, tokens) >= _CHUNK:
            self.read(slot, tokens, _CHUNK)
        return self._context(slot, tokens)[self.cache.length[slot] :]

    def _ingest(self, context: DraftContext, some: list[int]) -> Tensor:
        """Read the missing tokens and the root. Returns logits, float32 [len(some), vocab], after each root.

        The root is then node 0 of the scratch.
        """
        slots = [context.slots[b] for b in some]
        for slot in slots:
            self._places.pop(slot, None)  # the scratch is overwritten
        feeds = [self._level(slot, context.tokens[b]) for slot, b in zip(slots, some, strict=True)]
        tokens, parents = chain(feeds)
        logits = self.model.forward(Nodes(tokens, self.cache, slots, parents), want="last").logits[:, 0]
        self.cache.commit(slots, [range(len(f) - 1) for f in feeds])
        return logits


def _log_acceptance(keys: Tensor, temperature: Sequence[float]) -> Tensor:
    """float32 [node, candidate]: the log probability that the target chooses each of the best candidates.

    keys: float32 [node, candidate], logits / temperature + noise, descending; without noise where the temperature is 0.

    Model: the target's logits are the draft's plus independent Gumbel errors of scale ERROR. Both divide by the temperature,
    so the result is log_softmax(keys * temperature / ERROR). On the built-in pair the maximum-likelihood ERROR is 0.3, 0.3,
    0.4 and 0.5 at temperatures 0, 0.3, 0.7 and 1 (docs/trees.md). It only ranks nodes; no text depends on it.
    """
    scale = keys.new_tensor([t or 1.0 for t in temperature])[:, None] / ERROR
    return (keys * scale).log_softmax(-1)
