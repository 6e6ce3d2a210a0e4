"""Drafters under a planner: each sequence has a method, each method has drafters, and each step a plan.

A request chooses its method; `auto` is a method with several drafters. Lookups propose first, which costs next to nothing. The
planner then says which drafter drafts for which sequence, how deep, and which nodes are verified. A drafter that raises, or whose
draft breaks the contract, loses the sequence: the text goes on without drafts. Draft tokens that a grammar forbids are cut off
before the target reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from torch import Tensor

from outrider.control.beliefs import Offer
from outrider.control.planner import Charge, Plan, Planner, PlanNote, View
from outrider.core.params import BadParameter
from outrider.core.tree import levels, tree
from outrider.core.types import Budget, Commit, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, TargetPass
from outrider.drafters.combine.guard import Broken, check, legal, lend, trusted
from outrider.drafters.combine.merge import NodeList, SharedTaps, draft_confidence, join, own_commit, select
from outrider.drafters.lookup.mixture import Match

NONE = "none"


class PlannedDrafter(BaseDrafter):
    """Drafters by name, under a planner. `assign` gives a sequence its method; without it, it has `default`.

    lost: slots whose drafter failed -> how it failed. failures: so far.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        planner: Planner,
        vocab_size: int,
        lookups: Sequence[str] = (),
        methods: Mapping[str, Sequence[str]] | None = None,
        default: str | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """vocab_size: of the target. lookups: the drafters that cost next to nothing and propose in every step. methods: the
        drafters of each method that has several; every drafter is a method too. default: the method of a sequence that names
        none; all drafters if not given. tell: gets a message when a drafter fails; None lets it raise.

        Raises ValueError without a drafter, and for an object that lacks a drafter's methods.
        """
        if not drafters:
            raise ValueError('several methods need drafters; for example {"method": ["suffix", "draft_model"], ...}')
        for name, drafter in drafters.items():
            if not isinstance(drafter, Drafter):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"{name!r} is of type {type(drafter).__name__}, which is no drafter: it lacks taps, start, propose, update, "
                    "release, reset, missing, read or inner. Derive from outrider.drafters.BaseDrafter, which has all but propose"
                )
        self.drafters, self.planner, self.lookups = dict(drafters), planner, frozenset(lookups) & set(drafters)
        self.methods = {name: (name,) for name in drafters} | {
            name: tuple(own) for name, own in (methods or {}).items()
        }
        if default is None:
            default = next(iter(drafters)) if len(drafters) == 1 else "+".join(drafters)
            self.methods.setdefault(default, tuple(drafters))
        self.default, self.vocab_size, self.tell = default, vocab_size, tell
        self._shared = SharedTaps.of(drafters)
        self.taps = self._shared.taps
        self.lost: dict[int, str] = {}
        self.failures = 0
        self.assigned: dict[int, str] = {}  # methods by slot
        self._proposals: dict[tuple[str, int], NodeList] = {}  # (drafter, slot) -> what it proposed in this step
        self._charges: dict[int, list[Charge]] = {}  # by slot

    # -- methods --------------------------------------------------------------------------------------------------------

    def assign(self, slot: int, method: str | None) -> None:
        """Choose a sequence's method; None is the default. Raises ValueError for an unknown method."""
        method = self.default if method is None else method
        self.check_method(method)
        self.assigned[slot] = method

    def check_method(self, method: str) -> None:
        """Raise ValueError for a method that is not there."""
        if method != NONE and method not in self.methods:
            known = ", ".join(self.methods)
            raise BadParameter(f"there is no drafter {method[:80]!r} here; use one of: none, {known}", "method")

    def method(self, slot: int) -> str:
        """The name of a sequence's method."""
        return self.assigned.get(slot, self.default)

    def of_slot(self, slot: int) -> Sequence[str]:
        """The names of a sequence's drafters; none if it has none or lost them."""
        return () if slot in self.lost else self.methods.get(self.method(slot), ())

    # -- a drafter ------------------------------------------------------------------------------------------------------

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        for name in self.of_slot(slot):
            if name in self._shared.columns:
                own = self._shared.of_drafter(name, features)
                shown = tokens if trusted(self.drafters[name]) else list(tokens)
                self._guarded(name, [slot], lambda d, shown=shown, own=own: d.start(slot, shown, first, own))

    def propose(self, context: DraftContext) -> Draft:
        self._proposals, self._charges = {}, {}
        offered = self._offered(context)
        views = [self._view(context, b, offered) for b in range(len(context.slots))]
        plans = self.planner.plan(views)
        self._read(context, plans)
        made: list[tuple[Draft, int] | None] = [None] * len(plans)
        for name in dict.fromkeys(plan.drafter for plan in plans if plan.drafter is not None):
            some = [b for b, plan in enumerate(plans) if plan.drafter == name]
            if name in self.lookups:
                for b in some:
                    made[b] = offered[name, b]
            else:
                for b, draft, at in self._asked(name, context, some, [plans[b].budget for b in some]):
                    made[b] = draft, at
        return self._verified(context, views, plans, made)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        for name, drafter in self.drafters.items():
            some = [
                b
                for b, slot in enumerate(context.slots)
                if (name, slot) in self._proposals or (drafter.taps and name in self.of_slot(slot))
            ]
            if not some:
                continue
            own, seen = select(context, some), target.select(some)
            mine = [
                self._shared.commit(name, own_commit(commits[b], self._proposals.get((name, context.slots[b]))))
                for b in some
            ]
            self._guarded(name, own.slots, lambda d, own=own, mine=mine, seen=seen: lend(d, "update", own, mine, seen))

    def release(self, slot: int) -> None:
        self.assigned.pop(slot, None)
        self.lost.pop(slot, None)
        for name in self.drafters:
            self._guarded(name, [], lambda d: d.release(slot))

    def reset(self) -> None:
        for name in self.drafters:
            self._guarded(name, [], lambda d: d.reset())

    def inner(self) -> Mapping[str, Drafter]:
        return self.drafters

    # -- failures -------------------------------------------------------------------------------------------------------

    def lose(self, name: str, slots: Sequence[int], error: Exception) -> None:
        """Take these sequences from a drafter that failed. They go on without drafts. Raises the error if `tell` is None."""
        if self.tell is None:
            raise error
        self.failures += 1
        broken = isinstance(error, Broken)
        what = f"it broke the contract: {error}" if broken else f"it raised {type(error).__name__}"
        self.tell(
            f"the drafter {name!r} failed: {what if broken else f'{what}: {error}'}; the text goes on without drafts"
        )
        for slot in slots:
            self.lost[slot] = f"the drafter {name!r} failed ({what}); the rest of the text was written without drafts"

    def _guarded(self, name: str, slots: Sequence[int], act: Callable[..., None]) -> None:
        try:
            act(self.drafters[name])
        except Exception as error:
            self.lose(name, slots, error)

    # -- a step ---------------------------------------------------------------------------------------------------------

    def _offered(self, context: DraftContext) -> dict[tuple[str, int], tuple[Draft, int]]:
        """What lookups propose: (drafter, entry of the batch) -> a draft, and the entry's index in it."""
        found: dict[tuple[str, int], tuple[Draft, int]] = {}
        ask = [
            bool(budget.max_nodes and budget.depth) and self.planner.asks_lookups(slot)
            for slot, budget in zip(context.slots, context.budgets, strict=True)
        ]
        for name in self.lookups:
            some = [b for b, slot in enumerate(context.slots) if ask[b] and name in self.of_slot(slot)]
            if some:
                for b, draft, at in self._asked(name, context, some, [context.budgets[b] for b in some]):
                    found[name, b] = draft, at
        return found

    def _view(self, context: DraftContext, b: int, offered: Mapping[tuple[str, int], tuple[Draft, int]]) -> View:
        """What the planner may know of an entry of the batch."""
        slot, tokens, budget = context.slots[b], context.tokens[b], context.budgets[b]
        offers, missing = dict[str, Offer](), dict[str, int]()
        if budget.depth and budget.max_nodes:
            for name in self.of_slot(slot):
                if name not in self.lookups:
                    missing[name] = self._missing(name, slot, tokens)
                elif (name, b) in offered:
                    draft, at = offered[name, b]
                    nodes, note = draft.host[at], draft.notes[at] if draft.notes else None
                    masses = [max(m, 1e-9) for m in draft_confidence(draft, at, len(nodes)) or [1.0] * len(nodes)]
                    offers[name] = Offer(nodes, masses, note.length if isinstance(note, Match) else 0)
        return View(
            slot,
            len(tokens) - context.prompt_lengths[b],
            context.left[b] if context.left else budget.depth + 1,
            budget,
            offers,
            missing,
            self.planner.lengths is not None or slot in self.planner.depths,
        )

    def _missing(self, name: str, slot: int, tokens: list[int]) -> int:
        try:
            return self.drafters[name].missing(slot, tokens)
        except Exception as error:
            self.lose(name, [slot], error)
            return 0

    def _read(self, context: DraftContext, plans: Sequence[Plan]) -> None:
        """Let drafters read what their plans say."""
        for b, plan in enumerate(plans):
            if plan.read is not None:
                (name, count), slot, tokens, began = plan.read, context.slots[b], context.tokens[b], perf_counter()
                self._guarded(name, [slot], lambda d, s=slot, t=tokens, n=count: d.read(s, t, n))
                self._charges.setdefault(slot, []).append(Charge(name, 0, 0, count, perf_counter() - began))

    def _asked(
        self, name: str, context: DraftContext, some: list[int], budgets: list[Budget]
    ) -> list[tuple[int, Draft, int]]:
        """A drafter's proposals for some entries of the batch: (entry, draft, its index in the draft).

        If it fails, each entry is asked for alone, and only those that fail alone are lost.
        """
        drafter, own = self.drafters[name], replace(select(context, some), budgets=budgets)
        try:
            missed = sum(max(drafter.missing(s, t) - 1, 0) for s, t in zip(own.slots, own.tokens, strict=True))
            began = perf_counter()
            draft = lend(drafter, "propose", own)
            seconds = perf_counter() - began
            if not trusted(drafter):
                check(draft, own, self.vocab_size)
        except Exception as error:
            if self.tell is None:
                raise
            for slot in own.slots if not drafter.taps else ():  # a head would miss the features that it was given
                self._guarded(name, [], lambda d, slot=slot: d.release(slot))
            if len(some) > 1:
                return [found for b, budget in zip(some, budgets, strict=True)
                        for found in self._asked(name, context, [b], [budget])]  # fmt: skip
            self.lose(name, own.slots, error)
            return []
        for at, slot in enumerate(own.slots):
            self._proposals[name, slot] = draft.host[at]
        if name not in self.lookups:
            charge = Charge(name, len(some), max(max(levels([up for _, up in t])) for t in draft.host), missed, seconds)
            for slot in own.slots:
                self._charges.setdefault(slot, []).append(charge)
        return [(b, draft, at) for at, b in enumerate(some)]

    def _verified(
        self,
        context: DraftContext,
        views: Sequence[View],
        plans: Sequence[Plan],
        made: Sequence[tuple[Draft, int] | None],
    ) -> Draft:
        """One draft for the batch, with the nodes that are worth it, and notes."""
        survival = [self._survival(plan, one) for plan, one in zip(plans, made, strict=True)]
        drawn = [one is not None and one[0].probs is not None for one in made]
        views = [replace(v, drawn=True) if d else v for v, d in zip(views, drawn, strict=True)]
        kept = self.planner.verified(views, plans, survival)
        parts, notes = list[tuple[int, Draft, int]](), list[PlanNote]()
        for b, one in enumerate(made):
            slot, deep, line = context.slots[b], 0, list[float]()
            if one is not None:
                nodes = one[0].host[one[1]]
                depth = levels([parent for _, parent in nodes])
                deep = max(depth)
                for n, level in enumerate(depth[1:]):  # the likeliest node of each level
                    if level > len(line):
                        line.append(0.0)
                    line[level - 1] = max(line[level - 1], survival[b][n])
                part, shown = self._cut(context, b, one, kept[b])
                parts.append((b, *part))
            else:
                shown = 0
            notes.append(
                PlanNote(
                    plans[b],
                    views[b].offers,
                    line,
                    shown,
                    deep,
                    tuple(self._charges.get(slot, ())),
                    one is None or one[0].confidence is not None,
                )
            )
        return join(context, parts, notes)

    def _survival(self, plan: Plan, made: tuple[Draft, int] | None) -> list[float]:
        """The probability that each drafted node is accepted, the root left out."""
        if made is None or plan.drafter is None:
            return []
        draft, at = made
        nodes = draft.host[at]
        if plan.drafter in self.lookups:
            return list(plan.survival[1 : len(nodes)])
        stated = draft_confidence(draft, at, len(nodes))
        if stated is not None:
            return stated[1:]
        chance = self.planner.models[plan.drafter].chance
        return [chance**level for level in levels([parent for _, parent in nodes])[1:]]

    def _cut(
        self, context: DraftContext, b: int, made: tuple[Draft, int], kept: Sequence[int]
    ) -> tuple[tuple[Draft, int], int]:
        """A draft with the nodes that are kept and that a grammar allows, and its levels."""
        draft, at = made
        nodes = draft.host[at]
        masked = context.warp.histories[b].mask is not None and draft.probs is None
        if len(kept) == len(nodes) - 1 and not masked:
            return made, max(levels([parent for _, parent in nodes]))
        place = {0: 0} | {old: new for new, old in enumerate(kept, 1)}
        some = [nodes[0], *((nodes[n][0], place[nodes[n][1]]) for n in kept)]
        if masked:  # taking back a drawn token would change the distribution
            some = legal(context, b, some)
        return (Draft(*tree([some])), 0), max(levels([parent for _, parent in some]))
