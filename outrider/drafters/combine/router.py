"""Several drafters at once: each step decides by expected gain which of them drafts for a sequence.

The rule. Drafters without a cost (lookups) always propose. The worth of a proposal is the number of tokens it promises. That is
the sum of its confidences, times the share of such promises that were accepted lately. Where a drafter states no confidence, it
is the number of its nodes times their running acceptance rate.

A drafter with a cost (a model) is asked when

    (1 + its running accepted tokens) / (1 + its cost)  >  1 + the best promise without a cost,

with the cost in forwards of the target, at the number of levels where this is best. If it must first read tokens that it has
missed, what it saves until the expected end of the text must also cover twice the reading. It is asked for at most 1 + 2 * its
recent run of accepted tokens, so a good drafter soon reaches the full budget. A tree is joined with the other trees: the most
likely nodes of all within the budget stay. A chain is taken as it is.

A drafter that has made few proposals is asked at the beginning of each sequence. Later, one that was not asked for long is asked
again, if what drafters with a cost have gained, and a hundredth of all steps, cover what that may lose.

Only counts decide, never a clock: the same requests take the same way. The rule is our own; the promise of a text lookup
follows suffix decoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.control.expectation import geometric
from outrider.control.lengths import AnswerLengths
from outrider.core.tree import levels, tree
from outrider.core.types import Commit, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, TargetPass
from outrider.drafters.combine.merge import (
    NodeList,
    SharedTaps,
    accepted_path,
    draft_confidence,
    join,
    own_commit,
    select,
    united,
)

_MEMORY = 0.1  # weight of the newest step in a running mean
_PROBE = 24  # steps after which a drafter that lost is asked again
_FEW = 16  # proposals until which it is asked at the beginning of each sequence
_PRIOR = 2  # proposals that the first estimates count for
_READING = 1 / 8  # cost of reading a token in bulk, in levels of the drafter
_START = 4.0  # target forwards that asking again may lose at first
_ALLOWANCE = 0.01  # and the part of all steps that it may lose in addition, with what lately was gained
_MOST = 16.0  # and the sum of all three, at most


@dataclass(frozen=True)
class Offer:
    """What the router knew of one drafter in one step.

    promised: tokens that its proposal promises, None if it was not asked for that. accepted, cost: its running accepted tokens
    and its cost in target forwards, None for a drafter without a cost. retried: asked again only because it had waited long.
    """

    drafter: str
    promised: float | None = None
    accepted: float | None = None
    cost: float | None = None
    retried: bool = False

    def __str__(self) -> str:
        if self.promised is not None:
            return f"{self.drafter} promises {self.promised:.1f}"
        return f"{self.drafter} gave {self.accepted:.1f} for {self.cost:.2f} forwards" + (
            ", asked again" if self.retried else ""
        )


@dataclass(frozen=True)
class RouterNote:
    """Which drafter drafted for a sequence, and what was weighed. A note of `Draft.notes`."""

    chosen: str | None
    offers: tuple[Offer, ...]

    def __str__(self) -> str:
        return f"{self.chosen or 'none'} drafts: {'; '.join(map(str, self.offers)) or 'nothing to weigh'}"


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
    """What one drafter's proposals were worth lately, for one sequence or over all. Running means."""

    truth: float = 1.0  # accepted over promised tokens
    share: float = 0.5  # accepted over drafted nodes
    accepted: float = 2.0  # accepted tokens per step
    depth: float = 5.0  # levels of a proposal
    missed: float = 1.0  # share of steps in which the deepest draft token was not accepted
    seen: int = 0
    waited: int = 0

    def learn(self, accepted: int, nodes: NodeList, promised: float | None) -> None:
        drafted = len(nodes) - 1
        if not drafted:
            return
        self.seen += 1
        rate = max(_MEMORY, 1 / (self.seen + _PRIOR))
        depth = max(_depths(nodes))
        self.accepted += rate * (accepted - self.accepted)
        self.depth += rate * (depth - self.depth)
        self.missed += rate * ((accepted < depth) - self.missed)
        self.share += rate * (accepted / drafted - self.share)
        if promised:
            self.truth += rate * (min(accepted / promised, 4.0) - self.truth)

    @property
    def levels(self) -> int:
        """The number of levels worth asking for: about twice the run of accepted tokens between two rejections.

        A step in which all tokens were accepted does not show where the run ends. So the run is counted over several steps.
        """
        return 1 + int(2 * self.accepted / max(self.missed, 0.05))

    def best(self, deepest: int, cost: float) -> tuple[float, float]:
        """The number of levels with the largest expected gain, and that gain, in tokens per target forward.

        Each token is taken to be accepted with the chance that gives the running mean. A drafter may end its proposals early:
        a level costs as often as it was drafted lately. cost: of a level, in target forwards.
        """
        alpha = self.accepted / (1 + self.accepted)
        best = 0.0, 1.0
        for depth in range(1, deepest + 1):
            levels = min(float(depth), max(self.depth, 1.0))
            best = max(best, (levels, (1 + sum(geometric(alpha, depth))) / (1 + cost * levels)), key=lambda x: x[1])
        return best

    def promise(self, nodes: NodeList, confidence: Sequence[float] | None) -> float:
        return self.share * (len(nodes) - 1) if confidence is None else self.truth * sum(confidence[1:])

    def believed(self, proposal: _Proposal) -> list[float]:
        """The acceptance probability of each node: the stated confidence, corrected by the share that was accepted lately.

        Without a stated confidence it is the running acceptance to the power of the level.
        """
        if proposal.confidence is not None:
            return [min(self.truth * stated, 1.0) for stated in proposal.confidence]
        return [self.share**level for level in _depths(proposal.nodes)]


