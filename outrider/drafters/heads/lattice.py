"""Drafts of heads that give the distributions of several positions at once: Medusa, P-EAGLE and blocks.

The children of a node depend on its depth, and in DSpark and DFlash2 on the node's own token too. So a draft tree is a
part of a lattice (DDTree, arXiv 2604.12989), and it grows without a further forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.drafters.base import DraftContext
from outrider.drafters.model.confidence import FOR_HEADS, LogitError
from outrider.drafters.model.tree_drafter import Growth, Offspring, TreeDrafter

_SHORTLIST = 64  # tokens of a depth whose bias is computed


class ParallelDrafter(TreeDrafter):
    """A drafter whose forward gives all depths of a draft. Write `_room`, `_logits`, and for a first-order head `_after_token`.

    first_order: the logits of a level depend on the token before it.
    """

    first_order = False

    def __init__(self, vocab_size: int, device: torch.device, subset: TokenSubset | None = None) -> None:
        super().__init__(vocab_size, device, subset)
        self.error = LogitError(FOR_HEADS)
        self._lines: dict[int, int] = {}  # entry -> its line in the logits of the step
        self._levels = torch.empty(0)

    def _logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Tensor:
        """float32 [slot, depth, kept]: the logits of each depth, without the token before. texts: the committed tokens."""
        raise NotImplementedError

    def _after_token(self, line: int, level: int, token: int, logits: Tensor, places: Tensor | None) -> Tensor:
        """float32 [kept]: the logits of a level after `token`. logits: those of `_logits`. places: int64, their columns if
        they are some only.

        line: index in the slots of `_logits`."""
        raise NotImplementedError

    def _possible(self, logits: Tensor) -> Tensor | None:
        """int64, ascending: the columns that a level drafts from; None for all. logits: float32 [kept], of the level."""
        return None

    def _log_confidence(self, line: int, level: int, token: int) -> float:
        """Log probability that the token of a level is right if those before it are. line: index in the slots of `_logits`."""
        return 0.0

    def best(self, slot: int, tokens: list[int], following: Sequence[int]) -> list[int]:
        """The most likely token of each depth, if those before it are the ones that follow the text. Without noise.

        tokens: the committed ones of the slot. following: as many as are to be known; one draft token more is given, if the
        drafter has so many.
        """
        depth = min(len(following) + 1, self._room(slot, tokens))
        if not depth:
            return []
        logits = self._logits([slot], [tokens], depth)[0]
        rows = [(row, self.subset) for row in logits]
        if self.first_order:
            before = zip(logits, [tokens[-1], *following], strict=False)
            rows = [
                self._given_token(0, level, token, row, self._possible(row))
                for level, (row, token) in enumerate(before)
            ]
        found = [(int(row.argmax()), subset) for row, subset in rows]
        return [at if subset is None else int(subset.ids[at]) for at, subset in found]

    def _after(
        self, context: DraftContext, grown: dict[int, Growth], opened: dict[int, list[int]], level: int
    ) -> Tensor:
        if not level:
            self._lines = {b: line for line, b in enumerate(opened)}
            slots, texts = [context.slots[b] for b in opened], [context.tokens[b] for b in opened]
            self._levels = self._logits(slots, texts, max(growth.budget.depth for growth in grown.values()))
        return self._levels[[self._lines[b] for b, nodes in opened.items() for _ in nodes], level]

    def _children(
        self,
        context: DraftContext,
        grown: dict[int, Growth],
        at: list[tuple[int, int]],
        logits: Tensor,
        level: int,
        subset: TokenSubset | None,
    ) -> Iterator[Offspring]:
        """Nodes of a level whose children are the same share one computation."""
        alike = dict[tuple[int, int], list[tuple[int, int]]]()
        for b, n in at:
            own = context.needs_probs or context.warp.active[b]  # draws, and parameters that read the path
            alike.setdefault((b, n if own else grown[b].tokens[n] if self.first_order else 0), []).append((b, n))
        sharing = {nodes[0]: nodes for nodes in alike.values()}
        if self.first_order:
            made = self._children_after(context, grown, [*sharing], level)
        else:
            made = super()._children(context, grown, [*sharing], logits[[*map(at.index, sharing)]], level, subset)
        for first, tokens, weights, drawn in made:
            for node in sharing[first]:
                yield node, tokens, weights, drawn

    def _children_after(
        self, context: DraftContext, grown: dict[int, Growth], at: list[tuple[int, int]], level: int
    ) -> Iterator[Offspring]:
        """The children of nodes of a first-order head. Each entry has columns of its own."""
        for b in dict.fromkeys(b for b, _ in at):
            line, nodes = self._lines[b], [node for node in at if node[0] == b]
            own = self._levels[line, level]
            places = self._possible(own)
            if places is None and not context.needs_probs and not context.warp.active[b]:
                places = self._shortlist(context, b, level, own)
            after = [self._given_token(line, level, grown[b].tokens[n], own, places) for _, n in nodes]
            rows = torch.stack([row for row, _ in after])
            for node, tokens, weights, drawn in super()._children(context, grown, nodes, rows, level, after[0][1]):
                sure = self._log_confidence(line, level, grown[b].tokens[node[1]])
                yield node, tokens, [weight + sure for weight in weights], drawn

    def _given_token(
        self, line: int, level: int, token: int, logits: Tensor, places: Tensor | None
    ) -> tuple[Tensor, TokenSubset | None]:
        """The logits of a level after a token, and their tokens. places: the columns to look at; None for all."""
        subset = self.subset
        if places is not None:
            subset = TokenSubset(places if subset is None else subset.ids[places], self.vocab_size)
            logits = logits[places]
        return self._after_token(line, level, token, logits, places), subset

    def _shortlist(self, context: DraftContext, b: int, level: int, logits: Tensor) -> Tensor:
        """int64 [short], ascending: the columns whose logits are the largest, with the noise that will be added."""
        params = context.warp.histories[b].params
        keys = logits
        if not params.greedy:
            ids = None if self.subset is None else self.subset.ids
            noise = context.noise.select([b]).gumbel(
                context.stream, context.positions[[b]] + level, self.vocab_size, ids
            )
            keys = logits / params.temperature + noise[0]
        return keys.topk(min(_SHORTLIST, len(logits))).indices.sort().values
