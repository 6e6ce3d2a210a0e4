"""Controllers turn what was observed into the budget of the next step.

They change the speed, never the distribution of the text, and with the verifier `match` not even the text.

`Adaptive` is a machine of phases. Each decision picks a phase, a budget, and the number of steps until the next decision:

    phase            budget   left for
    MEASURE_PLAIN    none     any phase, as soon as the seconds of a plain step are known for this batch size
    FIRST_LOOK       small    DRAFTING if it pays; SKIPPING after 10 steps, or when the loss budget is spent; 3 sequences get one
    PROBING          small    the same, after 4 steps
    DRAFTING         best     REMEASURE_PLAIN when that is due; RECHECK_PLAIN or SKIPPING when drafting stops to pay
    NEARLY_FREE      small    as DRAFTING
    REMEASURE_PLAIN  none     DRAFTING, or what the new measurement says
    RECHECK_PLAIN    none     DRAFTING if the new measurement of plain steps says so, else SKIPPING
    SKIPPING         none     FIRST_LOOK or PROBING, when the gap is over and `LossBudget` has room for it

A small budget is two levels deep. A drafter that states how sure it is gets the deepest budget instead, because it ends
unlikely drafts itself: each budget says how likely a token must be to get a successor.

`LossBudget` alone judges whether drafting that has not proved itself may be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from outrider.control.acceptance import Acceptance, RankAcceptance, survival
from outrider.control.costs import SETTLE, Costs
from outrider.control.lengths import AnswerLengths
from outrider.core.types import Budget, Commit, Step

ALLOWANCE = 0.01  # the part of all time that probes may lose
START = 4.0  # and the plain steps that each first look may lose in addition
_LOOKS = 3  # sequences that get a first look: one text with unlikely words says little of the next one
_FIRST_GAP, _LAST_GAP = 16, 512  # steps between probes that fail; each failure doubles the gap
_FIRST_LOOK, _PROBE = 10, 4  # steps of the first look at a drafter, and of a later probe
_SHALLOW = 2  # depth of both, for drafters that state no confidence
_LEAST, _MOST_SURE = 0.01, 0.95  # bounds of the probability below which a draft ends
_FADE = 0.1  # weight that a probe leaves to the acceptance observed before it
_MOST = 16  # steps until the next decision, at most
_THINKING = 0.005  # part of the time that decisions may take
_ENTER = 1.02  # expected speed at which drafting begins, against plain decoding
_MEASURE = SETTLE + 3  # plain steps of a measurement of plain decoding
_PROOF = 12  # drafted steps after which their measured speed counts more than the estimate


class Controller(Protocol):
    """Decides budgets."""

    def budgets(self, slots: list[int]) -> list[Budget]:
        """The budgets of the sequences in these cache slots, for the next step."""
        ...

    def observe(self, step: Step) -> None:
        """Learn from the last step."""
        ...

    def release(self, slot: int) -> None:
        """The sequence in this slot has ended."""
        ...


class Fixed:
    """The same budget for every slot and step."""

    def __init__(self, depth: int, width: int = 1, nodes: int | None = None) -> None:
        self.budget = Budget(depth, width, nodes)

    def budgets(self, slots: list[int]) -> list[Budget]:
        return [self.budget] * len(slots)

    def observe(self, step: Step) -> None: ...

    def release(self, slot: int) -> None: ...


class Phase(Enum):
    """What `Adaptive` does until its next decision. The table at the top of this file says when it leaves each phase."""

    MEASURE_PLAIN = auto()
    FIRST_LOOK = auto()
    PROBING = auto()
    DRAFTING = auto()
    NEARLY_FREE = auto()
    REMEASURE_PLAIN = auto()
    RECHECK_PLAIN = auto()
    SKIPPING = auto()


class LossBudget:
    """Judges whether drafting may be tried, from the seconds that it has cost and the seconds that its tokens were worth.

    Drafting that has not proved itself may lose `START` plain steps, `ALLOWANCE` of all time, and what it lately gained. Each
    first look may lose `START` plain steps anew.
    """

    def __init__(self) -> None:
        self.looks = 0  # first looks so far
        self.elapsed = 0.0  # seconds of all steps
        self.lost = 0.0  # seconds lost by drafting that had not proved itself
        self.worth = 0.0  # plain seconds for the tokens of recent drafted steps, fading
        self.taken = 0.0  # seconds that these steps took
        self.steps = 0.0  # how many they were

    @property
    def proved(self) -> bool:
        """Whether recent drafted steps were faster than plain ones."""
        return self.steps > _PROOF and self.worth > self.taken

    @property
    def disproved(self) -> bool:
        """Whether recent drafted steps were clearly slower than plain ones."""
        return self.steps > _PROOF and self.worth < 0.98 * self.taken

    def room(self, plain: float) -> float:
        """Seconds that may still be lost. plain: seconds of a plain step."""
        gained = max(self.worth - self.taken, 0.0)
        return START * plain + ALLOWANCE * self.elapsed + gained - self.lost

    def allows_drafting(self, plain: float) -> bool:
        return self.proved or (self.room(plain) > 0 and not self.disproved)

    def grant_look(self, plain: float) -> None:
        """A first look begins. It may lose `START` plain steps, whatever was lost before. plain: as for `room`."""
        self.lost += min(self.room(plain) - START * plain, 0.0)
        self.looks += 1

    def charge(self, worth: float, taken: float, extra: float) -> None:
        """A drafted step. worth: plain seconds for its tokens. taken: its seconds. extra: those charged in addition if
        drafting has not proved itself."""
        if not self.proved:
            self.lost = max(self.lost + taken + extra - worth, 0.0)
        self.fade(0.95)
        self.worth, self.taken, self.steps = self.worth + worth, self.taken + taken, self.steps + 1

    def fade(self, factor: float) -> None:
        """What recent steps have shown weighs less."""
        self.worth, self.taken, self.steps = factor * self.worth, factor * self.taken, factor * self.steps


@dataclass(eq=False)
class _SlotRecord:
    """What a controller knows of a sequence."""

    acceptance: Acceptance
    position: int | None = None  # committed tokens after the last step observed
    read: int = 0  # committed tokens that the drafter has read
    drafted: bool = False  # was any step drafted for it?
    written: int = 0  # output tokens


class Adaptive:
    """Drafts as many tokens as pay, from running acceptance and measured seconds. Where nothing pays, it decodes plainly.

    It needs no calibration. The first steps are plain, to measure them; a short first look at the drafter follows. Then it
    takes the depth with the most expected tokens per second, and decides anew every few steps. While drafting does not pay,
    it skips drafting and probes it after gaps that double. While drafting pays, it measures plain decoding again from time
    to time, for `ALLOWANCE` of the time.

    With `Calibrated` costs it starts with known costs. It compares chains and trees of every depth and size within the limit,
    and leaves out a sequence whose own draft tokens do not pay for their drafting.

    The losses are bounded by `LossBudget`. A probe that may cost more waits until it is earned; a draft model that was
    skipped must first read what it has missed. Two losses come on top: the first looks, each of which reads one prompt,
    and the few steps until the estimates follow a text that changes.
    """

    def __init__(self, limit: Budget | None = None, costs: Costs | None = None) -> None:
        """limit: the largest budget, 8 deep if not given; smaller budgets keep its width. costs: where seconds come from;
        learned from the steps if not given."""
        self.limit = limit or Budget(8)
        self.costs = costs or Costs()
        self.losses = LossBudget()
        self.phase = Phase.MEASURE_PLAIN
        # What was observed.
        self.pooled = Acceptance(self.limit.depth, 64)
        self.proposed = Acceptance(self.limit.max_nodes, 128)  # nodes that were proposed, of those asked for
        self.judged = False  # does the drafter state how sure it is of its tokens?
        shapes = self.costs.draft.shapes and self.limit.width > 1
        self.orders = RankAcceptance(self.limit, 64) if shapes else None
        self.slots: dict[int, _SlotRecord] = {}
        self.lengths = AnswerLengths()
        self.prompt = 0.0  # mean tokens of a prompt
        self.streak = 0  # draft tokens accepted in a row
        self.now = 0  # steps so far
        # The last decision.
        self.budget = Budget(0)
        self.batch_size = 0  # that it was taken for
        self.steps_left = 0  # until the next one
        self.decided_at = 0  # the step it was taken at
        self.usual = 0.0  # expected seconds of a drafted step
        self.gain = 1.0  # expected speed against plain decoding
        self.pays = False  # did drafting pay, when it was last compared with plain decoding?
        self.probed: list[int] = []  # slots that a probe drafts for
        self.left_out: set[int] = set()  # slots whose draft tokens do not pay for their drafting
        # What is due later.
        self.gap, self.probe_at = _FIRST_GAP, 0
        self.probes_left = 0  # steps of this probe
        self.remeasure_at = 0  # 0: not planned

    # -- the controller -------------------------------------------------------------------------------------------------

    def budgets(self, slots: list[int]) -> list[Budget]:
        if not self.limit.max_nodes:
            return [self.limit] * len(slots)
        self.prepare(slots)
        self.steps_left -= 1
        self.now += 1
        if self.budget.depth == 0:
            return [self.budget] * len(slots)
        return [self.budget if self._wanted(slot) else Budget(0) for slot in slots]

    def observe(self, step: Step) -> None:
        if not self.limit.max_nodes:
            return
        if any(b.depth for b in step.budgets):
            self._observe_drafted(step)
        else:
            for slot, position, commit in zip(step.slots, step.positions, step.commits, strict=True):
                self._follow(slot, position, commit)
            self.costs.observe(step, 0, 0)
            self.losses.elapsed += sum(step.seconds.values())

    def release(self, slot: int) -> None:
        record = self.slots.pop(slot, None)
        if record is not None:
            self.lengths.observe(record.written)

    def prepare(self, slots: list[int]) -> None:
        """Decide, if a decision is due. `budgets` does it too."""
        if self.steps_left <= 0 or self.batch_size != len(slots) or any(slot not in self.slots for slot in slots):
            self.decide(slots)

    def reconsider(self) -> None:
        """Decide anew before the next step."""
        self.steps_left = 0

    @property
    def measures_plain(self) -> bool:
        """Whether this phase needs plain steps to measure them."""
        return self.phase in (Phase.MEASURE_PLAIN, Phase.REMEASURE_PLAIN, Phase.RECHECK_PLAIN)

    # -- decisions ------------------------------------------------------------------------------------------------------

    def decide(self, slots: list[int]) -> None:
        """Choose the phase, the budget, and the steps until the next decision."""
        self.batch_size = len(slots)
        probed, self.probed, self.left_out = self.probed, [], set()
        budget, self.steps_left = self._next_phase(slots, probed)
        if budget.depth and budget.width == 1:
            budget = replace(budget, min_probability=self._least_probability(budget))
        self.budget, self.decided_at = budget, self.now
        everything = [1.0] * budget.max_nodes
        self.usual = self.costs.step(self.batch_size, budget, everything) if budget.depth else 0.0

    def _next_phase(self, slots: list[int], probed: list[int]) -> tuple[Budget, int]:
        """The transitions. Each method called here enters its phase; it returns the budget and the steps it stands for."""
        plain = self.costs.plain(len(slots))
        if plain is None:
            return self._measure_plain()
        budget, self.gain = self._best(slots)
        if self.losses.looks < _LOOKS and not self.losses.proved and (self.judged or self._hopeful()):
            newcomers = [slot for slot in slots if not self._record(slot).drafted]
            if newcomers and not probed:
                return self._first_look(newcomers, plain)
        if self.losses.looks and self.costs.draft.settled and self.losses.allows_drafting(plain):
            if self.gain > (1.0 if self.pays else _ENTER):
                due = self.pays and 0 < self.remeasure_at <= self.now
                return self._remeasure_plain() if due else self._draft(budget, plain)
            if self._nearly_free():
                return self._draft_nearly_free()
        if probed and self.probes_left > 0 and self._worth_a_look(plain) and {*probed} <= {*slots}:
            return self._go_on_probing(probed)
        if self.pays or probed:
            return self._give_up()
        if self.now >= self.probe_at:
            if chosen := self._affordable(slots, plain):
                return self._probe(chosen)
            self.probe_at = self.now + self.gap
        return self._skip()

    def _measure_plain(self) -> tuple[Budget, int]:
        self.phase = Phase.MEASURE_PLAIN
        return Budget(0), 1

    def _draft(self, budget: Budget, plain: float) -> tuple[Budget, int]:
        """Plan the next measurement of plain decoding, too. The more drafting gains, the later it is."""
        self.phase = Phase.DRAFTING
        steps, usual = 2, self.costs.step(self.batch_size, budget, [1.0] * budget.max_nodes)
        if self.losses.proved:
            self.gap = _FIRST_GAP
            steps = min(max(round(self.costs.draft.thinking / (_THINKING * usual)), 1), _MOST)
        if not self.pays or not self.remeasure_at:
            lost = _MEASURE * (1 - 1 / self.gain) * plain
            fewest, most = self.costs.target.plain_gaps
            self.remeasure_at = self.now + round(min(max(lost / (ALLOWANCE * usual), fewest), most))
        self.pays = True
        return budget, steps

    def _remeasure_plain(self) -> tuple[Budget, int]:
        self.phase = Phase.REMEASURE_PLAIN
        if self.losses.proved:
            self.gap = _FIRST_GAP
        self.remeasure_at = 0
        return Budget(0), _MEASURE

    def _draft_nearly_free(self) -> tuple[Budget, int]:
        """Drafts cost next to nothing, as those of a lookup that mostly finds nothing: keep on asking."""
        self.phase, self.pays = Phase.NEARLY_FREE, True
        return self._shallow, _MOST

    def _probe(self, slots: list[int]) -> tuple[Budget, int]:
        """Begin a probe of these slots. What was observed before it weighs little from now on."""
        self.phase = Phase.PROBING
        for acceptance in (self.pooled, *(self._record(slot).acceptance for slot in slots)):
            acceptance.fade(_FADE)
        self.probed, self.probes_left = slots, _PROBE - 1
        return self._shallow, 1

    def _first_look(self, slots: list[int], plain: float) -> tuple[Budget, int]:
        """Begin a first look at the drafter, with these slots."""
        self.phase = Phase.FIRST_LOOK
        self.losses.grant_look(plain)
        self.probed, self.probes_left = slots, _FIRST_LOOK - 1
        return self._shallow, 1

    def _go_on_probing(self, slots: list[int]) -> tuple[Budget, int]:
        self.probed, self.probes_left, self.pays = slots, self.probes_left - 1, False
        return self._shallow, 1

    def _give_up(self) -> tuple[Budget, int]:
        """Drafting does not pay any more, or a probe has failed. If drafting had proved itself, the machine may have been
        faster when plain decoding was measured: measure that again first."""
        proved, self.pays = self.losses.proved, False
        self.losses.fade(0.0)
        self.probe_at = self.now + self.gap
        self.gap = min(2 * self.gap, _LAST_GAP)
        if not proved:
            return self._skip()
        self.phase = Phase.RECHECK_PLAIN
        self.costs.target.forget_plain(self.batch_size)
        return Budget(0), _MEASURE

    def _skip(self) -> tuple[Budget, int]:
        self.phase = Phase.SKIPPING
        return Budget(0), self.probe_at - self.now

    # -- estimates ------------------------------------------------------------------------------------------------------

    @property
    def _aging(self) -> float:
        """The weight that the steps since the last decision leave to what they could not observe."""
        return 0.8 ** ((self.now - self.decided_at) / _MOST)

    @property
    def _shallow(self) -> Budget:
        return self._shape(self.limit.depth if self.judged else min(_SHALLOW, self.limit.depth))

    def _shape(self, depth: int) -> Budget:
        """A budget of this depth: a chain, or as wide as the limit if the costs do not tell chains from trees."""
        limit = self.limit
        if self.costs.draft.shapes:
            return Budget(depth)
        nodes = None if limit.nodes is None else max(depth, round(limit.nodes * depth / limit.depth))
        return Budget(depth, limit.width, nodes)

    def _best(self, slots: list[int]) -> tuple[Budget, float]:
        """The best budget of at least one token, and its expected speed against plain decoding.

        Before drafting has proved itself, little is known of deep drafts. Then the depth stays below twice that of a probe,
        or the number of draft tokens that were accepted in a row.
        """
        count, pooled = len(slots), self.pooled.chances(hope=2 * _SHALLOW)
        alive = [survival(self._record(slot).acceptance.chances(pooled)) for slot in slots]
        came = survival(self.proposed.chances())
        best, gain, tokens = Budget(0), 0.0, 1.0
        trusted = self.losses.proved or self.judged
        deepest = self.limit.depth if trusted else min(max(2 * _SHALLOW, self.streak), self.limit.depth)
        for depth in range(1, deepest + 1):
            tokens += sum(k[depth - 1] for k in alive) / count
            new = tokens / self._slowness(self._shape(depth), came)
            if new > gain:
                best, gain = self._shape(depth), new
        if self.orders is not None:
            if self.budget.width == 1:
                self.orders.fade(self._aging)
            like = sum(k[0] for k in alive) / count / pooled[0]  # these sequences against all observed ones
            for depth, accepted in enumerate(self.orders.expected(pooled[0])[:deepest], 1):
                for nodes in range(depth + 1, min(self.limit.max_nodes, 2 * deepest) + 1):
                    budget = Budget(depth, self.limit.width, nodes)
                    new = (1 + like * accepted[nodes - 1]) / self._slowness(budget, came)
                    if new > gain:
                        best, gain = budget, new
        if count > 1 and self.costs.draft.shapes and gain > 1:
            self._leave_out(slots, alive, best, gain)
        return best, gain

    def _leave_out(self, slots: list[int], alive: Sequence[Sequence[float]], budget: Budget, gain: float) -> None:
        """Leave out slots whose expected draft tokens are worth less than the time of drafting for one slot. What was
        observed of them fades, so that they are tried again."""
        count, plain = len(slots), self.costs.plain(len(slots))
        assert plain is not None
        saved = self.costs.draft.seconds(count, budget) - self.costs.draft.seconds(count - 1, budget)
        for slot, chances in zip(slots, alive, strict=True):
            if sum(chances[: budget.depth]) / count * plain / gain < saved:
                self.left_out.add(slot)
                self._record(slot).acceptance.fade(self._aging)

    def _least_probability(self, budget: Budget) -> float:
        """A token that is less likely to be accepted gets no successor: that would cost more time than it can save.

        The successor saves what a token takes now, if it is accepted, and it cannot be likelier than the token before it.
        """
        plain = self.costs.plain(self.batch_size)
        assert plain is not None
        price = self.costs.level(self.batch_size, budget) * max(self.gain, 1.0) / plain
        return min(max(price, _LEAST), _MOST_SURE)

    def _slowness(self, budget: Budget, came: Sequence[float]) -> float:
        """Expected seconds of a step with this budget, in plain steps. came: as for `Costs.step`."""
        plain = self.costs.plain(self.batch_size)
        assert plain is not None
        return self.costs.step(self.batch_size, budget, came) / plain

    def _worth_a_look(self, plain: float) -> bool:
        """Whether a probe goes on. While few drafts were timed, only the loss budget decides."""
        return self.losses.room(plain) > 0 and (not self.costs.draft.settled or self._hopeful())

    def _hopeful(self) -> bool:
        """Whether drafting would pay at some depth if every draft token were accepted; no, if none was in a few tries."""
        if self.pooled.tries[0] > 3 and not self.pooled.hits[0]:
            return False
        everything = [1.0] * self.limit.max_nodes
        depths = range(1, self.limit.depth + 1)
        return any(1 + depth > self._slowness(self._shape(depth), everything) for depth in depths)

    def _nearly_free(self) -> bool:
        return self._slowness(self._shallow, survival(self.proposed.chances())) < 1 + ALLOWANCE

    def _affordable(self, slots: list[int], plain: float) -> list[int]:
        """The slots that may be probed: the loss budget must cover what the drafter reads for them, and a probe in which no
        draft token is accepted."""
        slowness = self._slowness(self._shallow, survival(self.proposed.chances()))
        room = self.losses.room(plain) - _PROBE * max(slowness - 1, 0.0) * plain
        chosen: list[int] = []
        for slot in sorted(slots, key=self._reading):
            room -= self._reading(slot)
            if room < 0:
                break
            chosen.append(slot)
        return chosen

    def _reading(self, slot: int) -> float:
        """Seconds in which the drafter reads what it has missed of a sequence."""
        record = self._record(slot)
        missed = int(self.prompt) if record.position is None else record.position - record.read
        return self.costs.draft.reading(missed)

    def _wanted(self, slot: int) -> bool:
        """Whether a slot is drafted for. What it gains until its end must cover the reading twice."""
        if self.probed:
            return slot in self.probed
        reading = self._reading(slot)
        if slot in self.left_out or reading <= 0:
            return slot not in self.left_out
        record, plain = self._record(slot), self.costs.plain(self.batch_size)
        remaining = self.lengths.remaining(record.written)
        promised = (1 - 1 / self.gain) * remaining * (plain or 0.0) / self.batch_size
        return (
            2 * reading <= promised
        )  # both the gain and the length are estimates: it must promise twice what it costs

    # -- observations ---------------------------------------------------------------------------------------------------

    def _observe_drafted(self, step: Step) -> None:
        behind = 0
        for b, (slot, asked, position, commit) in enumerate(
            zip(step.slots, step.budgets, step.positions, step.commits, strict=True)
        ):
            record, after = self._follow(slot, position, commit)
            if not asked.depth:
                continue
            behind += max(position - record.read, 0)
            record.read, record.drafted = after, True
            if commit.finish is None:  # a text that was cut says nothing of what was rejected
                self._accepted(record, step, b)
        nodes = step.draft.nodes - 1
        self.judged = self.judged or step.draft.confidence is not None
        self.proposed.observe(max(b.max_nodes for b in step.budgets), nodes)
        self._account(step, self.costs.observe(step, nodes, behind))

    def _accepted(self, record: _SlotRecord, step: Step, b: int) -> None:
        """Count the accepted draft tokens of entry b."""
        asked, commit = step.budgets[b], step.commits[b]
        right = commit.num_accepted
        wrong = right < min(asked.depth, step.draft.nodes - 1)
        self.streak = 0 if wrong else self.streak + right
        if self.orders is not None and asked.width > 1:
            right = self.orders.observe(step.draft, b, commit.nodes, asked)
        record.acceptance.observe(asked.depth, right)
        self.pooled.observe(asked.depth, right)

    def _follow(self, slot: int, position: int, commit: Commit) -> tuple[_SlotRecord, int]:
        """The slot's record, brought up to date, and its committed tokens."""
        record = self._record(slot)
        if record.position is None:
            self.prompt += (position - self.prompt) * (0.1 if self.prompt else 1)
        record.position = position + len(commit.tokens)
        record.written += len(commit.tokens)
        return record, record.position

    def _account(self, step: Step, reading: float) -> None:
        """Charge a drafted step to the loss budget. reading: seconds in which the drafter read what it had missed."""
        taken = sum(step.seconds.values())
        self.losses.elapsed += taken
        plain = self.costs.plain(len(step.slots))
        if plain is None or not self.usual:
            return
        worth = sum(len(commit.tokens) for commit in step.commits) * plain / len(step.slots)
        taken = min(taken, 2 * self.usual + reading)  # a pause of the machine is not the drafter's fault
        # A first look is not charged for reading the prompt.
        self.losses.charge(worth, taken - reading, reading if self.phase is not Phase.FIRST_LOOK else 0.0)

    def _record(self, slot: int) -> _SlotRecord:
        if slot not in self.slots:
            self.slots[slot] = _SlotRecord(Acceptance(self.limit.depth, 16))
        return self.slots[slot]