def _depths(nodes: NodeList) -> list[int]:
    return levels([parent for _, parent in nodes])


class DrafterRouter(BaseDrafter):
    """Drafters by name, in the order of preference among equals. cost: target forwards per draft level, 0 for lookups."""

    def __init__(self, drafters: Mapping[str, Drafter], cost: Mapping[str, float] | None = None) -> None:
        """Raises ValueError without a drafter."""
        if not drafters:
            raise ValueError('a router needs drafters; for example {"method": ["suffix", "draft_model"], "model": ...}')
        self.drafters, self.cost = dict(drafters), dict(cost or {})
        self._shared = SharedTaps.of(drafters)
        self.taps = self._shared.taps
        self._records: dict[tuple[int, str], _Record] = {}
        self._pooled = {name: _Record() for name in drafters}
        self._lengths = AnswerLengths()
        self._written: dict[int, int] = {}  # tokens of each answer so far
        self._room = _START  # target forwards that asking again may lose
        self._read: dict[tuple[int, str], int] = {}  # committed tokens that a drafter with a cost has read
        self._asked: dict[int, float] = {}  # by slot: what asking cost in the last step
        self._proposals: dict[int, list[_Proposal]] = {}  # by slot, of the last step
        self._nodes: dict[tuple[int, str], NodeList] = {}  # what each asked drafter returned, the root alone too

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        for name in self._shared.columns:
            self.drafters[name].start(slot, tokens, first, self._shared.of_drafter(name, features))

    def propose(self, context: DraftContext) -> Draft:
        self._proposals, self._nodes, self._asked = {}, {}, {}
        free = [name for name in self.drafters if not self.cost.get(name)]
        costly = [name for name in self.drafters if self.cost.get(name)]
        found: list[list[_Proposal]] = [[] for _ in context.slots]
        for name in free:
            self._ask(name, context, list(range(len(context.slots))), found)
        offers = [[Offer(p.name, p.worth) for p in proposals] for proposals in found]
        for name in costly:
            some = [b for b in range(len(context.slots)) if self._pays(name, context, b, found[b], offers[b])]
            if some:
                self._ask(name, context, some, found)
        parts: list[tuple[int, Draft, int]] = []
        notes: list[RouterNote] = []
        for b, slot in enumerate(context.slots):
            self._proposals[slot] = found[b]
            chosen = self._chosen(context, b, found[b]) if found[b] else None
            if chosen is not None:
                parts.append((b, chosen.draft, chosen.row))
            notes.append(RouterNote(chosen.name if chosen else None, tuple(offers[b])))
        return join(context, parts, notes)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        own: dict[str, list[Commit]] = {name: [] for name in self.drafters}
        drafted = any(budget.depth and budget.max_nodes for budget in context.budgets)
        for slot, commit in zip(context.slots, commits, strict=True):
            for name, into in own.items():
                nodes = self._nodes.pop((slot, name), None)
                into.append(self._shared.commit(name, own_commit(commit, nodes)))
            self._account(slot, commit)
            proposals = self._proposals.pop(slot, [])
            for p in (
                proposals if commit.finish is None else ()
            ):  # a text cut at its end does not show what was rejected
                promised = None if p.confidence is None else sum(p.confidence[1:])
                for record in (self._record(slot, p.name), self._pooled[p.name]):
                    record.learn(len(accepted_path(p.nodes, commit.tokens)) - 1, p.nodes, promised)
        for name, drafter in self.drafters.items():
            if drafted or drafter.taps:
                drafter.update(context, own[name], target)

    def release(self, slot: int) -> None:
        for name, drafter in self.drafters.items():
            drafter.release(slot)
            self._records.pop((slot, name), None)
            self._nodes.pop((slot, name), None)
            self._read.pop((slot, name), None)
        self._proposals.pop(slot, None)
        if slot in self._written:
            self._lengths.observe(self._written.pop(slot))

    def reset(self) -> None:
        """Let each drafter forget what it has read. What its proposals were worth stays known."""
        for drafter in self.drafters.values():
            drafter.reset()

    def inner(self) -> Mapping[str, Drafter]:
        return self.drafters

    def _record(self, slot: int, name: str) -> _Record:
        """A new sequence starts from the record over all sequences, with enough weight to outlast its first steps."""
        known = self._pooled[name]
        waited = _PROBE if known.seen < _FEW else 0
        start = replace(known, seen=min(known.seen, round(1 / _MEMORY)), waited=waited)
        return self._records.setdefault((slot, name), start)

    def _ask(self, name: str, context: DraftContext, some: list[int], found: list[list[_Proposal]]) -> None:
        asked = select(context, some)
        if self.cost.get(name):
            budgets = zip(asked.slots, asked.budgets, strict=True)
            asked = replace(asked, budgets=[b.clipped(self._record(slot, name).levels) for slot, b in budgets])
            for slot, tokens in zip(asked.slots, asked.tokens, strict=True):
                self._read[slot, name] = len(tokens)
        draft = self.drafters[name].propose(asked)
        for at, b in enumerate(some):
            nodes = self._nodes[context.slots[b], name] = draft.host[at]
            if len(nodes) > 1:
                record = self._record(context.slots[b], name)
                record.waited = 0
                confidence = draft_confidence(draft, at, len(nodes))
                found[b].append(_Proposal(name, draft, at, nodes, confidence, record.promise(nodes, confidence)))

    def _pays(self, name: str, context: DraftContext, b: int, found: Sequence[_Proposal], offers: list[Offer]) -> bool:
        """Whether a drafter with a cost is worth asking for this sequence."""
        budget = context.budgets[b]
        record = self._record(context.slots[b], name)
        deepest = min(budget.depth, budget.max_nodes, record.levels)
        if not deepest:
            return False
        levels, gain = record.best(deepest, self.cost[name])
        free = 1 + max((p.worth for p in found), default=0.0)
        reading, price = self._reading(name, context, b), self.cost[name] * max(levels, 1.0)
        saved = self._lengths.remaining(len(context.tokens[b]) - context.prompt_lengths[b]) * (1 / free - 1 / gain)
        record.waited += 1
        first = self._pooled[name].seen < _FEW
        again = record.waited > _PROBE and (first or self._room > reading + price)
        pays = saved > 2 * reading
        offers.append(Offer(name, accepted=record.accepted, cost=price, retried=again and not pays))
        if (again or pays) and not first:
            self._asked[context.slots[b]] = self._asked.get(context.slots[b], 0.0) + reading + price
        return again or pays

    def _reading(self, name: str, context: DraftContext, b: int) -> float:
        """Target forwards that it costs a drafter to read the tokens of a sequence that it has missed."""
        if name in self._shared.columns:  # it reads every step
            return 0.0
        return self.cost[name] * _READING * (len(context.tokens[b]) - self._read.get((context.slots[b], name), 0))

    def _account(self, slot: int, commit: Commit) -> None:
        """Count a step of a sequence: its tokens, and what asking drafters with a cost gained or lost."""
        self._written[slot] = self._written.get(slot, 0) + len(commit.tokens)
        gained = commit.num_accepted - self._asked.pop(slot) if slot in self._asked else 0.0
        self._room = min(max(self._room + gained + _ALLOWANCE * len(commit.tokens), 0.0), _MOST)

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
    """The drafter of a router with the highest cost. A drafter that is no router, or has no costs, is returned itself."""
    if not isinstance(drafter, DrafterRouter) or not any(drafter.cost.values()):
        return drafter
    return drafter.drafters[max(drafter.cost, key=drafter.cost.__getitem__)]
