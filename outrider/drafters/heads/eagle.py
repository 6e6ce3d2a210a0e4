"""Drafts with a trained head of the EAGLE family: EAGLE-1, EAGLE-3 and EAGLE-3.1, as chains and trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.control.expectation import Shape
from outrider.core.tree import chain
from outrider.core.types import Budget, Commit, Draft, Siblings
from outrider.drafters.base import DraftContext, TargetPass
from outrider.drafters.heads.eagle_model import EagleModel
from outrider.drafters.model.tree_drafter import TreeDrafter
from outrider.models.nodes import Nodes

_READ = 64  # features that wait before they are read: a sequence that drafts nothing costs little


class EagleDrafter(TreeDrafter):
    """Drafts from the target's features (Li et al. 2025, arXiv 2503.01840; the equations: docs/guides/heads.md).

    The cache holds pairs of the target's features only. What the head feeds back to itself while it drafts is in the scratch,
    which is never committed: the same positions are read again from true features. Pairs wait until they are needed, and all
    but the last one cost only their keys and values.

    The settings are those of `TreeDrafter`.
    """

    def __init__(
        self,
        model: EagleModel,
        num_slots: int,
        max_length: int,
        *,
        shape: Callable[[Budget], Shape] | None = None,
        siblings: Siblings = Siblings.WITHOUT_REPLACEMENT,
        noise_aware: bool = True,
    ) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each."""
        super().__init__(
            model.new_cache(num_slots, max_length),
            model.vocab_size,
            model.device,
            subset=model.subset,
            shape=shape,
            siblings=siblings,
            noise_aware=noise_aware,
        )
        self.model, self.taps = model, model.taps
        # slot -> features [position, feature] that are not in the cache. The last of them is the root's pair.
        self._waiting: dict[int, Tensor] = {}
        # slot -> g of the children of each node in the scratch, [place, hidden]
        self._fed_back: dict[int, Tensor] = {}

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        if first == 0:
            self.release(slot)
        self._wait(slot, features, first)
        self._read([slot], [tokens])

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        self.error.learn(context.slots, commits)
        for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
            self._places.pop(slot, None)
            self._fed_back.pop(slot, None)
            if commit.features is not None and len(commit.features):
                self._wait(slot, commit.features, len(tokens) - 1 - len(commit.features))
                if len(self._waiting.get(slot, ())) > _READ:
                    self._read([slot], [tokens])

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.error.release(slot)
        for held in (self._places, self._fed_back, self._waiting):
            held.pop(slot, None)

    def _wait(self, slot: int, features: Tensor, first: int) -> None:
        """Keep features of the positions from `first` on. Without those before them, or beyond the head's length, nothing is
        kept: the sequence goes on without drafts."""
        held = self._waiting.get(slot)
        known = self.cache.length[slot] + (0 if held is None else len(held))
        if first != known or known + len(features) > self.cache.max_length:
            self._waiting.pop(slot, None)
            return
        self._waiting[slot] = features.clone() if held is None else torch.cat([held, features])

    def _read(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Commit the waiting pairs of these slots, all but the last of each. Returns g of the last ones, float32 [slot, hidden].

        texts: the committed tokens of each slot.
        """
        waiting = [self._waiting.get(slot) for slot in slots]
        some = [i for i, w in enumerate(waiting) if w is not None]
        if not some:
            return torch.empty(0)
        features = [w for w in waiting if w is not None]
        counts = [len(w) - 1 for w in features]
        g = self.model.fuse(torch.cat(features)).split([n + 1 for n in counts])
        more = [(i, n) for i, n in enumerate(counts) if n]
        if more:
            tokens: list[int] = []
            for i, n in more:
                first = self.cache.length[slots[some[i]]] + 1
                tokens += texts[some[i]][first : first + n]
            own = [slots[some[i]] for i, _ in more]
            ids = torch.tensor(tokens, device=self.device)
            self.model.read(self.cache, own, [n for _, n in more], ids, torch.cat([g[i][:-1] for i, _ in more]))
        for i, rows in zip(some, features, strict=True):
            self._waiting[slots[i]] = rows[-1:].clone()
        return torch.stack([rows[-1] for rows in g])

    def _drafted(self, context: DraftContext, some: list[int]) -> Draft:
        if not some or not all(self._is_chain(context, b) for b in some):
            return super()._drafted(context, some)
        proposals: list[list[int]] = [[] for _ in context.slots]
        for b, drawn in zip(some, self._chains(context, some), strict=True):
            proposals[b] = drawn
        return Draft(*chain([[t[-1], *p] for t, p in zip(context.tokens, proposals, strict=True)]))

    def _is_chain(self, context: DraftContext, b: int) -> bool:
        """Whether an only child is taken whatever its chance, which is then not computed."""
        budget = context.budgets[b]
        simple = budget.width == 1 and not budget.min_probability and not context.needs_probs
        return simple and self.noise_aware and self.shape is None

    def _chains(self, context: DraftContext, some: list[int]) -> list[list[int]]:
        """The chains that a tree of width 1 would be, with less around each forward."""
        drawn: list[list[int]] = [[] for _ in some]
        wanted = [min(context.budgets[b].depth, context.budgets[b].max_nodes) for b in some]
        logits, live = self._ingest(context, some), list(range(len(some)))
        fed = [self._fed_back[context.slots[b]] for b in some]
        entries, warp, noise, position = (
            some,
            context.warp.select(some),
            context.noise.select(some),
            context.positions[some],
        )
        for level in range(max(wanted)):
            if len(entries) != len(live):
                entries = [some[i] for i in live]
                warp, noise, position = (
                    context.warp.select(entries),
                    context.noise.select(entries),
                    context.positions[entries],
                )
            paths = [drawn[i] for i in live]
            tokens = warp.draw(logits, paths, noise, context.stream, position + level, self.subset).tolist()
            going: list[int] = []
            for i, token in zip(live, tokens, strict=True):
                if token >= 0:
                    drawn[i].append(token)
                    if len(drawn[i]) < wanted[i]:
                        going.append(i)
            if not going:
                break
            live = going
            feed = torch.tensor([drawn[i][-1:] for i in live])
            parents = torch.arange(-1, level + 1).repeat(len(live), 1)
            nodes = Nodes(feed, self.cache, [context.slots[some[i]] for i in live], parents)
            y = self.model.forward(nodes, torch.stack([fed[i] for i in live]))
            for i, new in zip(live, self.model.feedback(y), strict=True):
                fed[i] = new
            logits = self.model.logits(y[:, 0])
        return drawn

    def _room(self, slot: int, tokens: list[int]) -> int:
        waiting = self._waiting.get(slot)
        if waiting is None or self.cache.length[slot] + len(waiting) != len(tokens) - 1:
            return 0  # the target has not read enough: the first step of a prompt of one token
        return self.cache.max_length - len(tokens)

    def _ingest(self, context: DraftContext, some: list[int]) -> Tensor:
        slots = [context.slots[b] for b in some]
        g = self._read(slots, [context.tokens[b] for b in some])
        roots = torch.tensor([[context.tokens[b][-1]] for b in some])
        y = self.model.forward(Nodes(roots, self.cache, slots), g[:, None])
        self._fed_back = dict(zip(slots, self.model.feedback(y), strict=True))
        return self.model.logits(y[:, 0])

    def _forward(self, nodes: Nodes, lines: list[int], columns: list[int]) -> Tensor:
        assert nodes.parents is not None
        above = nodes.parents[:, nodes.held :].clamp_min(0).to(self.device)
        known = [self._fed_back[slot] for slot in nodes.slots]
        y = self.model.forward(nodes, torch.stack([g[up] for g, up in zip(known, above, strict=True)]))
        for slot, g, new in zip(nodes.slots, known, self.model.feedback(y), strict=True):
            self._fed_back[slot] = torch.cat([g, new])
        return self.model.logits(y[lines, columns])
