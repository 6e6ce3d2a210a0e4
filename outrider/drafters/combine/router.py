"""Several drafters at once: who guesses for a row is decided each step, by expected gain.

The rule. Drafters that cost nothing (texts) always propose. A proposal is worth the tokens its nodes promise: the sum of the
chances it states, times how far such promises came true lately; or, where it states none, its nodes times their
running acceptance. A drafter that costs (models) is asked when

    (1 + its running accepted tokens) / (1 + its cost)  >  1 + the best free promise,

its cost in forwards of the target, and for no more levels than pay: one, and twice as many as it lately made true before a
guess was wrong, so that who guesses well soon has all. (The budget may have been earned by a text.) Its tree is then joined
with the free ones, the likeliest nodes by the same measure within the budget; a chain is taken as it is. A drafter that has
not been asked for long is asked again now and then. Only counts decide, never a clock: the same requests take the same ways.
The draft's notes say what was weighed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.tree import levels, tree
from outrider.core.types import Commit, Draft
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.combine.merge import NodeList, draft_confidence, draft_nodes, join, select, united, walked

_MEMORY = 0.1  # weight of the newest step in a running mean
_PROBE = 24  # steps after which a drafter that lost is asked again


@dataclass
class _Proposal:
    name: str
    draft: Draft
    row: int
    nodes: NodeList
    confidence: list[float] | None
    worth: float


@dataclass
class _Record:
    """What one drafter's guesses were worth lately, for one row or over all."""

    truth: float = 1.0  # accepted over promised
    share: float = 0.5  # accepted over drafted nodes
    accepted: float = 2.0  # accepted a step
    missed: float = 1.0  # steps of which the last guess was not right, of all
    seen: int = 0
    waited: int = 0

    def learn(self, accepted: int, nodes: NodeList, promised: float | None) -> None:
        drafted = len(nodes) - 1
        if not drafted:
            return
        self.seen += 1
        rate = max(_MEMORY, 1 / (self.seen + 1))
        self.accepted += rate * (accepted - self.accepted)
        self.missed += rate * ((accepted < max(_depths(nodes))) - self.missed)
        self.share += rate * (accepted / drafted - self.share)
        if promised:
            self.truth += rate * (min(accepted / promised, 4.0) - self.truth)

    @property
    def levels(self) -> int:
        """As many as it is worth asking for. That all were right tells of no end: what is counted is the run between two
        that were wrong, whatever was asked for."""
        return 1 + int(2 * self.accepted / max(self.missed, 0.05))

    def promise(self, nodes: NodeList, confidence: Sequence[float] | None) -> float:
        return self.share * (len(nodes) - 1) if confidence is None else self.truth * sum(confidence[1:])

    def believed(self, proposal: _Proposal) -> list[float]:
        """Chances by node: those stated, as far as they came true lately; else the running acceptance to the power of the
        level."""
        if proposal.confidence is not None:
            return [min(self.truth * chance, 1.0) for chance in proposal.confidence]
        return [self.share**level for level in _depths(proposal.nodes)]


def _depths(nodes: NodeList) -> list[int]:
    return levels([parent for _, parent in nodes])


