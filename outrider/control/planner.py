"""The planner: which drafter drafts for each sequence of a step, how deep, and which of its nodes are verified.

One price of a second decides everything (`outrider.control.price`). It is sigma * B / T(B). B is the number of texts in the
step, and T(B) are the seconds of a plain step. sigma is the speed over plain decoding that the texts have reached lately. What
a lookup is worth follows from what it found and from how much the text copies. What a model is worth follows from what asking
it has brought. One that was not asked for a while is believed a little better than it was, and this is the only exploration.
There are no phases and no steps that only measure. Where nothing is worth its seconds, the step is plain.

Evidence comes in as `View`s and `Step`s, plans go out. Nothing here reads a clock, a token that is not committed, or a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from outrider.control.beliefs import AnswerLengths, LookupBelief, ModelBelief, Offer
from outrider.control.costs import Costs
from outrider.control.price import DraftForecast, best_prefix, least_survival, piece_of_reading, worth_verifying
from outrider.core.types import Budget

if TYPE_CHECKING:
    from outrider.core.types import Step

OPTIMISM = 0.3  # tokens that a drafter is believed better than it was, while nothing is known of a text
_LATELY = 1 - 1 / 24  # weight of the past in a text's speed
_SPEED_PRIOR = 24.0  # steps that the expected speed counts for
_COVER = 2.0  # reading must promise so many times what it costs: gain and length are both estimates
_WAIT, _WAITED = 0.25, 6.0  # tokens of the answer to wait for, for each that reading costs, and at most: it may copy
_SOON = 64  # tokens that a drafter may read before the first token, where the size of drafts is fixed
_CHEAP = 0.5  # tokens; reading that costs less is part of the step
_LOOKUPS = 0.8  # tokens a step that lookups add, where the end of an answer is estimated in steps
_HOPE, _LOOKED = 0.5, 0.1  # tokens that lookups are worth at first, and the rate of their mean
_WORTH = 1.5  # a lookup that is worth so many times its time found something: values are estimates
_RARELY, _LONGEST = 75, 15  # steps in which a text begins to copy, and the most without lookups
_REST = 8  # most steps without a plan, where nothing was worth it: a plan costs what its code costs to read from memory
_NODES = 3  # nodes of a draft at which the cost of one more is taken
_AGAIN = 512  # steps after which forecasts are made anew from corrected costs
_ALIKE = 1024  # tokens by which texts may differ in length and have one forecast
_SIBLINGS = 4  # tokens of a level, where those beside the likeliest one cost a draft nothing
_MOST_SURE = 0.98  # a drafter that is asked drafts one token at least
PLAIN = Budget(0)


@runtime_checkable
class Controller(Protocol):
    """Decides how long drafts may be."""

    def budgets(self, slots: list[int]) -> list[Budget]:
        """The largest drafts of the sequences in these cache slots, for the next step."""
        ...

    def observe(self, step: Step) -> None:
        """Learn from the last step."""
        ...

    def release(self, slot: int) -> None:
        """The sequence in this slot has ended."""
        ...


class Fixed:
    """A controller with the same budget for every slot and step."""

    def __init__(self, depth: int, width: int = 1, nodes: int | None = None) -> None:
        self.budget = Budget(depth, width, nodes)

    def budgets(self, slots: list[int]) -> list[Budget]:
        return [self.budget] * len(slots)

    def observe(self, step: Step) -> None: ...

    def release(self, slot: int) -> None: ...


@dataclass(frozen=True)
class View:
    """What a plan may know of a sequence.

    written: tokens of its answer so far. left: those that may still follow. budget: the largest draft. fixed: the draft has this
    size, whatever it is worth. drawn: draft tokens are drawn from a distribution, so none may be taken back. offers: what
    lookups propose. missing: tokens that each other drafter must read before it can draft, by name. length: tokens so far.
    """

    slot: int
    written: int
    left: int
    budget: Budget
    offers: Mapping[str, Offer]
    missing: Mapping[str, int]
    fixed: bool = False
    drawn: bool = False
    length: int = 0


class Weighed(NamedTuple):
    """A drafter in a plan. tokens: expected accepted ones, and hoped for where it costs something. seconds: what they cost.
    value: tokens less the price of the seconds. verdict: "chosen", or why not. levels, nodes: expected of a drafter that costs
    something. survival: of a lookup's nodes, as they are believed."""

    name: str
    tokens: float
    seconds: float
    value: float
    verdict: str
    levels: float = 0.0
    nodes: float = 0.0
    survival: Sequence[float] = ()

    def __str__(self) -> str:
        cost = f"{1000 * self.seconds:.1f} ms"
        return f"{self.name} {self.tokens:.2f} tokens for {cost} = {self.value:+.2f}, {self.verdict}"


