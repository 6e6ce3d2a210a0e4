"""What the loop asks of a controller, what goes into the planner and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """What a lookup proposes: a note of `Draft.notes`."""

    nodes: Sequence[tuple[int, int]]  # (token, parent) of each node, the root first
    masses: Sequence[float]  # probability of each node as the lookup sees it, 1 for the root
    match: int  # tokens of the longest end of the text that occurred before, 0 for none

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


@dataclass(frozen=True)
class View:
    """What a plan may know of a sequence."""

    slot: int
    written: int  # output tokens so far
    left: int  # output tokens that may follow
    budget: Budget  # the largest draft
    offers: Mapping[str, Offer]  # of lookups, by name
    missing: Mapping[str, int]  # by draft model or head: tokens that it must read before it can draft
    fixed: bool = False  # the draft has the budget's size, whatever it is worth
    length: int = 0  # tokens so far


class Choice(NamedTuple):
    """A drafter as the planner weighed it."""

    name: str
    accepted: float = 1.0  # chance that its next token is right
    tokens: float = 0.0  # draft tokens expected to be accepted
    seconds: float = 0.0  # of the step
    speed: float = 0.0  # tokens a second of the step
    verdict: str = "slower"  # or "chosen", or why not
    levels: int = 0  # of the draft
    hopeful: bool = True  # it could be worth it
    survival: Sequence[float] = ()  # probability of each node of a lookup's offer
    stop: float = 0.0  # a chain ends behind a token with less
    least: float = 0.0  # nodes with less are not verified

    def __str__(self) -> str:
        cost = f"{1000 * self.seconds:.1f} ms"
        return f"{self.name}: {self.accepted:.2f} accepted lately, {self.tokens:.2f} tokens for {cost}, {self.verdict}"


class StepForecast(NamedTuple):
    """A step without the draft that is weighed."""

    tokens: float  # that it commits
    seconds: float  # of drafting
    around: float  # seconds around a draft
    forwards: Sequence[float]  # seconds of the rest, with 0, 1, ... nodes more
    node: float = 0.0  # of these, a node of the largest draft adds so many

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
        for k, (alive, seconds_of_draft) in enumerate(zip(survival, drafting, strict=True), 1):
            total, taken = total + alive, spent + seconds_of_draft + forwards[k]
            if total > speed * taken:
                speed, levels, tokens, seconds = total / taken, k, total - self.tokens, taken
        return Choice(name, accepted, tokens, seconds, speed, "slower", levels, hopeful)


@dataclass(frozen=True)
class Plan:
    """What is done for a sequence in a step."""

    drafter: str | None  # None decodes plainly
    budget: Budget = PLAIN  # of its draft
    read: tuple[str, int] | None = None  # (drafter, tokens) that it reads without a draft
    plain: float = 0.0  # tokens a second of plain decoding
    chosen: Choice | None = None  # the choice that drafts
    why: tuple[Choice, ...] = ()  # all that was weighed


class Charge(NamedTuple):
    """What a drafter took in a step."""

    name: str
    rows: int  # sequences that it drafted for
    levels: int  # of its deepest draft
    read: int  # tokens that it had missed
    seconds: float


@dataclass(eq=False)
class PlanNote:
    """A plan, and what became of it before the target judged: a note of `Draft.notes`."""

    plan: Plan
    offers: Mapping[str, Offer]  # of the lookups
    levels: int = 0  # that are verified
    charges: Sequence[Charge] = ()  # of all drafters in this step
    stated: bool = True  # the drafter stated its chances

    def __str__(self) -> str:
        plan = self.plan
        head = f"{plan.drafter} drafts" if plan.drafter else "no draft"
        if plan.read is not None:
            head += f", {plan.read[0]} reads {plan.read[1]} tokens"
        return f"{head}; {'; '.join(map(str, plan.why)) or 'nothing to weigh'}" if plan.plain else head
