"""A second, smaller model drafts: chains and trees. Its cache holds committed tokens only, so it is level by looking."""

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
_RIVALS = 8  # candidates that share a node's chances
ERROR = 0.4  # of a draft's logits, see `_chances`


class ModelDrafter(BaseDrafter):
    """Drafts from an independent model with the target's vocabulary.

    With `Budget.width` 1 a chain, else a tree, grown level by level: one forward for all nodes of a level, over a scratch
    that holds the nodes before. Under `match` the children of a node are the largest of log q + the noise that the target
    will use at that position: the tokens this very noise would make it choose. Where a law is asked for, they are drawn.

    The cache takes in what was committed and nothing else: `update` keeps the accepted nodes of the scratch, and a
    proposal ingests what is missing. Full acceptance, rejection, steps without a draft and reuse of a row are one case.

    shape: a tree for each budget, fixed beforehand, instead of the likeliest nodes. A law needs one, by default the best for
    usual chances by rank: what is counted while a text is written must not shape it. siblings: how the children of a node are
    drawn where a law is asked for. min_probability: a node less likely than this to be visited gets no children (under
    `match`). noise_aware=False: children by q alone, as trees have them elsewhere; for comparison.
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: int,
        max_length: int,
        *,
        shape: Callable[[Budget], Shape] | None = None,
        siblings: Siblings = Siblings.WITHOUT_REPLACEMENT,
        min_probability: float = 0.0,
        noise_aware: bool = True,
    ) -> None:
        self.model = model
        self.cache = model.new_cache(rows, max_length)
        self.shape, self.siblings, self.noise_aware = shape, siblings, noise_aware
        self.least = log(min_probability) if min_probability > 0 else -inf
        self._places: dict[
            int, list[int]
        ] = {}  # slot -> place in the scratch of each node proposed, -1 if not forwarded

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self._places.pop(slot, None)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        """Commits the root and the accepted nodes that were forwarded. What is missing is read at the next proposal."""
        for slot, commit in zip(context.slots, commits, strict=True):
            places = self._places.pop(slot, None)
            if places is not None:
                self.cache.commit([slot], [[places[n] for n in commit.nodes if places[n] >= 0]])

    def missing(self, slot: int, tokens: list[int]) -> int:
        """How much the model has yet to read of a row, whose committed tokens these are, before it can guess: its own tokens,
        the root not counted. Nothing where it will not guess, as the text is too long for it."""
        return len(self._context(slot, tokens)) - 1 - self.cache.length[slot] if self._room(slot, tokens) > 0 else 0

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        """Takes in the next `count` of what is missing, in one forward."""
        have = self.cache.length[slot]
        self._places.pop(slot, None)  # overwritten
        select = self._context(slot, tokens)[have : have + count]
        self.model.forward(Nodes(torch.tensor([select]), self.cache, [slot]), want="none")
        self.cache.commit([slot], [range(len(select))])

    def propose(self, context: DraftContext) -> Draft:
        # a short-sighted drafter stops drafting, no more
        room = [self._room(slot, tokens) for slot, tokens in zip(context.slots, context.tokens, strict=True)]
        some = [b for b, budget in enumerate(context.budgets) if 0 < min(budget.depth, budget.max_nodes) <= room[b]]
        if some and all(self._has_chain(context, b) for b in some):
            guesses: list[list[int]] = [[] for _ in context.slots]
            for b, drawn in zip(some, self._chains(context, some), strict=True):
                guesses[b] = drawn
            return Draft(*chain([[t[-1], *g] for t, g in zip(context.tokens, guesses, strict=True)]))
        grown = {b: self._start(context, b) for b in some}
        laws = self._grow(context, grown) if some else {}
        return self._draft(context, grown, laws)

    def _start(self, context: DraftContext, b: int) -> Growth:
        budget = context.budgets[b]
        shape = self.shape or (optimal_shape if context.needs_probs and budget.width > 1 else None)
        return Growth(context.tokens[b][-1], budget, shape and shape(budget))

    def _draft(self, context: DraftContext, grown: dict[int, Growth], laws: dict[tuple[int, int], Tensor]) -> Draft:
        """The grown trees, cut to their budgets and numbered anew."""
        kept = {b: growth.kept() for b, growth in grown.items()}
        rows: list[list[tuple[int, int]]] = []
        for b, tokens in enumerate(context.tokens):
            growth, nodes = grown.get(b), kept.get(b, [0])
            new = {old: n for n, old in enumerate(nodes)}
            rows.append([(tokens[-1], -1)])
            if growth is not None:
                rows[b] += [(growth.tokens[n], new[growth.parents[n]]) for n in nodes[1:]]
                self._places[context.slots[b]] = [growth.places[n] for n in nodes]
        tokens, parents = tree(rows)
        if not context.needs_probs:
            confidence = torch.zeros(tokens.shape)
            for b, nodes in kept.items():
                confidence[b, : len(nodes)] = torch.tensor([grown[b].weights[n] for n in nodes]).exp()
            return Draft(tokens, parents, confidence=confidence if self._knows_chances(grown) else None)
        probs = torch.zeros(*tokens.shape, self.model.vocab_size, device=self.model.device)
        for (b, node), law in laws.items():
            probs[b, kept[b].index(node)] = law
        return Draft(tokens, parents, probs, self._siblings(grown))

    def _knows_chances(self, grown: dict[int, Growth]) -> bool:
        """An only child is taken without asking how likely it is."""
        return self.least > -inf or any(g.budget.width > 1 for g in grown.values())

    def _siblings(self, grown: dict[int, Growth]) -> Siblings:
        """An only child is drawn the same way by all; chains declare the plainest."""
        return Siblings.IID if all(g.budget.width == 1 for g in grown.values()) else self.siblings

    def _grow(self, context: DraftContext, grown: dict[int, Growth]) -> dict[tuple[int, int], Tensor]:
        """Level by level, one forward each. Returns the laws that were drawn from, by row and node."""
        some, laws = list(grown), dict[tuple[int, int], Tensor]()
        logits = self._ingest(context, some)
        at = [(b, 0) for b in some]  # whose children the lines of `logits` speak of
        standing = {b: [-1] for b in some}  # parents of what stands in each row's scratch, padding included
        level = 0
        while True:
            for (b, node), tokens, weights, law in self._children(context, grown, at, logits, level):
                grown[b].add(node, tokens, weights)
                if law is not None:
                    laws[b, node] = law
            level += 1
            opened = {b: nodes for b, g in grown.items() if (nodes := g.open(level, self.least)) and b in standing}
            if not opened:
                break
            width = max(map(len, opened.values()))
            feed = torch.zeros(len(opened), width, dtype=torch.long)
            for line, (b, nodes) in enumerate(opened.items()):
                growth = grown[b]
                for i, n in enumerate(nodes):
                    feed[line, i] = self._own(growth.tokens[n])
                    growth.places[n] = len(standing[b]) + i
                parents = [growth.places[growth.parents[n]] for n in nodes]
                padding = [PADDING] * (width - len(nodes))
                standing[b] += parents + padding
            rows = [context.slots[b] for b in opened]
            parents = torch.tensor([standing[b] for b in opened])
            out = self.model.forward(Nodes(feed, self.cache, rows, parents)).logits
            at = [(b, n) for b, nodes in opened.items() for n in nodes]
            logits = out[[i for i, b in enumerate(opened) for _ in opened[b]],
                         [i for nodes in opened.values() for i in range(len(nodes))]]  # fmt: skip
            standing = {b: standing[b] for b in opened}  # who has stopped has stopped for good
        return laws

    def _children(
        self, context: DraftContext, grown: dict[int, Growth], at: list[tuple[int, int]], logits: Tensor, level: int
    ):
        """((row, node), tokens, log chances, law or None) of each node in `at`. logits: [len(at), vocab]."""
        who, extra = [b for b, _ in at], [grown[b].path(n) for b, n in at]
        warp, noise, position = context.warp.select(who), context.noise.select(who), context.positions[who] + level
        width = max(grown[b].width(n) for b, n in at)
        if context.needs_probs:
            scores = warp.scores(logits, extra)
            node = torch.tensor([n for _, n in at], device=position.device)
            kind = self._siblings(grown)
            # one call for each width: the last child of some kinds is drawn unlike the others
            for size in {grown[b].width(n) for b, n in at} - {0}:
                lines = [i for i, (b, n) in enumerate(at) if grown[b].width(n) == size]
                made = children(scores[lines], size, kind, noise.select(lines), context.stream, position[lines],
                                node=node[lines])  # fmt: skip
                assert made.probs is not None  # the law drawn from, to the bit
                for i, tokens, law in zip(lines, made.tokens.tolist(), made.probs, strict=True):
                    yield at[i], tokens, [0.0] * size, law
            return
        if width == 1 and self.least == -inf and self.noise_aware:  # the one child needs no chances
            drawn = warp.draw(logits, extra, noise, context.stream, position).tolist()
            for key, token in zip(at, drawn, strict=True):
                yield key, [token], [0.0], None
            return
        scores = child_scores(warp, logits, extra)
        quiet = [not self.noise_aware or greedy for greedy in warp.greedy]
        made = children(scores, max(width, _RIVALS), Siblings.POINT, noise, context.stream, position, greedy=quiet)
        confidence = (
            _chances(made.keys, [h.params.temperature for h in warp.histories]) if self.noise_aware else made.log_q
        )
        for key, tokens, weights in zip(at, made.tokens.tolist(), confidence.tolist(), strict=True):
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
        """Chains without a law, in one call of a model that offers it: a small model's token costs less than the way through
        Python."""
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
        """The committed tokens of a row as the model reads them, the root last."""
        return tokens

    def _room(self, slot: int, tokens: list[int]) -> int:
        """Tokens that the model can still take in behind a row."""
        return self.model.max_length - len(self._context(slot, tokens))

    def _own(self, token: int) -> int:
        """The model's own id of a token that it drafted."""
        return token

    def _level(self, slot: int, tokens: list[int]) -> list[int]:
        """Reads what is long; returns what is left of the committed tokens to forward, the root last."""
        while self.missing(slot, tokens) >= _CHUNK:
            self.read(slot, tokens, _CHUNK)
        return self._context(slot, tokens)[self.cache.length[slot] :]

    def _ingest(self, context: DraftContext, some: list[int]) -> Tensor:
        """Brings the rows level with their committed tokens; returns logits [row, vocab] after the root of each, which
        then stands in the scratch as node 0."""
        rows = [context.slots[b] for b in some]
        for slot in rows:
            self._places.pop(slot, None)  # what stood in the scratch is overwritten
        feeds = [self._level(slot, context.tokens[b]) for slot, b in zip(rows, some, strict=True)]
        tokens, parents = chain(feeds)
        logits = self.model.forward(Nodes(tokens, self.cache, rows, parents), want="last").logits[:, 0]
        self.cache.commit(rows, [range(len(f) - 1) for f in feeds])
        return logits


def _chances(keys: Tensor, temperature: Sequence[float]) -> Tensor:
    """float32 [row, candidate]: log chance of each of the best candidates to be the one that the target chooses.

    keys: logits / temperature + noise, downwards; without noise where the temperature is 0. Take the target's logits for
    the draft's plus independent Gumbel errors of scale ERROR. Both divide by the temperature, so the chances are
    softmax(keys * temperature / ERROR). On the built-in pair the likeliest ERROR is 0.3, 0.3, 0.4 and 0.5 at temperatures
    0, 0.3, 0.7 and 1 (docs/trees.md). It only ranks nodes; no text depends on it.
    """
    scale = keys.new_tensor([t or 1.0 for t in temperature])[:, None] / ERROR
    return (keys * scale).log_softmax(-1)
