"""What the loop asks of a controller, what goes into the planner and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from outrider.core.types import Budget

if TYPE_CHECKING:
    from outrider.core.types import Step

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
class Offer:
    """What a lookup proposes: a note of `Draft.notes`.

    nodes: (token, parent) of each node, the root first. masses: probability of each node as the lookup sees it, 1 for the root.
    match: tokens of the longest end of the text that occurred before, 0 for none.
    """

    nodes: Sequence[tuple[int, int]]
    masses: Sequence[float]
    match: int

    def __str__(self) -> str:
        return f"a match of {self.match} tokens"

    def survival(self, chance: Callable[[int], float]) -> list[float]:
        """The probability that each node is accepted, the root left out. chance: that the token behind such a match is right."""
        alive, match, largest = [1.0], [self.match], dict[int, float]()
        for (_, parent), mass in zip(self.nodes[1:], self.masses[1:], strict=True):
            share = mass / largest.setdefault(parent, mass)  # of siblings the first one is the likeliest
            alive.append(alive[parent] * share * chance(match[parent]))
            match.append(match[parent] + 1)
        return alive[1:]


@dataclass
class SequenceAverages:
    """What is known of a sequence. The moving averages begin with those of all sequences.

    written: output tokens. accepted: by draft model or head, the chance that its next token is right. asked: the last step in
    which it drafted. shift: by lookup, logits by which it is right more often here. lookup: by which part lookups speed up a
    step. rests: times in a row that they brought less than they cost. idle: the last plan was to do nothing. forced: a grammar
    may leave no choice.
    """

    written: int = 0
    accepted: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    asked: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    shift: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    lookup: float = 0.3
    rests: int = 0
    idle: bool = False
    forced: bool = False


@dataclass(frozen=True)
class View:
    """What a plan may know of a sequence.

    written: output tokens so far. left: output tokens that may follow. budget: the largest draft. offers: of lookups, by name.
    missing: by draft model or head, tokens that it must read before it can draft. fixed: the draft has the budget's size,
    whatever it is worth. length: tokens so far.
    """

    slot: int
    written: int
    left: int
    budget: Budget
    offers: Mapping[str, Offer]
    missing: Mapping[str, int]
    fixed: bool = False
    length: int = 0


class Choice(NamedTuple):
    """A drafter as the planner weighed it.

    accepted: the chance that its next token is right. tokens: draft tokens expected to be accepted. seconds: of the step.
    speed: tokens a second of the step. verdict: "chosen", or why not. levels: of the draft. hopeful: it could be worth it.
    survival: of the nodes of a lookup's offer, the probability of each. stop: a chain ends behind a token with less.
    least: nodes with less are not verified.
    """

    name: str
    accepted: float = 1.0
    tokens: float = 0.0
    seconds: float = 0.0
    speed: float = 0.0
    verdict: str = "slower"
    levels: int = 0
    hopeful: bool = True
    survival: Sequence[float] = ()
    stop: float = 0.0
    least: float = 0.0

    def __str__(self) -> str:
        cost = f"{1000 * self.seconds:.1f} ms"
        return f"{self.name}: {self.accepted:.2f} accepted lately, {self.tokens:.2f} tokens for {cost}, {self.verdict}"


class StepForecast(NamedTuple):
    """A step without the draft that is weighed. tokens: that it commits. seconds: of drafting. around: seconds around a
    draft. forwards: seconds of the rest, with 0, 1, ... nodes more."""

    tokens: float
    seconds: float
    around: float
    forwards: Sequence[float]

    def best(self, name: str, accepted: float, survival: Sequence[float], drafting: Sequence[float] = ()) -> Choice:
        """The prefix of a draft with which the step is fastest.

        Args:
            name: The drafter's.
            accepted: The chance that its next token is right.
            survival: Of the nodes, falling.
            drafting: Seconds of drafting 1, 2, ... of them.
        """
        forwards, spent = self.forwards, self.seconds + self.around
        seconds, levels, tokens, total = self.seconds + forwards[0], 0, 0.0, self.tokens
        speed = total / seconds
        hopeful = bool(drafting) and (total + 1) / (self.seconds + drafting[0] + forwards[1]) > speed
        for k, (alive, own) in enumerate(zip(survival, drafting, strict=True), 1):
            total, taken = total + alive, spent + own + forwards[k]
            if total > speed * taken:
                speed, levels, tokens, seconds = total / taken, k, total - self.tokens, taken
        return Choice(name, accepted, tokens, seconds, speed, "slower", levels, hopeful)


@dataclass(frozen=True)
class Plan:
    """What is done for a sequence in a step.

    drafter: None decodes plainly. budget: of its draft. read: (drafter, tokens) that it reads without a draft. plain: tokens a
    second of plain decoding. chosen: the choice that drafts. why: all that was weighed.
    """

    drafter: str | None
    budget: Budget = PLAIN
    read: tuple[str, int] | None = None
    plain: float = 0.0
    chosen: Choice | None = None
    why: tuple[Choice, ...] = ()


class Charge(NamedTuple):
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

    offers: of the lookups. levels: that are verified. charges: of all drafters in this step. stated: the drafter stated its
    chances.
    """

    plan: Plan
    offers: Mapping[str, Offer]
    levels: int = 0
    charges: Sequence[Charge] = ()
    stated: bool = True

    def __str__(self) -> str:
        plan = self.plan
        head = f"{plan.drafter} drafts" if plan.drafter else "no draft"
        if plan.read is not None:
            head += f", {plan.read[0]} reads {plan.read[1]} tokens"
        return f"{head}; {'; '.join(map(str, plan.why)) or 'nothing to weigh'}" if plan.plain else head
