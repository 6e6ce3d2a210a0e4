"""Drafters under a planner: each sequence has a method, each method has drafters, and each step a plan.

A request chooses its method; `auto` is a method with several drafters. Lookups propose first, which costs next to nothing. The
planner then says which drafter drafts for which sequence, how deep, and which nodes are verified. A drafter that raises, or whose
draft breaks the contract, loses the sequence: the text goes on without drafts. Draft tokens that a grammar forbids are cut off
before the target reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any

from outrider.control.plan import Charge, Offer, Plan, PlanNote, View
from outrider.control.planner import RARELY, Planner
from outrider.core.params import BadParameter
from outrider.core.types import Array, Budget, Commit, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, TargetPass
from outrider.drafters.contract import Broken, accept, check, lend
from outrider.drafters.method import NONE, PREDICTION
from outrider.drafters.proposal import NodeList, Proposal, SharedTaps, cut, join, legal, own_commit


class PlannedDrafter(BaseDrafter):
    """Drafters by name, under a planner.

    assigned: slots -> the method of their sequences, one that `method` named; `default` where there is none.
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
        trusted: Collection[str] = (),
    ) -> None:
        """
        Args:
            drafters: By name.
            planner: Of these drafters.
            vocab_size: Of the target.
            lookups: Drafters that cost next to nothing and propose in every step.
            methods: The drafters of each method that has several. Every drafter is a method too.
            default: The method of a sequence that names none; all drafters if not given.
            tell: Gets a message when a drafter fails; None lets it raise.
            trusted: Drafters of this package. Drafts of others are checked, and they get copies of the committed tokens.

        Raises ValueError without a drafter, and for an object that lacks a drafter's methods.
        """
        if not drafters:
            raise ValueError('several methods need drafters; for example {"method": ["suffix", "draft_model"], ...}')
        for name, drafter in drafters.items():
            accept(name, drafter)
        self.drafters, self.planner, self.lookups = dict(drafters), planner, frozenset(lookups) & set(drafters)
        self.methods = {name: (name,) for name in drafters} | {
            n: tuple(members) for n, members in (methods or {}).items()
        }
        if default is None:
            default = next(iter(drafters)) if len(drafters) == 1 else "+".join(drafters)
            self.methods.setdefault(default, tuple(drafters))
        self.default, self.vocab_size, self.tell = default, vocab_size, tell
        self._shared, self._foreign = SharedTaps.of(drafters), frozenset(drafters).difference(trusted)
        self._updated = {
            n: d for n, d in drafters.items() if getattr(d.update, "__func__", None) is not BaseDrafter.update
        }
        self.taps, self.failures = self._shared.taps, 0
        self.assigned, self.lost = dict[int, str](), dict[int, str]()
        self._proposals = dict[tuple[str, int], NodeList]()  # (drafter, slot) -> what it proposed in this step
        self._charges = list[Charge]()  # of this step

    def method(self, asked: str | None, predicts: bool = False) -> str:
        """The method of a request that asks for one, or for none: then it is the default. One that brings a prediction gets the
        drafter for predictions, where the default has none. Raises ValueError for an unknown method."""
        if asked is None:
            usual = self.methods.get(self.default, ())
            return PREDICTION if predicts and PREDICTION in self.drafters and PREDICTION not in usual else self.default
        if asked != NONE and asked not in self.methods:
            names = ", ".join(self.methods)
            raise BadParameter(f"there is no drafter {asked[:80]!r} here; use one of: none, {names}", "method")
        return asked

    def of_slot(self, slot: int) -> Sequence[str]:
        """The names of a sequence's drafters; none if it has none or lost them."""
        return () if slot in self.lost else self.methods.get(self.assigned.get(slot, self.default), ())

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Array) -> None:
        for name in self.of_slot(slot):
            if name in self._shared.columns:
                shown = list(tokens) if name in self._foreign else tokens
                tapped = self._shared.of_drafter(name, features)
                self._guarded(name, [slot], self.drafters[name].start, slot, shown, first, tapped)

    def propose(self, context: DraftContext) -> Draft:
        self._proposals, self._charges = {}, []
        every = [self._drafters(context, b) for b in range(len(context.slots))]
        offered = self._offered(context, every)
        views = [self._view(context, b, names, offered) for b, names in enumerate(every)]
        plans = self.planner.plan(views, context.waiting)
        for slot, tokens, plan in zip(context.slots, context.tokens, plans, strict=True):
            if plan.read is not None:
                (name, count), began = plan.read, perf_counter()
                self._guarded(name, [slot], self.drafters[name].read, slot, tokens, count)
                self._charges.append(Charge(name, 0, 0, count, perf_counter() - began))
        proposals = dict[int, Proposal]()
        for name in dict.fromkeys(plan.drafter for plan in plans if plan.drafter is not None):
            budgets = {b: plan.budget for b, plan in enumerate(plans) if plan.drafter == name}
            if name in self.lookups:
                proposals |= {b: offered[name, b] for b in budgets}
            else:
                proposals |= self._asked(name, context, budgets, views)
        verified = {b: self._verified(context, b, plans[b], one) for b, one in proposals.items()}
        notes = list[PlanNote]()
        for b, (plan, view) in enumerate(zip(plans, views, strict=True)):
            stated = b not in proposals or proposals[b].confidence is not None
            deep = max(verified[b].levels) if b in verified else 0
            notes.append(PlanNote(plan, view.offers, deep, self._charges, stated))
        return join(context, verified, notes)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        for name, drafter in self._updated.items():
            some = [
                b
                for b, slot in enumerate(context.slots)
                if (name, slot) in self._proposals
                or (drafter.taps and name in self.of_slot(slot) and commits[b].features is not None)
            ]
            if some:
                selected = context.select(some)
                mine = [own_commit(commits[b], self._proposals.get((name, context.slots[b]))) for b in some]
                if self.taps:
                    mine = [self._shared.commit(name, commit) for commit in mine]
                call = (lend, drafter.update) if name in self._foreign else (drafter.update,)
                self._guarded(name, selected.slots, *call, selected, mine, target.select(some))

    def release(self, slot: int) -> None:
        self.assigned.pop(slot, None)
        self.lost.pop(slot, None)
        for name in self.drafters:
            self._guarded(name, [], self.drafters[name].release, slot)

    def reset(self) -> None:
        for name in self.drafters:
            self._guarded(name, [], self.drafters[name].reset)

    def inner(self) -> Mapping[str, Drafter]:
        return self.drafters

    def lose(self, name: str, slots: Sequence[int], error: Exception) -> None:
        """Take these sequences from a drafter that failed. They go on without drafts. Raises the error if `tell` is None."""
        if self.tell is None:
            raise error
        self.failures += 1
        what, more = f"it raised {type(error).__name__}", f": {error}"
        if isinstance(error, Broken):
            what, more = f"it broke the contract: {error}", ""
        self.tell(f"the drafter {name!r} failed: {what}{more}; the text goes on without drafts")
        for slot in slots:
            self.lost[slot] = f"the drafter {name!r} failed ({what}); the rest of the text was written without drafts"

    def _guarded(self, name: str, slots: Sequence[int], act: Callable[..., Any], *arguments: Any) -> Any:
        """What the act returns. If it raises, the drafter loses these sequences, and None is returned."""
        try:
            return act(*arguments)
        except Exception as error:
            self.lose(name, slots, error)

    def _drafters(self, context: DraftContext, b: int) -> Sequence[str]:
        """The names of those that may draft for an entry of the batch now. The first token waits for no draft, unless drafts of
        one length are asked for."""
        slot, budget = context.slots[b], context.budgets[b]
        began = len(context.tokens[b]) > context.prompt_lengths[b] or self._fixed(slot)
        return self.of_slot(slot) if began and budget.depth and budget.max_nodes else ()

    def _offered(self, context: DraftContext, every: Sequence[Sequence[str]]) -> dict[tuple[str, int], Proposal]:
        """What lookups propose, by drafter and entry of the batch. every: the drafters of each entry."""
        offers, asking = dict[tuple[str, int], Proposal](), list[int]()
        for b, (slot, history) in enumerate(zip(context.slots, context.warp.histories, strict=True)):
            if every[b] and self.planner.asks_lookups(slot, history.mask is not None):
                asking.append(b)
        for name in self.lookups if asking else ():
            if name != PREDICTION or any(context.predictions) or getattr(self.drafters[name], "prediction", True):
                budgets = {b: context.budgets[b] for b in asking if name in every[b]}
                if budgets:
                    offers |= {(name, b): one for b, one in self._asked(name, context, budgets).items()}
        return offers

    def _view(
        self, context: DraftContext, b: int, names: Sequence[str], offered: Mapping[tuple[str, int], Proposal]
    ) -> View:
        """What the planner may know of an entry of the batch. names: of its drafters."""
        slot, tokens, budget = context.slots[b], context.tokens[b], context.budgets[b]
        offers, missing, written = dict[str, Offer](), dict[str, int](), len(tokens) - context.prompt_lengths[b]
        for name in names:
            if (name, b) in offered:
                offers[name] = offered[name, b].offer
            elif name not in self.lookups and (written or len(tokens) <= RARELY):
                missing[name] = self._guarded(name, [slot], self.drafters[name].missing, slot, tokens) or 0
        left = context.left[b] if context.left else budget.depth + 1
        return View(slot, written, left, budget, offers, missing, self._fixed(slot), len(tokens))

    def _fixed(self, slot: int) -> bool:
        """Drafts of this sequence have one length."""
        return self.planner.lengths is not None or slot in self.planner.depths

    def _asked(
        self, name: str, context: DraftContext, budgets: Mapping[int, Budget], views: Sequence[View] = ()
    ) -> dict[int, Proposal]:
        """A drafter's proposals for some entries of the batch, within these budgets. views: of all entries; a lookup needs none.
        If it fails, each entry is asked for alone, and only those that fail alone are lost."""
        drafter, selected = self.drafters[name], context.select([*budgets]).but(budgets=[*budgets.values()])
        began = perf_counter()
        try:
            draft = lend(drafter.propose, selected) if name in self._foreign else drafter.propose(selected)
            seconds = perf_counter() - began
            if name in self._foreign:
                check(draft, selected, self.vocab_size)
        except Exception as error:
            if len(budgets) == 1 or self.tell is None:
                self.lose(name, selected.slots, error)
            if not drafter.taps:  # a head would miss the features that it was given
                for slot in selected.slots:
                    self._guarded(name, [], drafter.release, slot)
            alone = [{b: budget} for b, budget in budgets.items()] if len(budgets) > 1 else []
            return {b: one for some in alone for b, one in self._asked(name, context, some, views).items()}
        proposals = {b: Proposal(draft, entry) for entry, b in enumerate(budgets)}
        if name in self._updated:
            self._proposals |= {(name, context.slots[b]): one.nodes for b, one in proposals.items()}
        if name not in self.lookups:
            deepest = max(max(one.levels) for one in proposals.values())
            missed = sum(max(views[b].missing[name] - 1, 0) for b in budgets)
            self._charges.append(Charge(name, len(proposals), deepest, missed, seconds))
        return proposals

    def _verified(self, context: DraftContext, b: int, plan: Plan, one: Proposal) -> Proposal:
        """The nodes of a proposal that are worth it and legal. A drawn token stays: without it the distribution would change."""
        if one.draft.probs is not None or plan.chosen is None:
            return one
        stated = [1.0, *plan.chosen.survival] if plan.chosen.survival else one.confidence
        least, tree = plan.chosen.least, {0}  # a node goes with its parent
        for n, (_, parent) in enumerate(one.nodes[1:], 1):
            if parent in tree and (stated is None or stated[n] >= least):
                tree.add(n)
        nodes = sorted(tree)[1:]
        if context.warp.histories[b].mask is not None:
            nodes = legal(context, b, one.nodes, nodes)
        return one if len(nodes) == len(one.nodes) - 1 else cut(one, nodes)