@dataclass(frozen=True)
class Plan:
    """What is done for a sequence. drafter: None decodes plainly. budget: of its draft. survival: what a chosen lookup's nodes
    are believed. read: (drafter, tokens) that it reads in this step without a draft. price: tokens of a second. why: what was
    weighed."""

    drafter: str | None
    budget: Budget = PLAIN
    survival: Sequence[float] = ()
    read: tuple[str, int] | None = None
    price: float = 0.0
    why: tuple[Weighed, ...] = ()


@dataclass(eq=False)
class Charge:
    """What a drafter took in a step. rows: sequences that it drafted for. levels: of its deepest draft. read: tokens that it had
    missed."""

    name: str
    rows: int
    levels: int
    read: int
    seconds: float


@dataclass(eq=False)
class PlanNote:
    """A plan, and what became of it before the target judged: a note of `Draft.notes`.

    survival: of each verified level of the chosen drafter's likeliest path. stated: the drafter said so; else it is predicted
    from its record. nodes: that are verified. promised: the sum of their survival. levels: that are drafted. offers: of the
    lookups. charges: of the drafters that worked for this sequence.
    """

    plan: Plan
    offers: Mapping[str, Offer]
    survival: Sequence[float] = ()
    nodes: int = 0
    levels: int = 0
    charges: tuple[Charge, ...] = ()
    stated: bool = True
    promised: float = 0.0

    def __str__(self) -> str:
        plan = self.plan
        head = f"{plan.drafter} drafts" if plan.drafter else "no draft"
        if plan.read is not None:
            head += f", {plan.read[0]} reads {plan.read[1]} tokens"
        if not plan.price:
            return head
        return (
            f"{head}, a second is worth {plan.price:.0f} tokens: {'; '.join(map(str, plan.why)) or 'nothing to weigh'}"
        )


_NOTHING = Weighed("", 0.0, 0.0, 0.0, "")


@dataclass(eq=False)
class _Try:
    """A sequence while its step is planned. found: the best lookup. ask: the best drafter that costs something. read: what that
    reads in place of a draft. why: all that was weighed."""

    view: View
    found: Weighed = _NOTHING
    ask: Weighed | None = None
    read: tuple[str, int] | None = None
    why: Sequence[Weighed] = ()


@dataclass
class _Speed:
    """Tokens of a text, and the plain steps that they took. written: all of its tokens. looked: what lookups lately were worth.
    misses: those in a row that found nothing. pause: steps until they are asked again. rest: steps until anything is weighed
    again. calm: plans in a row with nothing in them. forced: a grammar may leave no choice, and lookups tell."""

    tokens: float = 0.0
    steps: float = 0.0
    written: int = 0
    looked: float = _HOPE
    misses: int = 0
    pause: int = 0
    rest: int = 0
    calm: int = 0
    forced: bool = False


