"""Controllers turn what has been observed into the budget of the next step. They change speed, never the law; under
`match`, never even the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.control.acceptance import Acceptance, RankAcceptance, survival
from outrider.control.costs import SETTLE, Costs
from outrider.core.types import Budget, Commit, Step

ALLOWANCE, START = 0.01, 4.0  # what probing may lose: this part of all time, and so many plain steps to begin with
_GAPS = (16, 512)  # steps between probes of drafting that failed: the first gap, doubled up to the last
_FIRST_BURST, _BURST, _LOOK = 10, 4, 2  # steps of the first look and of a probe, and their depth
_FADE = 0.1  # what a probe leaves of the acceptance seen before it
_EVERY, _THINKING = 16, 0.005  # a decision stands for so many steps at most, fewer where it is this part of their time
_ENTER = 1.02  # how much better drafting must look before it begins
_MEASURE = SETTLE + 3  # plain steps after drafted ones in which plain decoding is measured again
_PROOF = 12  # drafted steps after which their own speed, not the estimate, has the last word


class Controller(Protocol):
    """Decides budgets."""

    def budgets(self, rows: list[int]) -> list[Budget]:
        """What may be spent on each of these cache rows in the next step."""
        ...

    def observe(self, step: Step) -> None:
        """What came of the last step."""
        ...

    def release(self, row: int) -> None:
        """The sequence in this row has ended."""
        ...


class Fixed:
    """The same budget for every row and step."""

    def __init__(self, depth: int, width: int = 1, nodes: int | None = None) -> None:
        self.budget = Budget(depth, width, nodes)

    def budgets(self, rows: list[int]) -> list[Budget]:
        return [self.budget] * len(rows)

    def observe(self, step: Step) -> None: ...

    def release(self, row: int) -> None: ...


@dataclass(eq=False)
class _Row:
    """What a controller knows of a sequence."""

    acceptance: Acceptance
    position: int | None = None  # committed tokens after the last step seen
    level: int = 0  # committed tokens the drafter has read
    written: int = 0


@dataclass(eq=False)
class _Ledger:
    """Seconds lost to probes, and what recent drafted steps took against what plain decoding would have."""

    elapsed: float = 0.0
    spent: float = 0.0  # by drafting that has not proved itself
    worth: float = 0.0  # plain seconds for the tokens of recent drafted steps, fading
    taken: float = 0.0  # and the seconds they took
    steps: float = 0.0

    @property
    def proved(self) -> bool:
        return self.steps > _PROOF and self.worth > self.taken

    @property
    def disproved(self) -> bool:
        return self.steps > _PROOF and self.worth < 0.98 * self.taken

    def fade(self, factor: float = 0.95) -> None:
        self.worth, self.taken, self.steps = factor * self.worth, factor * self.taken, factor * self.steps


@dataclass(eq=False)
class _Plan:
    """What stands until it is decided anew."""

    budget: Budget = field(default_factory=lambda: Budget(0))
    rows: int = 0  # how many rows it was decided for
    left: int = 0  # steps it still stands
    since: int = 0  # the step it was decided at
    usual: float = 0.0  # seconds expected of one of them, if it drafts
    gain: float = 1.0  # expected speed against plain decoding
    believed: bool = False  # drafting is thought to pay
    probe: list[int] | None = None  # rows that are drafted for only to see
    out: set[int] = field(default_factory=set[int])  # rows whose own guesses do not pay for their drafting


class Adaptive:
    """As much as pays, from running acceptance and the measured time of the steps themselves; plain where nothing pays.

    Needs no calibration: the first steps are plain and measure, then a short look at drafted ones. From there the depth
    with the most expected tokens per second is taken, anew every few steps. While drafting does not pay it is skipped, and
    probed after gaps that double; while it pays, plain decoding is measured again, so seldom that it costs `ALLOWANCE` of the
    time: the more drafting gains, the longer is it left alone.

    With `Calibrated` costs it starts with what is known, chains of every depth are weighed against trees of every depth and
    size within the limit, and a row is left out whose own guesses do not pay for drafting them: `"controller": "optimal"`.

    The price of probing is bounded: drafting that has not proved itself may lose `START` plain steps in all, what it has
    lately gained, and `ALLOWANCE` of all time, and a probe that could cost more (a draft model that was skipped must first
    read what was written) waits until that is earned. On top of it come the first look at a drafter, which must read one
    prompt before anything can be known of it, and the few steps by which belief lags behind a text that turns.
    """

    def __init__(self, limit: Budget | None = None, costs: Costs | None = None) -> None:
        """limit: the largest budget, 8 deep if not given; shallower ones keep its width. costs: where seconds come from,
        learned from the steps if not given."""
        self.limit = limit or Budget(8)
        self.costs = costs or Costs()
        self.pooled = Acceptance(self.limit.depth, 64)
        self.drafted = Acceptance(self.limit.max_nodes, 128)  # nodes that came, of those asked for
        self.places = RankAcceptance(self.limit, 64) if self.costs.shapes and self.limit.width > 1 else None
        self.rows: dict[int, _Row] = {}
        self.length, self.prompt = 128.0, 0.0  # tokens a sequence writes, and has at first, of those seen
        self.ledger, self.plan = _Ledger(), _Plan()
        self.now = 0  # steps so far
        self.gap, self.probe_at, self.burst = _GAPS[0], 0, 0
        self.plain_at = 0
        self.looked = False
        self.streak = 0  # guesses in a row that were right

    def budgets(self, rows: list[int]) -> list[Budget]:
        plan = self.plan
        if not self.limit.max_nodes:
            return [self.limit] * len(rows)
        if plan.left <= 0 or plan.rows != len(rows):
            self._decide(rows)
        plan.left -= 1
        self.now += 1
        if plan.budget.depth == 0:
            return [plan.budget] * len(rows)
        return [plan.budget if self._wanted(row) else Budget(0) for row in rows]

    def observe(self, step: Step) -> None:
        if not self.limit.max_nodes:
            return
        behind = 0
        if not any(b.depth for b in step.budgets):
            self._plain(step)
            return
        for b, (row, asked, position, kept) in enumerate(
            zip(step.slots, step.budgets, step.positions, step.commits, strict=True)
        ):
            state, after = self._moved(row, position, kept)
            if asked.depth:
                behind += max(position - state.level, 0)
                state.level = after
                if kept.finish is None:  # a cut says nothing of what was refused
                    right = kept.num_accepted
                    wrong = right < min(asked.depth, step.draft.nodes - 1)
                    self.streak = 0 if wrong else self.streak + right
                    if self.places is not None and asked.width > 1:
                        right = self.places.observe(step.draft, b, kept.nodes, asked)
                    state.acceptance.observe(asked.depth, right)
                    self.pooled.observe(asked.depth, right)
        nodes = step.draft.nodes - 1
        self.drafted.observe(max(b.max_nodes for b in step.budgets), nodes)
        reading = self.costs.observe(step, nodes, behind)
        self._account(step, reading)

    def release(self, row: int) -> None:
        state = self.rows.pop(row, None)
        if state is not None:
            self.length += 0.1 * (state.written - self.length)

    def _row(self, row: int) -> _Row:
        if row not in self.rows:
            self.rows[row] = _Row(Acceptance(self.limit.depth, 16))
        return self.rows[row]

    def _plain(self, step: Step) -> None:
        for row, position, kept in zip(step.slots, step.positions, step.commits, strict=True):
            self._moved(row, position, kept)
        self.costs.observe(step, 0, 0)
        self.ledger.elapsed += sum(step.seconds.values())

    def _moved(self, row: int, position: int, kept: Commit) -> tuple[_Row, int]:
        """A row, brought up to date, and its committed tokens."""
        state = self.rows.get(row) or self._row(row)
        if state.position is None:
            self.prompt += (position - self.prompt) * (0.1 if self.prompt else 1)
        state.position = position + len(kept.tokens)
        state.written += len(kept.tokens)
        return state, state.position

    def _account(self, step: Step, reading: float) -> None:
        """Writes a drafted step into the ledger. reading: seconds in which the drafter read what it had missed."""
        ledger, taken, usual = self.ledger, sum(step.seconds.values()), self.plan.usual
        ledger.elapsed += taken
        plain = self.costs.plain(len(step.slots))
        if plain is None or not usual:
            return
        worth = sum(len(kept.tokens) for kept in step.commits) * plain / len(step.slots)
        taken = min(taken, 2 * usual + reading)  # the machine's pauses are nobody's fault
        if not ledger.proved:
            paid = taken if self.looked else taken - reading  # the first look at a drafter reads on the house
            ledger.spent = max(ledger.spent + paid - worth, 0.0)
        ledger.fade()
        ledger.worth, ledger.taken = ledger.worth + worth, ledger.taken + taken - reading
        ledger.steps += 1
        self.looked = True

    def _decide(self, rows: list[int]) -> None:
        plan, count = self.plan, len(rows)
        plan.rows, was, probed, plan.probe, plan.out = count, plan.believed, plan.probe, None, set()
        if self.costs.plain(count) is None:
            self._set(Budget(0), 1)  # measure
            return
        budget, plan.gain = self._best(rows)
        trusted = self.ledger.proved or (self._room(count) > 0 and not self.ledger.disproved)
        ready = trusted and self.looked and self.costs.settled
        plan.believed = ready and plan.gain > (1.0 if was else _ENTER)
        if plan.believed:
            self._draft(budget, was)
        elif ready and self._free(count):
            plan.believed = True
            self._set(self._look, _EVERY)
        elif probed and self.burst > 0 and self._worth_a_look(count) and {*probed} <= {*rows}:
            self.burst -= 1
            plan.probe = probed
            self._set(self._look, 1)
        else:
            self._skip(rows, failed=was or probed is not None)

    def _draft(self, budget: Budget, was: bool) -> None:
        """Drafting pays; now and then some plain steps are measured."""
        if self.ledger.proved:
            self.gap = _GAPS[0]
        if was and 0 < self.plain_at <= self.now:
            self._set(Budget(0), _MEASURE)
            self.plain_at = 0
            return
        self._set(budget, 2)
        plan, plain = self.plan, self.costs.plain(self.plan.rows)
        assert plain is not None
        if self.ledger.proved:
            plan.left = min(max(round(self.costs.thinking / (_THINKING * plan.usual)), 1), _EVERY)
        if not was or not self.plain_at:
            lost = _MEASURE * (1 - 1 / plan.gain) * plain
            least, most = self.costs.plain_gaps
            self.plain_at = self.now + round(min(max(lost / (ALLOWANCE * plan.usual), least), most))

    def _skip(self, rows: list[int], failed: bool) -> None:
        """Drafting does not pay, as far as is known: plain steps, and a probe when it is due and can be afforded."""
        if failed:
            proved = self.ledger.proved
            self.ledger.fade(0.0)
            self.probe_at = self.now + self.gap
            self.gap = min(2 * self.gap, _GAPS[1])
            if proved:  # perhaps plain decoding was measured when the machine was faster: look again first
                self.costs.forget_plain(len(rows))
                self._set(Budget(0), _MEASURE)
                return
        elif self.now >= self.probe_at:
            self.plan.probe = self._affordable(rows)
            if self.plan.probe:
                for seen in (self.pooled, *(self._row(row).acceptance for row in self.plan.probe)):
                    seen.fade(_FADE)
                self.burst = (_BURST if self.looked else _FIRST_BURST) - 1
                self._set(self._look, 1)
                return
            self.probe_at = self.now + self.gap
        self._set(Budget(0), self.probe_at - self.now)

    def _set(self, budget: Budget, left: int) -> None:
        plan, count = self.plan, self.plan.rows
        plan.budget, plan.left, plan.since = budget, left, self.now
        plan.usual = self.costs.step(count, budget, [1.0] * budget.max_nodes) if budget.depth else 0.0

    @property
    def _aging(self) -> float:
        """What the steps since the last decision leave of what could not be seen in them."""
        return 0.8 ** ((self.now - self.plan.since) / _EVERY)

    @property
    def _look(self) -> Budget:
        return self._shape(min(_LOOK, self.limit.depth))

    def _shape(self, depth: int) -> Budget:
        """As deep; as wide as the limit where chains and trees are not told apart."""
        limit = self.limit
        if self.costs.shapes:
            return Budget(depth)
        nodes = None if limit.nodes is None else max(depth, round(limit.nodes * depth / limit.depth))
        return Budget(depth, limit.width, nodes)

    def _best(self, rows: list[int]) -> tuple[Budget, float]:
        """(budget, speed against plain decoding) of the best budget of at least 1; before drafting has proved itself not far
        beyond a look, or than as many guesses in a row were right, as little is known of what is deeper."""
        count, pooled = len(rows), self.pooled.chances(hope=2 * _LOOK)
        kept = [survival(self._row(row).acceptance.chances(pooled)) for row in rows]
        came = survival(self.drafted.chances())
        best, gain, tokens = Budget(0), 0.0, 1.0
        deepest = self.limit.depth if self.ledger.proved else min(max(2 * _LOOK, self.streak), self.limit.depth)
        for depth in range(1, deepest + 1):
            tokens += sum(k[depth - 1] for k in kept) / count
            new = tokens / self._slowness(count, self._shape(depth), came)
            if new > gain:
                best, gain = self._shape(depth), new
        if self.places is not None:
            if self.plan.budget.width == 1:
                self.places.fade(self._aging)
            like = sum(k[0] for k in kept) / count / pooled[0]  # these rows against all that were seen
            for depth, worth in enumerate(self.places.expected(pooled[0])[:deepest], 1):
                for nodes in range(depth + 1, min(self.limit.max_nodes, 2 * deepest) + 1):
                    budget = Budget(depth, self.limit.width, nodes)
                    new = (1 + like * worth[nodes - 1]) / self._slowness(count, budget, came)
                    if new > gain:
                        best, gain = budget, new
        if count > 1 and self.costs.shapes and gain > 1:
            self._leave_out(rows, kept, best, gain)
        return best, gain

    def _leave_out(self, rows: list[int], kept: Sequence[Sequence[float]], budget: Budget, gain: float) -> None:
        """Rows whose expected guesses are worth less than the time of drafting one row less. What was seen of them fades, so
        that they are tried again."""
        count, plain = len(rows), self.costs.plain(len(rows))
        assert plain is not None
        saved = self.costs.drafting(count, budget) - self.costs.drafting(count - 1, budget)
        for row, chances in zip(rows, kept, strict=True):
            if sum(chances[: budget.depth]) / count * plain / gain < saved:
                self.plan.out.add(row)
                self._row(row).acceptance.fade(self._aging)

    def _slowness(self, count: int, budget: Budget, came: Sequence[float]) -> float:
        """Of a step that asks for so many guesses, as many as usually come; 1 is a plain step."""
        plain = self.costs.plain(count)
        assert plain is not None
        return self.costs.step(count, budget, came) / plain

    def _worth_a_look(self, count: int) -> bool:
        """Does a probe go on? As long as little is measured, what was measured decides nothing but how much may be lost."""
        return self._room(count) > 0 and (not self.costs.settled or self._hopeful(count))

    def _hopeful(self, count: int) -> bool:
        """Would drafting pay at some depth if every guess came and were right? And has one been right?"""
        if self.pooled.tries[0] > 3 and not self.pooled.hits[0]:
            return False
        sure = [1.0] * self.limit.max_nodes
        return any(1 + d > self._slowness(count, self._shape(d), sure) for d in range(1, self.limit.depth + 1))

    def _free(self, count: int) -> bool:
        """Does asking cost next to nothing, as with a lookup that mostly finds nothing?"""
        return self._slowness(count, self._look, survival(self.drafted.chances())) < 1 + ALLOWANCE

    def _room(self, count: int) -> float:
        """Seconds that drafting may still lose before it has proved itself; what recent drafts have gained is theirs."""
        ledger, plain = self.ledger, self.costs.plain(count)
        assert plain is not None
        gained = max(ledger.worth - ledger.taken, 0.0)
        return START * plain + ALLOWANCE * ledger.elapsed + gained - ledger.spent

    def _affordable(self, rows: list[int]) -> list[int] | None:
        """The rows that may be probed: what the drafter has to read for them, and steps whose guesses are all wrong, must
        not cost more than is allowed. The first look is always allowed."""
        plain = self.costs.plain(len(rows))
        assert plain is not None
        if not self.looked:
            return rows
        slowness = self._slowness(len(rows), self._look, survival(self.drafted.chances()))
        room = self._room(len(rows)) - _BURST * max(slowness - 1, 0.0) * plain
        chosen: list[int] = []
        for row in sorted(rows, key=self._price):
            room -= self._price(row)
            if room < 0:
                break
            chosen.append(row)
        return chosen or None

    def _price(self, row: int) -> float:
        """Seconds in which the drafter reads what it has missed of a row."""
        state = self._row(row)
        return self.costs.reading(int(self.prompt) if state.position is None else state.position - state.level)

    def _wanted(self, row: int) -> bool:
        """Is a row drafted for? What it gains until it ends must cover the reading."""
        if self.plan.probe is not None:
            return row in self.plan.probe
        price = self._price(row)
        if row in self.plan.out or price <= 0:
            return row not in self.plan.out
        state, plain = self._row(row), self.costs.plain(self.plan.rows)
        remaining = max(self.length - state.written, state.written / 2, 16.0)
        surely = 1.0 if self.ledger.proved else 0.5  # what has not proved itself must promise twice what it costs
        return plain is not None and price <= surely * (1 - 1 / self.plan.gain) * remaining * plain / self.plan.rows
