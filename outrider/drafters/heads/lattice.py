"""Drafts of heads that give the distributions of several positions at once: Medusa, DFlash, DFlash2 and DSpark.

The children of a node depend on its depth, and in DSpark and DFlash2 on the node's own token too. So a draft tree is part of a
lattice, and the best one is found without a forward: a heap holds the best node that is not taken of each list of siblings
(DDTree, arXiv 2604.12989). A set of the likeliest nodes is closed under parents and better siblings, so best first is optimal if
the estimates are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp

import torch
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.core.types import Budget, Commit, Draft, Siblings
from outrider.drafters.base import BaseDrafter, DraftContext, TargetPass, draft_of
from outrider.drafters.config import DrafterSetup
from outrider.drafters.model.children import children
from outrider.drafters.model.confidence import FOR_HEADS, LogitError
from outrider.verify import VERIFIERS

_SHORTLIST = 64  # tokens of a depth whose bias is computed
Candidates = tuple[list[int], list[float]]


class ParallelDrafter(BaseDrafter):
    """A drafter whose forward gives all depths of a draft. Write `_depth` and `_logits`, and `_bias` for a first-order head.

    Under `match` it drafts chains and trees. For a verifier that needs probs it drafts chains, drawn depth by depth.

    subset: the tokens of the logits; None for all. error: how far they are from the target's. first_order: `_bias` is not 0.
    """

    first_order = False

    def __init__(self, vocab_size: int, device: torch.device, subset: TokenSubset | None = None) -> None:
        self.vocab_size, self.device, self.subset = vocab_size, device, subset
        self.error = LogitError(FOR_HEADS)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        self.error.learn(context.slots, commits)

    def release(self, slot: int) -> None:
        self.error.release(slot)

    def _depth(self, slot: int, tokens: Sequence[int]) -> int:
        """Draft tokens in a row that can be drafted for a sequence now; 0 for none."""
        raise NotImplementedError

    def _logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Tensor:
        """float32 [slot, depth, kept]: the logits of each depth, without a bias. texts: the committed tokens of each slot."""
        raise NotImplementedError

    def _bias(self, line: int, level: int, token: int, places: Tensor | None) -> Tensor:
        """float32 [kept]: what is added to the logits of a level after `token`. places: int64, some of the columns.

        line: index in the slots of `_logits`."""
        raise NotImplementedError

    def _possible(self, logits: Tensor) -> Tensor | None:
        """int64, ascending: the columns that a level drafts from; None for all. logits: float32 [kept], without a bias."""
        return None

    def _after(
        self, line: int, level: int, token: int, logits: Tensor, places: Tensor | None
    ) -> tuple[Tensor, TokenSubset | None]:
        """The logits of a level after a token, and their tokens. places: the columns to look at; None for all."""
        subset = self.subset
        if places is not None:
            subset = TokenSubset(places if subset is None else subset.ids[places], self.vocab_size)
            logits = logits[places]
        return logits + self._bias(line, level, token, places), subset

    def _log_confidence(self, line: int, level: int, token: int) -> float:
        """Log probability that the token of a level is right if those before it are. line: index in the slots of `_logits`."""
        return 0.0

    def propose(self, context: DraftContext) -> Draft:
        depths = [
            min(budget.depth, budget.max_nodes, self._depth(slot, tokens)) if budget.depth else 0
            for slot, tokens, budget in zip(context.slots, context.tokens, context.budgets, strict=True)
        ]
        some = [b for b, depth in enumerate(depths) if depth > 0]
        trees: list[list[tuple[int, int]]] = [[(tokens[-1], -1)] for tokens in context.tokens]
        if not some:
            return draft_of(trees)
        slots, texts = [context.slots[b] for b in some], [context.tokens[b] for b in some]
        logits = self._logits(slots, texts, max(depths[b] for b in some))
        if context.needs_probs:
            return self._drawn(context, trees, {b: (i, logits[i, : depths[b]]) for i, b in enumerate(some)})
        confidence: dict[int, Tensor] = {}
        for line, b in enumerate(some):
            budget = replace(context.budgets[b], depth=depths[b])
            simple = budget.width == 1 and not budget.min_probability
            if simple and not self.first_order and not context.warp.active[b]:
                trees[b] += [(t, n) for n, t in enumerate(self._chain(context, b, logits[line, : depths[b]]))]
                continue
            expand = self._expander(context, b, line, logits[line, : depths[b]], budget.width)
            trees[b], weights = grown_lattice(context.tokens[b][-1], budget, expand)
            confidence[b] = torch.tensor(weights).exp()
            if not self.first_order:  # its chances are not those of the logits alone
                self.error.state(context.slots[b], [parent for _, parent in trees[b]], weights)
        return draft_of(trees, confidence if len(confidence) == len(some) else None)

    def best(self, slot: int, tokens: Sequence[int], following: Sequence[int]) -> list[int]:
        """The most likely token of each depth, if those before it are the ones that follow the text. Without noise.

        tokens: the committed ones of the slot. following: as many as are to be known; one draft token more is given, if the
        drafter has so many.
        """
        depth = min(len(following) + 1, self._depth(slot, tokens))
        if not depth:
            return []
        logits = self._logits([slot], [tokens], depth)[0]
        rows = [(row, self.subset) for row in logits]
        if self.first_order:
            before = zip(logits, [tokens[-1], *following], strict=False)
            rows = [self._after(0, level, token, row, self._possible(row)) for level, (row, token) in enumerate(before)]
        found = [(int(row.argmax()), subset) for row, subset in rows]
        return [at if subset is None else int(subset.ids[at]) for at, subset in found]

    def _chain(self, context: DraftContext, b: int, logits: Tensor) -> list[int]:
        """The token of each depth, where none depends on another."""
        lines = [b] * len(logits)
        position = context.positions[b] + torch.arange(len(logits), device=self.device)
        warp, noise = context.warp.select(lines), context.noise.select(lines)
        found = warp.draw(logits, [()] * len(lines), noise, context.stream, position, self.subset).tolist()
        return found[: found.index(-1)] if -1 in found else found

    def _expander(
        self, context: DraftContext, b: int, line: int, logits: Tensor, width: int
    ) -> Callable[[list[int]], Candidates]:
        """path -> the best children of its last node: tokens, and the log acceptance of each. Kept for equal paths."""
        known: dict[tuple[int, ...], Candidates] = {}
        places: dict[int, Tensor | None] = {}  # of each level
        active, root = context.warp.active[b], context.tokens[b][-1]
        if not self.first_order and not active:  # one call for all depths
            every = self._candidates(context, b, logits, [[]] * len(logits), range(len(logits)), width, self.subset)
            return lambda path: every[len(path)]

        def expand(path: list[int]) -> Candidates:
            level, last = len(path), path[-1] if path else root
            key = tuple(path) if active else (level, last)
            if key not in known:
                own, subset = logits[level], self.subset
                if self.first_order:
                    if level not in places:
                        some = self._possible(own)
                        if some is None and not active:
                            some = self._shortlist(context, b, level, own)
                        places[level] = some
                    own, subset = self._after(line, level, last, own, places[level])
                sure = self._log_confidence(line, level, last)
                found = self._candidates(context, b, own[None], [path], [level], width, subset)
                known[key] = found[0][0], [w + sure for w in found[0][1]]
            return known[key]

        return expand

    def _shortlist(self, context: DraftContext, b: int, level: int, logits: Tensor) -> Tensor:
        """int64 [short], ascending: the columns that are the best without a bias, with the noise that will be added."""
        count = min(_SHORTLIST, len(logits))
        params = context.warp.histories[b].params
        keys = logits
        if not params.greedy:
            ids = None if self.subset is None else self.subset.ids
            noise = context.noise.select([b]).gumbel(
                context.stream, context.positions[[b]] + level, self.vocab_size, ids
            )
            keys = logits / params.temperature + noise[0]
        return keys.topk(count).indices.sort().values

    def _candidates(
        self,
        context: DraftContext,
        b: int,
        logits: Tensor,
        paths: list[list[int]],
        levels: Sequence[int],
        width: int,
        subset: TokenSubset | None,
    ) -> list[Candidates]:
        """The best tokens of each line of `logits`, float32 [len(levels), kept]."""
        lines = [b] * len(levels)
        warp, noise = context.warp.select(lines), context.noise.select(lines)
        position = context.positions[b] + torch.tensor(list(levels), device=self.device)
        found = self.error.likeliest(warp, logits, paths, width, noise, context.stream, position, subset)
        return list(zip(*found, strict=True))

    def _drawn(
        self, context: DraftContext, trees: list[list[tuple[int, int]]], logits: dict[int, tuple[int, Tensor]]
    ) -> Draft:
        """A chain for each entry, each token drawn from its depth's distribution, given the one before it."""
        drawn_from: dict[tuple[int, int], Tensor] = {}
        for b, (line, levels) in logits.items():
            warp, noise, path = context.warp.select([b]), context.noise.select([b]), list[int]()
            for level, own in enumerate(levels):
                biased, subset = (
                    self._after(line, level, trees[b][-1][0], own, self._possible(own))
                    if self.first_order
                    else (own, self.subset)
                )
                scores = warp.scores(biased[None], [path], subset)
                made = children(scores, 1, Siblings.IID, noise, context.stream, context.positions[[b]] + level,
                                node=torch.tensor([level], device=self.device), subset=subset)  # fmt: skip
                token = int(made.tokens[0, 0])
                if token < 0:
                    break
                assert made.probs is not None
                drawn_from[b, level] = made.probs[0]
                path.append(token)
                trees[b].append((token, level))
        draft = draft_of(trees)
        probs = torch.zeros(*draft.tokens.shape, self.vocab_size, device=self.device)
        for (b, node), distribution in drawn_from.items():
            probs[b, node] = distribution
        return replace(draft, probs=probs, siblings=Siblings.IID)