class Planner:
    """Plans steps, and learns from them. A `Controller` whose budgets are limits: the drafter asks `plan` for the rest.

    One planner serves all texts of a model. It remembers of them what helps the next ones: what each drafter brings, how long
    answers are, what matches are worth. A text's own speed and its habit of copying are its own.
    """

    def __init__(
        self,
        limit: Budget,
        costs: Costs,
        kinds: Mapping[str, str] | None = None,
        lengths: Controller | None = None,
        siblings: Collection[str] = (),
    ) -> None:
        """limit: the largest draft. costs: of the target and its drafters. kinds: of each drafter that costs something, its name
        among the shipped chains. lengths: a controller that fixes the size of every draft; the planner then only chooses which
        drafter drafts. siblings: drafters whose chains may have siblings beside their tokens, which cost a draft nothing."""
        self.limit, self.costs, self.kinds, self.lengths = limit, costs, dict(kinds or {}), lengths
        self.siblings = frozenset(siblings)
        self.models: dict[str, ModelBelief] = {}
        self.lookups: dict[str, LookupBelief] = {}
        self.answers = AnswerLengths()
        self.depths: dict[int, int] = {}  # by slot: the draft length that a request asked for
        self._speeds: dict[int, _Speed] = {}
        self._planning = self._looking = 0.0  # plain steps that the plans of a step take, and asking its lookups
        self._nodes = float(_NODES)  # that a sequence lately had
        self._forecasts: dict[tuple[str, int, int], DraftForecast] = {}
        self._steps = 0

    # -- the controller -------------------------------------------------------------------------------------------------

    def budgets(self, slots: list[int]) -> list[Budget]:
        given = [self.limit] * len(slots) if self.lengths is None else self.lengths.budgets(slots)
        return [self._own(slot, budget) for slot, budget in zip(slots, given, strict=True)]

    def observe(self, step: Step) -> None:
        if self.lengths is not None:
            self.lengths.observe(step)
        rows = len(step.slots)
        notes: list[PlanNote | None] = [*step.draft.notes] or [None] * rows
        charges = {id(charge): charge for note in notes if note for charge in note.charges}
        taken = sum(step.seconds.values())
        self.costs.behind = sum(step.positions) / rows
        plain, read = self.costs.forward(rows), 0.0
        for charge in charges.values():
            read += self.costs.reading(charge.name, charge.read)
            self.costs.observe_draft(charge.name, charge.rows, charge.levels, charge.read, charge.seconds)
        nodes = sum(len(tree) for tree in step.draft.host)
        self.costs.observe_forward(nodes, taken - step.seconds["draft"])
        self._nodes += 0.1 * ((nodes - rows) / rows - self._nodes)
        self._steps += 1
        if self._steps % _AGAIN == 0:
            self._forecasts.clear()
        steps = max(taken - read, 0.0) / plain
        if any(notes):
            beside = (step.seconds["draft"] - sum(charge.seconds for charge in charges.values())) / plain
            if any(note and note.offers for note in notes):
                self._looking += 0.1 * (max(beside - self._planning, 0.0) - self._looking)
            else:
                self._planning += 0.1 * (beside - self._planning)
        for slot, commit, note in zip(step.slots, step.commits, notes, strict=True):
            speed = self._speeds.setdefault(slot, _Speed())
            speed.tokens = _LATELY * speed.tokens + len(commit.tokens)
            speed.steps = _LATELY * speed.steps + steps
            speed.written += len(commit.tokens)
            if speed.rest:
                self._rested(slot, speed)
            elif note is not None:
                self._look(speed, note)
                speed.rest = self._rest(slot, speed, note)
                self._learn(slot, note, commit.tokens, commit.num_accepted, commit.finish is not None)

    def release(self, slot: int) -> None:
        if self.lengths is not None:
            self.lengths.release(slot)
        self.depths.pop(slot, None)
        speed = self._speeds.pop(slot, None)
        if speed is not None:
            self.answers.observe(speed.written)
        for belief in (*self.models.values(), *self.lookups.values()):
            belief.release(slot)

    def asks_lookups(self, slot: int, forced: bool = False) -> bool:
        """Whether lookups are asked for this sequence: not in every step, while they are worth less than the time they take.

        forced: they also tell what a grammar leaves no choice about, so they are asked in every step."""
        speed = self._speeds.setdefault(slot, _Speed())
        speed.forced = forced
        return self.lengths is not None or speed.pause == 0

    # -- plans ----------------------------------------------------------------------------------------------------------

    def plan(self, views: Sequence[View]) -> list[Plan]:
        """A plan for each sequence of a step. Sequences in another order get the same plans."""
        rows = len(views)
        self.costs.behind = sum(view.length for view in views) / max(rows, 1)
        price = self.price(views)
        around = rows + (rows - 1) * self._nodes  # nodes of the step without those of one sequence
        longest = max((len(offer.nodes) for view in views for offer in view.offers.values()), default=1)
        more = self.costs.more(around, longest)
        asked = {name: sum(name in view.missing for view in views) for view in views for name in view.missing}
        tries = [self._tried(view, price, around, rows, more, asked) for view in views]
        self._one_reads(tries)
        together = {name: self._together(name, tries, price, rows) for name in asked}
        plans = [self._settled(one, price, around, together) for one in tries]
        return (
            plans if self.lengths is None else [replace(plan, price=0.0) for plan in plans]
        )  # its costs are not measured

    def verified(
        self, views: Sequence[View], plans: Sequence[Plan], survival: Sequence[Sequence[float]]
    ) -> list[list[int]]:
        """The drafted nodes of each sequence that are verified, by index, the root left out. survival: of the drafted nodes."""
        free = [b for b, view in enumerate(views) if not view.fixed and not view.drawn]
        survival = [self._believed(view, plan, s) for view, plan, s in zip(views, plans, survival, strict=True)]
        kept = [list(range(1, len(nodes) + 1)) for nodes in survival]
        held = sum(1 + len(nodes) for b, nodes in enumerate(survival) if b not in free)
        if free and any(survival[b] for b in free):
            costs, base = self.costs, held + len(free)
            some = worth_verifying([survival[b] for b in free], plans[0].price, lambda count: costs.more(base, count))
            for b, nodes in zip(free, some, strict=True):
                kept[b] = [n + 1 for n in nodes]
        return kept

    def price(self, views: Sequence[View]) -> float:
        """Tokens of a second, at the speed that these texts have."""
        rows = len(views)
        tokens = steps = 0.0
        for view in views:
            speed = self._speeds.get(view.slot)
            usual = max((self._forecast(name, rows).speed for name in view.missing), default=1.0)
            tokens += _SPEED_PRIOR + (speed.tokens if speed else 0.0)
            steps += _SPEED_PRIOR / usual + (speed.steps if speed else 0.0)
        return max(tokens / steps, 1.0) * rows / self.costs.forward(rows)

    def state(self) -> str:
        """In a sentence: the speed of the texts that run, and the forecast of each drafter."""
        some = [speed for speed in self._speeds.values() if speed.steps]
        now = sum(s.tokens for s in some) / sum(s.steps for s in some) if some else 1.0
        parts = [f"texts that run now: {max(now, 1.0):.2f} times plain decoding"]
        for name in self.models:
            known = self._forecast(name, 1)
            level = self.costs.draft(name, 1, 2) - self.costs.draft(name, 1, 1)
            cost = level / self.costs.forward(1)
            parts.append(f"{name}: a token costs {cost:.2f} plain steps, {known.speed:.2f} times plain expected")
        return "; ".join(parts)

    def _offers(self, view: View, price: float, more: Sequence[float]) -> list[Weighed]:
        """What the lookups' offers are worth. more: seconds that further nodes add to the step."""
        out = list[Weighed]()
        for name, offer in view.offers.items():
            if len(offer.nodes) < 2:
                continue
            alive = self._lookup(name).survival(view.slot, offer)
            falling = alive[1:] if view.budget.width == 1 else sorted(alive[1:], reverse=True)
            count, worth = (len(falling), sum(falling)) if view.fixed else best_prefix(falling, price, more)
            seconds = more[count - 1] if count else 0.0
            out.append(Weighed(name, sum(falling[:count]), seconds, worth, "less", survival=alive))
        return out

    def _tried(
        self,
        view: View,
        price: float,
        around: float,
        rows: int,
        more: Sequence[float],
        asked: Mapping[str, int],
    ) -> _Try:
        """What a sequence would get if all others did as it does. asked: how many may have each drafter."""
        if min(view.budget.depth, view.left - 1, view.budget.max_nodes) < 1:
            return _Try(view)
        why = self._offers(view, price, more)
        found = max((w for w in why if w.value > 0), key=lambda w: w.value, default=_NOTHING)
        best, ask = 0.0, None
        for name, missing in view.missing.items():
            one = self._ask(name, view.slot, price, around, rows, asked[name])
            verdict = self._refused(name, view, price, missing, one.value)
            if not verdict and (one.value > best if one.value >= found.value else view.fixed and not found.name):
                best, ask = one.value, one
            why.append(one._replace(verdict=verdict or ("less" if best > 0 else "not worth it")))
        if ask is not None and (piece := self._piece(ask.name, view.missing[ask.name], rows)):
            return _Try(view, found, None, (ask.name, piece), why)
        return _Try(view, found, ask, None, why)

    def _together(self, name: str, tries: Sequence[_Try], price: float, rows: int) -> set[int]:
        """The slots for which a drafter drafts in this step: a draft for several costs little more than one for one."""
        some = [one for one in tries if one.ask is not None and one.ask.name == name]
        some.sort(key=lambda one: (not one.view.fixed, one.found.value - one.ask.tokens, one.view.slot))  # pyright: ignore[reportOptionalMemberAccess]
        costs, plain = self.costs, self.costs.forward(rows)
        gain = levels = nodes = best = 0.0
        count = 0
        for n, one in enumerate(some, 1):
            ask = one.ask
            assert ask is not None
            gain += ask.tokens - one.found.value
            levels, nodes = levels + ask.levels, nodes + ask.nodes
            deepest = levels / n * _harmonic(n)
            value = gain - price * (costs.draft(name, n, deepest) + costs.forward(rows + nodes) - plain)
            if value > best or one.view.fixed:
                count, best = n, max(value, 0.0)
        return {one.view.slot for one in some[:count]}

    def _settled(self, one: _Try, price: float, around: float, together: Mapping[str, set[int]]) -> Plan:
        """The plan of a sequence, when it is known which drafter drafts for which sequence."""
        view, found, ask = one.view, one.found, one.ask
        budget = view.budget.clipped(view.left - 1)
        name = ask.name if ask is not None and view.slot in together[ask.name] else None
        verdicts = {name or found.name: "chosen"}
        if one.read is not None:
            verdicts[one.read[0]] = "reading"
        if ask is not None and name is None:
            verdicts[ask.name] = "too few others draft"
        why = tuple(w._replace(verdict=verdicts.get(w.name, w.verdict)) for w in one.why)
        if name is None:
            return Plan(found.name or None, budget if found.name else PLAIN, found.survival, one.read, price, why)
        if not view.fixed:
            least = self._least(name, price, around, len(together[name])) / self._belief(name).truth(view.slot)
            budget = self._belief(name).ending(budget, min(least, _MOST_SURE))
            if name in self.siblings and budget.min_probability:
                budget = replace(budget, width=_SIBLINGS)
        return Plan(name, budget, price=price, why=why)

    def _ask(self, name: str, slot: int, price: float, around: float, rows: int, asked: int) -> Weighed:
        """What asking a drafter that costs something is worth, for a sequence among `asked`. One node at least is charged: a
        draft of which nothing is verified shows nothing."""
        tokens, levels, nodes, weight = self._belief(name).means(slot, self._forecast(name, rows))
        forward = self.costs.forward
        deepest = levels * _harmonic(asked)
        seconds = self.costs.draft(name, asked, deepest) / asked + forward(around + max(nodes, 1.0)) - forward(around)
        seconds += self._planning * forward(rows) / rows  # a step that rests has no plan
        hoped = tokens + OPTIMISM / sqrt(1 + weight)
        return Weighed(name, hoped, seconds, hoped - price * seconds, "", levels, nodes)

    def _refused(self, name: str, view: View, price: float, missing: int, worth: float) -> str:
        """Why a drafter is not asked, whatever it is worth; "" if it may be."""
        if not view.written and not (view.fixed and missing - 1 <= _SOON):
            return "the first token comes first"
        if view.fixed:
            return ""
        if worth <= 0:
            return "not worth it"
        reading = price * self.costs.reading(name, missing - 1)
        if reading <= _CHEAP:
            return "" if worth > reading else "reading costs more than a draft brings"
        if view.written < min(_WAIT * reading, _WAITED):
            return "the text may copy"
        steps = min(self.answers.remaining(view.written), view.left) / (1 + worth + _LOOKUPS)
        covered = worth * self._belief(name).text(view.slot).free * steps > _COVER * reading
        return "" if covered else "the rest of the answer may not cover the reading"

    def _piece(self, name: str, missing: int, rows: int) -> int:
        """Tokens to read in this step without a draft; 0 if the rest is short enough to be read within a draft."""
        piece = piece_of_reading(rows, self.costs.forward(rows), self.costs.reading(name, 1))
        return piece if missing - 1 > piece else 0

    def _one_reads(self, tries: Sequence[_Try]) -> None:
        """One sequence reads in a step: the one with the fewest tokens to read. The others wait."""
        reading = [(one.view.missing[one.read[0]], one.view.slot, one) for one in tries if one.read is not None]
        for _, slot, one in reading:
            if slot != min(reading)[1]:
                one.read = None

    def _believed(self, view: View, plan: Plan, survival: Sequence[float]) -> Sequence[float]:
        """The survival of drafted nodes, after what this text has shown of its drafter."""
        if plan.drafter is None or plan.drafter in view.offers:
            return survival
        truth = self._belief(plan.drafter).truth(view.slot)
        return [min(truth * alive, 1.0) for alive in survival]

    def _least(self, name: str, price: float, around: float, asked: int) -> float:
        """The survival at which a chain of this drafter ends."""
        costs = self.costs
        level = (costs.draft(name, asked, 2) - costs.draft(name, asked, 1)) / asked * _harmonic(asked)
        node = (costs.forward(around + 2 * _NODES) - costs.forward(around + 1)) / (2 * _NODES - 1)
        return least_survival(price, level + node, self._belief(name).chance)

    def _forecast(self, name: str, rows: int) -> DraftForecast:
        """What the shipped chains promise of a drafter, for one of so many sequences that all have it."""
        key = name, rows, int(self.costs.behind) // _ALIKE
        known = self._forecasts.get(key)
        if known is None:
            costs, deeper = self.costs, _harmonic(rows)
            known = self._belief(name).forecast(
                lambda nodes: costs.forward(nodes * rows) / rows,
                lambda levels: costs.draft(name, rows, levels * deeper) / rows,
            )
            self._forecasts[key] = known
        return known

    def _belief(self, name: str) -> ModelBelief:
        belief = self.models.get(name)
        if belief is None:
            belief = self.models[name] = ModelBelief(self.kinds.get(name, ""))
        return belief

    def _lookup(self, name: str) -> LookupBelief:
        belief = self.lookups.get(name)
        if belief is None:
            belief = self.lookups[name] = LookupBelief()
        return belief

    def _own(self, slot: int, budget: Budget) -> Budget:
        """The same budget, as deep as the request wants it; none while the sequence rests."""
        depth, speed = self.depths.get(slot), self._speeds.get(slot)
        if speed is not None and speed.rest:
            return PLAIN
        return budget if depth is None else replace(budget, depth=depth) if depth else PLAIN

    # -- observations ---------------------------------------------------------------------------------------------------

    def _look(self, speed: _Speed, note: PlanNote) -> None:
        """What lookups were worth in a step, and whether they rest for some."""
        if not note.offers:
            speed.pause = max(speed.pause - 1, 0)
            return
        worth, cost = 0.0, self._looking + self._planning
        for w in note.plan.why:
            if w.name in note.offers:
                worth = max(worth, w.value)
            elif w.value > 0:
                cost = self._looking  # there is a plan in any case
        least = _WORTH * cost * max(speed.tokens / max(speed.steps, 1e-9), 1.0)
        speed.looked += _LOOKED * (worth - speed.looked)
        speed.misses = speed.misses + 1 if worth < least else 0
        speed.pause = (
            min(2**speed.misses - 1, int(_RARELY * cost), _LONGEST) if speed.looked < least and not speed.forced else 0
        )

    def _rest(self, slot: int, speed: _Speed, note: PlanNote) -> int:
        """Steps without a plan, after one that verified nothing: more each time, but lookups are not kept waiting."""
        plan = note.plan
        idle = plan.read is None and all(
            w.verdict in ("not worth it", "chosen") or w.name in note.offers for w in plan.why
        )
        if note.nodes or not idle or self.lengths is not None or slot in self.depths or not (plan.why or speed.pause):
            speed.calm = 0
            return 0
        speed.calm += 1
        return speed.pause or (0 if note.offers else min(2**speed.calm, _REST))

    def _rested(self, slot: int, speed: _Speed) -> None:
        """A step without a plan has passed."""
        speed.rest -= 1
        speed.pause = max(speed.pause - 1, 0)
        for belief in self.models.values():
            if slot in belief.texts:
                belief.passed(slot, False)

    def _learn(self, slot: int, note: PlanNote, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        lookup = max((w.value for w in note.plan.why if w.name in note.offers), default=0.0)
        for name, offer in note.offers.items():
            if len(offer.nodes) > 1:
                self._lookup(name).learn(slot, offer, tokens, ended)
        for w in note.plan.why:
            if w.name in note.offers:
                continue
            belief = self._belief(w.name)
            belief.passed(slot, lookup > max(w.value, 0.05))
            if w.name == note.plan.drafter and note.levels and not ended:
                asked = note.plan.budget.min_probability > 0
                belief.learn(slot, note.survival, note.promised, note.levels, note.nodes, accepted, note.stated, asked)


@lru_cache(256)
def _harmonic(count: int) -> float:
    """How many times as deep as the mean the deepest of so many drafts is: the maximum of geometric lengths."""
    return sum(1 / n for n in range(1, count + 1))
