"""The planner: which drafter drafts for each sequence of a step, and how deep. Moving averages and one formula.

    speed of a step = tokens that it is expected to commit / seconds that it is expected to take

For each sequence the planner computes the speed of plain decoding, and of the best prefix of each drafter's draft, and takes the
largest. A draft's tokens follow from moving averages of what was accepted lately, its seconds from `Costs`. In a batch the other
sequences count with what they did lately. Nothing here reads a clock, a token that is not committed, or a tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from operator import attrgetter
from typing import TYPE_CHECKING

from outrider.control.costs import RATE, Costs
from outrider.control.plan import PLAIN, Choice, Controller, Offer, Plan, PlanNote, StepForecast, View
from outrider.core.types import Budget

if TYPE_CHECKING:
    from outrider.core.types import Step

# The experiment that set each constant is `benchmarks.replays`, eight cells. [half, double]: what these cost, in hundredths of
# the speed, for first requests; on a server.
# Of a lookup's token, by the length of the match, at most so many tokens. A flat table costs 2.0; 0.1.
CHANCE = {1: 0.25, 2: 0.35, 3: 0.5, 5: 0.6, 8: 0.8, 16: 0.9, 1 << 30: 0.95}
ACCEPTED = CHANCE[5]  # of a draft model's or head's next token. 0.575 and 0.65 cost [0.5, -0.3; 1.5, 0.0]
SHIFT = 0.3  # step of the logit by which lookups are right more often in a sequence [0.0, 0.3; -0.2, 0.2]
LENGTH = 90.0  # tokens of an answer, before the first has ended [1.2, 0.0; -0.2, 0.4]
MARGIN = 1.2  # what one more token of a chain must bring, over what it costs [2.2, 2.0; 2.0, 2.4]
COVER = 2.0  # what reading a prompt must bring, over what it costs [1.7, 1.2; 1.6, 0.6]
RARELY = 64  # steps after which a drafter that was not worth it drafts one token again [0.0, 0.0; 0.0, 0.0]
DEEPEST = 8  # levels of a draft model's or head's chain [2.3, 0.4; 2.3, 0.4]
REST = (1, 5, 10, 20)  # steps from a question to lookups to the next, while they bring too little [0.1, 0.1; 0.1, 0.0]
_MATCH, _SURE = [*CHANCE], max(CHANCE.values())
_COVERED = "the rest of the answer may not cover the reading"


@dataclass
class SequenceAverages:
    """What is known of a sequence. The moving averages begin with those of all sequences."""

    written: int = 0  # output tokens
    # by draft model or head: the chance that its next token is right, and the last step in which it drafted
    accepted: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    asked: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    # by lookup: logits by which it is right more often here
    shift: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    lookup: float = 0.3  # by which part lookups speed up a step
    rests: int = 0  # times in a row that they brought less than they cost
    idle: bool = False  # the last plan was to do nothing
    forced: bool = False  # a grammar may leave no choice


class Planner:
    """Plans steps and learns from them. A `Controller` whose budgets are limits; the drafter asks `plan` for the rest.

    One planner serves all sequences of a model.
    """

    def __init__(
        self, limit: Budget, costs: Costs, lengths: Controller | None = None, siblings: Collection[str] = ()
    ) -> None:
        """
        Args:
            limit: The largest draft.
            costs: Seconds of the target and its drafters.
            lengths: A controller that fixes the size of every draft. The planner then only chooses the drafter.
            siblings: Names of drafters whose chains may have siblings that cost no drafting time.
        """
        self.limit, self.costs, self.lengths, self.siblings = limit, costs, lengths, frozenset(siblings)
        self.depths: dict[int, int] = {}  # by slot: the draft length that a request asked for
        self.accepted: dict[str, float] = {}  # by draft model or head: the chance that its next token is right
        self.chances: dict[str, list[float]] = {}  # by lookup: the same for each class of matches
        self.stated: dict[str, bool] = {}  # by draft model or head: whether it states its chances
        # Tokens of an answer; seconds of a plan and its lookups; by which part lookups speed up a step.
        self.length, self.around, self.lookup = LENGTH, 0.0, 0.3
        self.steps, self.asked = 0, dict[str, int]()  # so far; by draft model or head, the last one in which it drafted
        self._usual = [1.0, 1.0, 0.0]  # of a sequence in a step: tokens, nodes, seconds of drafting
        self._sequences: dict[int, SequenceAverages] = {}

    def budgets(self, slots: list[int]) -> list[Budget]:
        states = [self._sequence(slot) for slot in slots]
        if not any(not state.idle or self._asks(slot, state) for slot, state in zip(slots, states, strict=True)):
            return [PLAIN] * len(slots)
        limits = [self.limit] * len(slots) if self.lengths is None else self.lengths.budgets(slots)
        depths = [self.depths.get(slot, limit.depth) for slot, limit in zip(slots, limits, strict=True)]
        return [b if n == b.depth else replace(b, depth=n) if n else PLAIN for b, n in zip(limits, depths, strict=True)]

    def asks_lookups(self, slot: int, forced: bool = False) -> bool:
        """Whether lookups are asked for the sequence in this step. forced: they tell what a grammar leaves no choice about."""
        state = self._sequence(slot)
        state.forced = forced
        return self._asks(slot, state)

    def _asks(self, slot: int, state: SequenceAverages) -> bool:
        fixed = self.lengths is not None or slot in self.depths
        return state.forced or fixed or self.steps % REST[state.rests] == 0

    def observe(self, step: Step) -> None:
        """Learn what a step cost, and what was accepted."""
        if self.lengths is not None:
            self.lengths.observe(step)
        self.steps += 1
        rows, draft_seconds, notes = len(step.slots), step.seconds["draft"], step.draft.notes
        tokens, nodes, drafting, charged = 0, 0, 0.0, 0.0
        for commit, tree in zip(step.commits, step.draft.host, strict=True):
            tokens, nodes = tokens + len(commit.tokens), nodes + len(tree)
        self.costs.stand(sum(step.positions) / rows)
        for name, drafted, levels, read, seconds in notes[0].charges if notes else ():
            self.costs.observe_draft(name, drafted, levels, read, seconds)
            charged += seconds
            drafting += max(seconds - self.costs.reading(name, read), 0.0)
        self.costs.observe_forward(nodes, sum(step.seconds.values()) - draft_seconds)
        if notes:
            self.around += RATE * (draft_seconds - charged - self.around)
        usual = self._usual
        usual[:] = [was + RATE * (now / rows - was) for was, now in zip(usual, (tokens, nodes, drafting), strict=True)]
        for slot, commit, note in zip(step.slots, step.commits, notes or [None] * rows, strict=True):
            state = self._sequence(slot)
            state.written += len(commit.tokens)
            if note is not None:
                self._learn(state, note, commit.tokens, commit.num_accepted, commit.finish is not None)

    def _learn(
        self, state: SequenceAverages, note: PlanNote, tokens: Sequence[int], accepted: int, ended: bool
    ) -> None:
        plan = note.plan
        if plan.drafter is not None and plan.drafter not in note.offers:
            rate = self._accepted(plan.drafter, state)
            for level in range(min(accepted + (not ended), note.levels)):
                rate += RATE * ((level < accepted) - rate)
            state.accepted[plan.drafter] = rate
            state.asked[plan.drafter] = self.asked[plan.drafter] = self.steps
            self.stated[plan.drafter] = note.stated
        for name, offer in note.offers.items():  # a lookup shows what it is worth whether it drafts or not
            right = any(parent == 0 and [token] == tokens[:1] for token, parent in offer.nodes[1:])
            if len(offer.nodes) > 1 and (right or not ended):
                table, shift = self.chances.setdefault(name, [*CHANCE.values()]), state.shift.get(name, 0.0)
                place = bisect_left(_MATCH, offer.match)
                state.shift[name] = min(max(shift + SHIFT * (right - _shifted(table[place], shift)), -3.0), 3.0)
                table[place] = min(max(table[place] + RATE * (right - table[place]), 0.02), 0.98)
        if not plan.plain:
            return  # nothing was asked
        state.idle = plan.drafter is None and plan.read is None
        if note.offers:
            better = [one for one in plan.why if one.levels]
            lookup = max([one.speed for one in better if one.name in note.offers], default=0.0)
            other = max([one.speed for one in better if one.name not in note.offers], default=plan.plain)
            gain = max(lookup / max(other, 1e-9) - 1, 0.0)
            state.lookup += RATE * (gain - state.lookup)
            poor = max(state.lookup, gain) * self.costs.forward(1) <= self.around
            state.rests = min(state.rests + 1, len(REST) - 1) if poor else 0
        state.rests = max(state.rests, int(not note.offers))

    def release(self, slot: int) -> None:
        """The sequence in this slot has ended: its averages are part of those of all."""
        if self.lengths is not None:
            self.lengths.release(slot)
        self.depths.pop(slot, None)
        state = self._sequences.pop(slot, None)
        if state is not None and state.written:
            self.length += RATE * (state.written - self.length)
            self.lookup += RATE * (state.lookup - self.lookup)
            for name, rate in state.accepted.items():
                self.accepted[name] = (1 - RATE) * self.accepted.get(name, ACCEPTED) + RATE * rate

    def plan(self, views: Sequence[View], waiting: int = 0) -> list[Plan]:
        """A plan for each sequence of a step. Sequences in another order get the same plans.

        Args:
            views: What is known of the sequences.
            waiting: Sequences whose prompts are not read yet. A draft delays them.
        """
        self.costs.stand(sum([view.length for view in views]) / max(len(views), 1))
        others, asked = len(views) - 1, dict[str, int]()
        for view in views:
            for name in view.missing:
                asked[name] = asked.get(name, 0) + 1
        plans = [self._plan(view, others, waiting, asked) for view in views]
        # a draft for several sequences costs little more than one for one: how many share it?
        share = {name: count for name in asked if (count := sum(plan.drafter == name for plan in plans))}
        if others and asked | share != asked:
            plans = [self._plan(view, others, waiting, asked | share) for view in views]
        readers = [(v.missing[plan.read[0]], v.slot) for v, plan in zip(views, plans, strict=True) if plan.read]
        if len(readers) < 2:
            return plans
        return [  # one sequence reads in a step, the others wait
            replace(plan, read=None) if plan.read and view.slot != min(readers)[1] else plan
            for view, plan in zip(views, plans, strict=True)
        ]

    def _plan(self, view: View, others: int, waiting: int, asked: Mapping[str, int]) -> Plan:
        """The plan of a sequence, if the others do what they did lately. asked: sequences that share each drafter's call."""
        budget = view.budget.clipped(view.left - 1)
        if budget.depth < 1 or budget.max_nodes < 1 or not (view.offers or view.missing):
            return Plan(None)
        tokens, nodes, drafting = [others * usual for usual in self._usual]
        state, around = self._sequence(view.slot), 0.0 if others else self.around  # others have a plan anyway
        offers = {name: offer for name, offer in view.offers.items() if len(offer.nodes) > 1}
        deepest, most = min(budget.depth, budget.max_nodes, DEEPEST) if view.missing else 0, view.budget.max_nodes
        forwards = self.costs.forwards(
            nodes + 1, max(deepest, *[len(offer.nodes) - 1 for offer in offers.values()], 0) + 1
        )
        node = max(self.costs.forward(round(nodes + 1) + most) - forwards[0], 0.0) / most
        step = StepForecast(tokens + waiting + 1, drafting, around, forwards, node)
        plain = step.best("", 1.0, ())
        why = [self._lookup(step, name, offer, state, budget.width) for name, offer in offers.items()]
        looked = best = max([plain, *why], key=attrgetter("speed"))
        for name in view.missing:
            one = self._model(step, name, state, deepest, asked[name])
            verdict = self._refusal(view, state, one, looked, others)
            why.append(one := one._replace(verdict=verdict) if verdict else one)
            if not verdict and (one.speed > best.speed or (best is plain and view.slot not in self.depths)):
                best = one
        if view.fixed and best is plain:
            best = max(why, key=attrgetter("tokens"), default=plain)
        read = None
        if best.name in view.missing and not view.fixed:
            piece = int(max((1 if others else 4) * forwards[0] / max(self.costs.reading(best.name, 1), 1e-9), 16))
            if view.missing[best.name] > piece + 1:
                best, read = looked, (best.name, piece)
        if best is plain:
            return Plan(None, PLAIN, read, plain.speed, None, tuple(why))
        if view.fixed:
            best = best._replace(least=0.0)
        elif best.name in view.missing:
            depth, width, nodes = budget.clipped(DEEPEST).parts
            depth = depth if self.stated.get(best.name) else max(best.levels, 1)
            budget = Budget(depth, 4 if best.name in self.siblings else width, nodes, best.stop)
        why = [one._replace(verdict="chosen") if one.name == best.name else one for one in why]
        return Plan(best.name, budget, read, plain.speed, best, tuple(why))

    def _lookup(self, step: StepForecast, name: str, offer: Offer, state: SequenceAverages, width: int) -> Choice:
        """What a lookup offers. A node's chance is that of its class of match, shifted."""
        table, shift = self.chances.setdefault(name, [*CHANCE.values()]), state.shift.get(name, 0.0)
        alive = offer.survival(lambda match: _shifted(table[bisect_left(_MATCH, match)], shift))
        order = alive if width == 1 else sorted(alive, reverse=True)
        one = step.best(name, alive[0], order, [0.0] * len(order))
        return one._replace(survival=alive, least=order[one.levels - 1])

    def _model(self, step: StepForecast, name: str, state: SequenceAverages, most: int, asked: int) -> Choice:
        """What a draft model or head may draft. asked: sequences that share its call, or that make it anyway."""
        (call, level), reading = self.costs.call(name, asked), self.costs.reading(name, 2)
        accepted, calls = self._accepted(name, state), [call + level * k for k in range(most)]
        drafting = [max(min(one / asked, one - step.seconds), 0.0) + reading for one in calls]
        one = step.best(name, accepted, [accepted**k for k in range(1, most + 1)], drafting)
        stop = min(MARGIN * one.speed * (level / asked + step.node) / accepted, _SURE)
        return one._replace(stop=stop, least=one.speed * step.node)

    def _refusal(self, view: View, state: SequenceAverages, one: Choice, looked: Choice, others: int) -> str:
        """Why a draft model or head does not draft for a sequence; "" if it may. looked: the best choice without it.
        others: sequences of the step, which may all try it at once."""
        missing = view.missing[one.name]
        if not one.levels:
            last = self.asked.get(one.name, 0)
            rare = self.steps - state.asked.setdefault(one.name, last) >= RARELY
            free = (self.steps - last) / RARELY * self.costs.forward(1) / (others + 1)  # so little reading is no loss
            tries = one.hopeful and rare and (missing <= 2 or self.costs.reading(one.name, missing) <= free)
            return "" if tries else one.verdict
        if missing <= 2 or view.fixed:
            return ""
        rest = min(max(self.length - view.written, view.written / 2, 8), view.left)
        gain = rest / (1 + one.tokens) * one.seconds * (one.speed / looked.speed - 1)
        return "" if gain > COVER * self.costs.reading(one.name, missing) else _COVERED

    def _accepted(self, name: str, state: SequenceAverages) -> float:
        return state.accepted.setdefault(name, self.accepted.get(name, ACCEPTED))

    def _sequence(self, slot: int) -> SequenceAverages:
        if slot not in self._sequences:
            self._sequences[slot] = SequenceAverages(lookup=self.lookup)
        return self._sequences[slot]


def _shifted(chance: float, shift: float) -> float:
    """A chance whose logit is shifted."""
    return 1 / (1 + exp(-shift) * (1 - chance) / chance)
