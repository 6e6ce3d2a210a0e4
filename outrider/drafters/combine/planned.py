"""Drafters under a planner: each sequence has a method, each method has drafters, and each step a plan.

A request chooses its method; `auto` is a method with several drafters. Lookups propose first, which costs next to nothing. The
planner then says which drafter drafts for which sequence, how deep, and which nodes are verified. A drafter that raises, or whose
draft breaks the contract, loses the sequence: the text goes on without drafts. Draft tokens that a grammar forbids are cut off
before the target reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from outrider.control.beliefs import Offer
from outrider.control.planner import Charge, Plan, Planner, PlanNote, View
from outrider.core.params import BadParameter
from outrider.core.tree import levels, lists, validate
from outrider.core.types import Budget, Commit, Draft, Siblings
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, TargetPass, draft_of
from outrider.drafters.combine.merge import NodeList, Proposal, SharedTaps, join, own_commit
from outrider.drafters.method import NONE, PREDICTION


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
    ) -> None:
        """vocab_size: of the target. lookups: the drafters that cost next to nothing and propose in every step. methods: the
        drafters of each method that has several; every drafter is a method too. default: the method of a sequence that names
        none; all drafters if not given. tell: gets a message when a drafter fails; None lets it raise.

        Raises ValueError without a drafter, and for an object that lacks a drafter's methods.
        """
        if not drafters:
            raise ValueError('several methods need drafters; for example {"method": ["suffix", "draft_model"], ...}')
        for name, drafter in drafters.items():
            if isinstance(drafter, type):
                raise ValueError(
                    f"{drafter.__name__} is a class, and a drafter is an object: drafter={drafter.__name__}()"
                )
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
        self._foreign = {name for name, drafter in drafters.items() if not trusted(drafter)}
        self._updated = {
            n: d for n, d in drafters.items() if getattr(d.update, "__func__", None) is not BaseDrafter.update
        }
        self.taps = self._shared.taps
        self.lost: dict[int, str] = {}
        self.failures = 0
        self.assigned: dict[int, str] = {}
        self._known: dict[int, int] = {}  # tokens of a prompt whose features came, by slot
        self._proposals: dict[tuple[str, int], NodeList] = {}  # (drafter, slot) -> what it proposed in this step
        self._charges: dict[int, list[Charge]] = {}  # by slot

    # -- methods --------------------------------------------------------------------------------------------------------

    def method(self, asked: str | None, predicts: bool = False) -> str:
        """The method of a request that asks for one, or for none: then it is the default. One that brings a prediction gets the
        drafter for predictions, where the default has none. Raises ValueError for an unknown method."""
        if asked is None:
            own = self.methods.get(self.default, ())
            return PREDICTION if predicts and PREDICTION in self.drafters and PREDICTION not in own else self.default
        if asked != NONE and asked not in self.methods:
            known = ", ".join(self.methods)
            raise BadParameter(f"there is no drafter {asked[:80]!r} here; use one of: none, {known}", "method")
        return asked

    def of_slot(self, slot: int) -> Sequence[str]:
        """The names of a sequence's drafters; none if it has none or lost them."""
        return () if slot in self.lost else self.methods.get(self.assigned.get(slot, self.default), ())

    def replace_drafter(self, name: str, drafter: Drafter) -> None:
        """Draft with this one, which reads the same layers, under that name. Texts that run have no drafts of it."""
        self.drafters[name] = drafter

    # -- a drafter ------------------------------------------------------------------------------------------------------

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        self._known[slot] = first + len(features)
        for name in self.of_slot(slot):
            if name in self._shared.columns:
                shown = list(tokens) if name in self._foreign else tokens
                own = self._shared.of_drafter(name, features)
                self._guarded(name, [slot], self.drafters[name].start, slot, shown, first, own)

    def propose(self, context: DraftContext) -> Draft:
        self._proposals, self._charges = {}, {}
        offered = self._offered(context)
        views = [self._view(context, b, offered) for b in range(len(context.slots))]
        plans = self.planner.plan(views)
        for slot, tokens, plan in zip(context.slots, context.tokens, plans, strict=True):
            if plan.read is not None:
                self._read(slot, tokens, *plan.read)
        made = dict[int, Proposal]()
        for name in dict.fromkeys(plan.drafter for plan in plans if plan.drafter is not None):
            budgets = {b: plan.budget for b, plan in enumerate(plans) if plan.drafter == name}
            if name in self.lookups:
                made |= {b: offered[name, b] for b in budgets}
            else:
                made |= self._asked(name, context, budgets, views)
        return self._verified(context, views, plans, made)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        for name, drafter in self._updated.items():
            some = [
                b
                for b, slot in enumerate(context.slots)
                if (name, slot) in self._proposals
                or (drafter.taps and name in self.of_slot(slot) and commits[b].features is not None)
            ]
            if some:
                own = context.select(some)
                mine = [own_commit(commits[b], self._proposals.get((name, context.slots[b]))) for b in some]
                if self.taps:
                    mine = [self._shared.commit(name, commit) for commit in mine]
                given = (lend, drafter.update) if name in self._foreign else (drafter.update,)
                self._guarded(name, own.slots, *given, own, mine, target.select(some))

    def release(self, slot: int) -> None:
        self.assigned.pop(slot, None)
        self.lost.pop(slot, None)
        self._known.pop(slot, None)
        for name in self.drafters:
            self._guarded(name, [], self.drafters[name].release, slot)

    def reset(self) -> None:
        for name in self.drafters:
            self._guarded(name, [], self.drafters[name].reset)

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

    def _guarded(self, name: str, slots: Sequence[int], act: Callable[..., Any], *given: Any) -> Any:
        """What the act returns. If it raises, the drafter loses these sequences, and None is returned."""
        try:
            return act(*given)
        except Exception as error:
            self.lose(name, slots, error)

    # -- a step ---------------------------------------------------------------------------------------------------------

    def _offered(self, context: DraftContext) -> dict[tuple[str, int], Proposal]:
        """What lookups propose, by drafter and entry of the batch."""
        found: dict[tuple[str, int], Proposal] = {}
        asking = {
            b: budget
            for b, (slot, budget) in enumerate(zip(context.slots, context.budgets, strict=True))
            if budget.max_nodes
            and budget.depth
            and self.planner.asks_lookups(slot, context.warp.histories[b].mask is not None)
        }
        for name in self.lookups:
            own = {b: budget for b, budget in asking.items() if name in self.of_slot(context.slots[b])}
            if own:
                found |= {(name, b): one for b, one in self._asked(name, context, own).items()}
        return found

    def _view(self, context: DraftContext, b: int, offered: Mapping[tuple[str, int], Proposal]) -> View:
        """What the planner may know of an entry of the batch."""
        slot, tokens, budget = context.slots[b], context.tokens[b], context.budgets[b]
        offers, missing, written = dict[str, Offer](), dict[str, int](), len(tokens) - context.prompt_lengths[b]
        if budget.depth and budget.max_nodes:
            for name in self.of_slot(slot):
                if name in self._shared.columns and not written and self._known.get(slot, 0) < len(tokens) - 1:
                    continue  # features of a longer prompt come after the first token
                if name not in self.lookups:
                    missing[name] = self._guarded(name, [slot], self.drafters[name].missing, slot, tokens) or 0
                elif (name, b) in offered:
                    offers[name] = offered[name, b].offer
        return View(
            slot,
            written,
            context.left[b] if context.left else budget.depth + 1,
            budget,
            offers,
            missing,
            self.planner.lengths is not None or slot in self.planner.depths,
            length=len(tokens),
        )

    def _read(self, slot: int, tokens: list[int], name: str, count: int) -> None:
        """Let a drafter read a part of a text, without a draft."""
        began = perf_counter()
        self._guarded(name, [slot], self.drafters[name].read, slot, tokens, count)
        self._charges.setdefault(slot, []).append(Charge(name, 0, 0, count, perf_counter() - began))

    def _asked(
        self, name: str, context: DraftContext, budgets: Mapping[int, Budget], views: Sequence[View] = ()
    ) -> dict[int, Proposal]:
        """A drafter's proposals for some entries of the batch, within these budgets. views: of all entries; a lookup needs none.

        If it fails, each entry is asked for alone, and only those that fail alone are lost.
        """
        drafter, own = self.drafters[name], context.select([*budgets])
        if own.budgets != [*budgets.values()]:
            own = own.within([*budgets.values()])
        try:
            began = perf_counter()
            draft = lend(drafter.propose, own) if name in self._foreign else drafter.propose(own)
            seconds = perf_counter() - began
            if name in self._foreign:
                check(draft, own, self.vocab_size)
        except Exception as error:
            if self.tell is None:
                raise
            for slot in own.slots if not drafter.taps else ():  # a head would miss the features that it was given
                self._guarded(name, [], drafter.release, slot)
            if len(budgets) > 1:
                alone = [self._asked(name, context, {b: budget}, views) for b, budget in budgets.items()]
                return {b: one for found in alone for b, one in found.items()}
            self.lose(name, own.slots, error)
            return {}
        found = {b: Proposal(draft, entry) for entry, b in enumerate(budgets)}
        self._proposals |= {(name, context.slots[b]): one.nodes for b, one in found.items()}
        if name not in self.lookups:
            deepest = max(max(one.levels) for one in found.values())
            missed = sum(max(views[b].missing[name] - 1, 0) for b in budgets)
            charge = Charge(name, len(found), deepest, missed, seconds)
            for slot in own.slots:
                self._charges.setdefault(slot, []).append(charge)
        return found

    def _verified(
        self, context: DraftContext, views: Sequence[View], plans: Sequence[Plan], made: Mapping[int, Proposal]
    ) -> Draft:
        """One draft for the batch, with the nodes that are worth it, and notes."""
        survival = [self._survival(plan, made.get(b)) for b, plan in enumerate(plans)]
        drawn = [b in made and made[b].draft.probs is not None for b in range(len(plans))]
        if any(drawn):
            views = [replace(view, drawn=d) for view, d in zip(views, drawn, strict=True)]
        kept = self.planner.verified(views, plans, survival)
        verified, notes = dict[int, Proposal](), list[PlanNote]()
        for b, (slot, plan, view) in enumerate(zip(context.slots, plans, views, strict=True)):
            one, some, deep, stated, line = made.get(b), kept[b], 0, True, list[float]()
            if one is not None:
                depth, stated = one.levels, one.confidence is not None
                deep = max(depth)
                if context.warp.histories[b].mask is not None and one.draft.probs is None:
                    some = legal(context, b, one.nodes, some)  # taking back a drawn token would change the distribution
                for n in some:  # the likeliest node of each level
                    if depth[n] > len(line):
                        line.append(0.0)
                    line[depth[n] - 1] = max(line[depth[n] - 1], survival[b][n - 1])
                verified[b] = one if len(some) == len(one.nodes) - 1 else cut(one, some)
            charges, promised = tuple(self._charges.get(slot, ())), sum(survival[b][n - 1] for n in some)
            notes.append(PlanNote(plan, view.offers, line, len(some), deep, charges, stated, promised))
        return join(context, verified, notes)

    def _survival(self, plan: Plan, made: Proposal | None) -> list[float]:
        """The probability that each drafted node is accepted, the root left out."""
        if made is None or plan.drafter is None:
            return []
        if plan.drafter in self.lookups:
            return list(plan.survival[1 : len(made.nodes)])
        if (stated := made.confidence) is not None:
            return [*stated[1:]]
        chance = self.planner.models[plan.drafter].chance
        return [chance**level for level in made.levels[1:]]