class DrafterRouter:
    """Drafters by name, in the order of preference among equals. cost: forwards of the target per drafted level, 0 for texts."""

    def __init__(self, drafters: Mapping[str, Drafter], cost: Mapping[str, float] | None = None) -> None:
        """Raises ValueError without a drafter, and when two of them tap the target's layers."""
        if not drafters:
            raise ValueError('a router needs drafters; for example {"method": ["suffix", "draft_model"], "model": ...}')
        self.drafters, self.cost = dict(drafters), dict(cost or {})
        tapping = [name for name, d in drafters.items() if d.taps]
        if len(tapping) > 1:
            raise ValueError(f"{' and '.join(tapping)} both read the target's layers; choose one of them")
        self.taps = drafters[tapping[0]].taps if tapping else ()
        self._tapping = set(tapping)
        self._records: dict[tuple[int, str], _Record] = {}
        self._pooled = {name: _Record() for name in drafters}
        self._asked: dict[int, list[_Proposal]] = {}
        if any(hasattr(d, "watch") for d in drafters.values()):
            self.watch = self._watch

    def propose(self, context: DraftContext) -> Draft:
        self._asked = {}
        free = [name for name in self.drafters if not self.cost.get(name)]
        dear = [name for name in self.drafters if self.cost.get(name)]
        found: list[list[_Proposal]] = [[] for _ in context.slots]
        for name in free:
            self._ask(name, context, list(range(len(context.slots))), found)
        weighed = [[f"{p.name} promises {p.worth:.1f}" for p in proposals] for proposals in found]
        for name in dear:
            some = [b for b in range(len(context.slots)) if self._pays(name, context, b, found[b], weighed[b])]
            if some:
                self._ask(name, context, some, found)
        parts: list[tuple[int, Draft, int]] = []
        notes: list[str] = []
        for b, row in enumerate(context.slots):
            self._asked[row] = found[b]
            proposal = self._chosen(context, b, found[b]) if found[b] else None
            if proposal is not None:
                parts.append((b, proposal.draft, proposal.row))
            who = "nobody" if proposal is None else proposal.name
            notes.append(f"{who} guesses: {'; '.join(weighed[b]) or 'nothing to weigh'}")
        return join(context, parts, notes)

    def update(self, context: DraftContext, kept: Sequence[Commit], features: Tensor | None) -> None:
        for row, one in zip(context.slots, kept, strict=True):
            asked = self._asked.pop(row, [])
            for p in asked if one.finish is None else ():  # a cut says nothing of what was refused
                accepted = len(walked(p.nodes, one.tokens)) - 1
                promised = None if p.confidence is None else sum(p.confidence[1:])
                for record in (self._record(row, p.name), self._pooled[p.name]):
                    record.learn(accepted, p.nodes, promised)
        for name, drafter in self.drafters.items():
            drafter.update(context, kept, features if name in self._tapping else None)

    def release(self, row: int) -> None:
        for name, drafter in self.drafters.items():
            drafter.release(row)
            self._records.pop((row, name), None)
        self._asked.pop(row, None)

    def forget(self) -> None:
        """What the drafters' guesses were worth so far."""
        self._records.clear()
        self._pooled = {name: _Record() for name in self.drafters}

    def _watch(self, context: DraftContext, draft: Draft, logits: Tensor) -> None:
        for drafter in self.drafters.values():
            watch: Any = getattr(drafter, "watch", None)
            if watch is not None:
                watch(context, draft, logits)

    def _record(self, row: int, name: str) -> _Record:
        """A new row starts from what all rows have taught, which its first steps do not overturn."""
        known = self._pooled[name]
        start = _Record(known.truth, known.share, known.accepted, known.missed, min(known.seen, round(1 / _MEMORY)))
        return self._records.setdefault((row, name), start)

    def _ask(self, name: str, context: DraftContext, some: list[int], found: list[list[_Proposal]]) -> None:
        asked = select(context, some)
        if self.cost.get(name):
            budgets = zip(asked.slots, asked.budgets, strict=True)
            asked = replace(asked, budgets=[b.clipped(self._record(row, name).levels) for row, b in budgets])
        draft = self.drafters[name].propose(asked)
        for at, b in enumerate(some):
            nodes = draft_nodes(draft, at)
            if len(nodes) > 1:
                record = self._record(context.slots[b], name)
                record.waited = 0
                confidence = draft_confidence(draft, at, len(nodes))
                found[b].append(_Proposal(name, draft, at, nodes, confidence, record.promise(nodes, confidence)))

    def _pays(self, name: str, context: DraftContext, b: int, found: Sequence[_Proposal], weighed: list[str]) -> bool:
        """Whether a drafter that costs is worth asking for this row."""
        budget = context.budgets[b]
        record = self._record(context.slots[b], name)
        levels = min(budget.depth, budget.max_nodes, record.levels)
        if not levels:
            return False
        cost = self.cost[name] * levels
        free = max((p.worth for p in found), default=0.0)
        record.waited += 1
        again = record.waited > _PROBE
        weighed.append(
            f"{name} gave {record.accepted:.1f} for {cost:.2f} forwards" + (", asked again" if again else "")
        )
        return again or (1 + min(record.accepted, levels)) / (1 + cost) > 1 + free

    def _chosen(self, context: DraftContext, b: int, proposals: list[_Proposal]) -> _Proposal:
        """The best of the proposals, or the tree of their likeliest nodes."""
        best = max(proposals, key=lambda p: p.worth)
        budget = context.budgets[b]
        if len(proposals) == 1 or budget.width == 1 or context.needs_probs:
            return best
        records = [self._record(context.slots[b], p.name) for p in proposals]
        weighted = [(p.nodes, r.believed(p)) for p, r in zip(proposals, records, strict=True)]
        nodes, confidence = united(weighted, budget.max_nodes)
        tokens, parents = tree([nodes])
        draft = Draft(tokens, parents, confidence=torch.tensor([confidence]))
        return _Proposal(" + ".join(p.name for p in proposals), draft, 0, nodes, confidence, sum(confidence[1:]))


def most_expensive(drafter: Drafter) -> Drafter:
    """Of several drafters the one that costs most, if one costs anything; else the drafter itself."""
    if not isinstance(drafter, DrafterRouter) or not any(drafter.cost.values()):
        return drafter
    return drafter.drafters[max(drafter.cost, key=drafter.cost.__getitem__)]