def grown_lattice(
    root: int, budget: Budget, expand: Callable[[list[int]], Candidates]
) -> tuple[list[tuple[int, int]], list[float]]:
    """The likeliest nodes within a budget: (token, parent) of each, and the log probability that it is accepted.

    expand: path -> the best next tokens, and the log probability that each is right. A token of -1 ends the list.
    """
    nodes, weights, paths = [(root, -1)], [0.0], list[list[int]]([[]])
    heap: list[tuple[float, int, int]] = []  # (-weight, parent, rank)

    def push(parent: int, rank: int) -> None:
        if rank >= budget.width or len(paths[parent]) >= budget.depth:
            return
        if exp(weights[parent]) < budget.min_probability:
            return
        tokens, chances = expand(paths[parent])
        if rank < len(tokens) and tokens[rank] >= 0:
            heapq.heappush(heap, (-weights[parent] - min(chances[rank], 0.0), parent, rank))

    push(0, 0)
    while heap and len(nodes) <= budget.max_nodes:
        weight, parent, rank = heapq.heappop(heap)
        token = expand(paths[parent])[0][rank]
        nodes.append((token, parent))
        weights.append(-weight)
        paths.append([*paths[parent], token])
        push(parent, rank + 1)
        push(len(nodes) - 1, 0)
    return nodes, weights


def chains_only(setup: DrafterSetup) -> None:
    """Raise ValueError for trees that heads of several positions do not draw."""
    width, verifier = setup.config.tree_width, setup.config.verifier
    if width > 1 and VERIFIERS[verifier].needs_probs:
        raise ValueError(
            f"{setup.config.methods[0]} drafts chains for the verifier {verifier}, not trees of width {width}; leave "
            'out tree_width, or use "verifier": "match"'
        )