class Broken(ValueError):
    """A draft that breaks the contract."""


def trusted(drafter: Drafter) -> bool:
    """True for a drafter of this package. It is trusted with the committed tokens, and its drafts are not checked."""
    return type(drafter).__module__.startswith(
        ("outrider.drafters.", "outrider.lab.bench.", "outrider.lab.tune.")
    ) and all(map(trusted, drafter.inner().values()))


def lend(act: Callable[..., Any], own: DraftContext, *more: Any) -> Any:
    """Call a method of a drafter that others wrote, and protect the committed tokens from it.

    Raises Broken if the method changed them; they are restored first. Also raises what the method raises.
    """
    originals, copies = list(own.tokens), [list(tokens) for tokens in own.tokens]
    try:
        made = act(own, *more)
    finally:
        changed = own.tokens != copies
        if changed:
            own.tokens[:] = originals
            for now, then in zip(originals, copies, strict=True):
                now[:] = then
    if changed:
        raise Broken(f"{act.__name__} changed the committed tokens, which are read-only; make a list of your own")
    return made


def check(draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise Broken unless the draft fits the batch, the budgets and the contract."""
    if not isinstance(draft, Draft):
        raise Broken(f"propose returned a {type(draft).__name__}, not a Draft")
    try:
        validate(Draft(draft.tokens, draft.parents), vocab_size)
    except Exception as error:
        raise Broken(str(error)) from error
    if len(draft.tokens) != len(context.slots):
        raise Broken(f"{len(draft.tokens)} drafts for {len(context.slots)} rows")
    for tokens, parents, known, budget in zip(
        lists(draft.tokens), lists(draft.parents), context.tokens, context.budgets, strict=True
    ):
        if tokens[0] != known[-1]:
            raise Broken(f"node 0 is the last committed token, {known[-1]}, and here it is {tokens[0]}")
        children = Counter(parent for parent in parents if parent >= 0)
        for what, got, most in (
            ("levels", max(levels(parents)), budget.depth),
            ("nodes", children.total(), budget.max_nodes),
            ("children of a node", max(children.values(), default=0), budget.width),
        ):
            if got > most:
                raise Broken(f"{got} {what} where the row's budget allows {most}; cut the draft to context.budgets")
    if context.needs_probs and draft.siblings is not Siblings.POINT:
        good = draft.probs is not None and draft.probs.shape == (*draft.tokens.shape, vocab_size)
        if not good or not bool(torch.isfinite(draft.probs).all()):  # pyright: ignore[reportArgumentType]
            raise Broken(
                "probs, which the draft tokens were drawn from, is missing, has the wrong shape or is not finite"
            )


def cut(made: Proposal, kept: Sequence[int]) -> Proposal:
    """A proposal with these of its nodes, besides the root."""
    place = {0: 0} | {old: new for new, old in enumerate(kept, 1)}
    return Proposal(draft_of([[made.nodes[0], *((made.nodes[n][0], place[made.nodes[n][1]]) for n in kept)]]), 0)


def legal(context: DraftContext, b: int, nodes: NodeList, kept: Sequence[int]) -> list[int]:
    """Those of the kept nodes of entry b that its grammar allows, by index. A node goes with its parent."""
    history, paths = context.warp.histories[b], {0: list[int]()}
    assert history.mask is not None
    for n in kept:
        token, parent = nodes[n]
        if parent in paths:
            path = [*paths[parent], token]
            if history.mask.legal_prefix(history.tokens, history.prompt_length, path) == len(path):
                paths[n] = path
    return [*paths][1:]
