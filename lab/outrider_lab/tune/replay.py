"""Recorded texts replayed with any setting, at the costs of a machine. No model, no clock, no noise: seconds come from costs.

A replay runs the real planner and the real way from plans to drafts. Only the drafters are played back, and the target's answer
is the recorded text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.control import CostModel, Costs, Fixed, Planner
from outrider.control.plan import Charge, Offer
from outrider.core.tree import chain
from outrider.core.types import Budget, Commit, Draft, Step, Verdict
from outrider.drafters.base import BaseDrafter, DraftContext, TargetPass
from outrider.drafters.method import method_of
from outrider.drafters.model.confidence import FOR_HEADS, START, LogitError
from outrider.drafters.planned import PlannedDrafter
from outrider.drafters.proposal import accepted_path
from outrider_lab.tune.recorded import STATED, RecordedText

_WRONG = -1  # a draft token that no text has
DEEPEST = 16
PLANNED, MORE, DRAFTED = 5.5e-4, 1.2e-4, 1e-4
"""Seconds around the drafters' own: of a plan with its lookups, of that for each further sequence, whose code is warm, and of a
draft. `python -m benchmarks.around` measures the first and the last; the second is of stub models."""


class PlayedBack(BaseDrafter):
    """A drafter that proposes what was recorded."""

    def __init__(self, name: str, lookup: bool, texts: Mapping[int, RecordedText]) -> None:
        """Play back one drafter.

        Args:
            lookup: Whether it costs nothing and reads nothing.
            texts: Those that are written now, by slot.
        """
        self.name, self.lookup, self.texts = name, lookup, texts
        method = method_of(name)
        self.head = method is not None and bool(method.heads or method.name == "mtp")
        self.error = LogitError(FOR_HEADS if self.head else START)
        self.held: dict[int, int] = {}  # by slot: committed tokens that it has read
        self.last: dict[int, int] = {}  # levels that it drafted in this step, by slot
        self.calls = 0  # drafts so far

    def missing(self, slot: int, tokens: list[int]) -> int:
        return 0 if self.lookup or self.head else len(tokens) - 1 - self.held.get(slot, 0)

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        self.held[slot] = self.held.get(slot, 0) + count

    def propose(self, context: DraftContext) -> Draft:
        proposals, stated, notes = list[list[int]](), list[list[float]](), list[object]()
        for slot, tokens, n, budget in zip(
            context.slots, context.tokens, context.prompt_lengths, context.budgets, strict=True
        ):
            text = self.texts[slot]
            recorded, at = text.drafts[self.name][len(tokens) - n], len(tokens) - n
            draft, chances, alive = list[int](), list[float](), 1.0
            length = min(recorded.length, budget.depth, budget.max_nodes)
            if self.lookup:
                self.last[slot] = length
            else:
                length = min(budget.depth, budget.max_nodes)  # unlikely tokens were not recorded: they are wrong
            for k in range(length):
                draft.append(text.output[at + k] if k < recorded.accepted else _WRONG)
                chance = recorded.chances[k] if k < len(recorded.chances) else 1e-4
                if not self.lookup:
                    chance = min(max(chance, 1e-4), 1 - 1e-4)
                    chance = 1 / (1 + math.exp(-math.log(chance / (1 - chance)) * STATED / self.error.scale))
                alive *= chance
                chances.append(alive)
                if budget.min_probability and alive < budget.min_probability:
                    break
            if not self.lookup and draft:
                self.calls += 1
                self.last[slot] = len(draft)
                self.held[slot] = len(tokens) - 1
                logs = [0.0, *(math.log(max(c, 1e-9)) for c in chances)]
                self.error.state(slot, range(-1, len(draft)), logs)
            proposals.append([tokens[-1], *draft])
            stated.append([1.0, *chances])
            nodes = [(token, n - 1) for n, token in enumerate(proposals[-1])]
            notes.append(Offer(nodes, [max(chance, 1e-9) for chance in stated[-1]], recorded.match))
        rows, parents = chain(proposals)
        confidence = np.zeros(rows.shape, np.float32)
        for b, chances in enumerate(stated):
            confidence[b, : len(chances)] = chances
        return Draft(rows, parents, confidence=confidence, notes=tuple(notes) if self.lookup else ())

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        if self.lookup:
            return
        self.error.learn(context.slots, commits)
        for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
            drafted = self.last.get(slot, 0)
            if drafted:  # the root and the accepted tokens that it forwarded itself
                self.held[slot] = len(tokens) - len(commit.tokens) + min(commit.num_accepted, drafted - 1)

    def release(self, slot: int) -> None:
        self.held.pop(slot, None)
        self.last.pop(slot, None)
        self.error.release(slot)


class Nothing:
    """Stands for sampling parameters and noise of some rows: a replay draws nothing, and no request has a grammar."""

    mask = None

    def __init__(self, rows: int) -> None:
        self.histories = [self] * rows

    def select(self, some: Sequence[int]) -> Nothing:
        return Nothing(len(some))


@dataclass
class Played:
    """What a setting did with a text."""

    text: RecordedText
    seconds: float = 0.0  # of decoding, with all drafting and reading
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        return len(self.text.output)


class Machine:
    """Writes recorded texts with a planner, and keeps time with costs. Seconds are those of `costs`, times noise of `jitter`."""

    def __init__(
        self,
        costs: CostModel,
        planner: Planner,
        drafters: Sequence[str],
        lookups: Sequence[str] = (),
        *,
        jitter: float = 0.0,
        seed: int = 0,
        slots: int = 1,
    ) -> None:
        self.costs, self.planner, self.jitter = costs, planner, jitter
        self.random, self.slots = random.Random(seed), slots
        self.running: dict[int, RecordedText] = {}
        self.played = {name: PlayedBack(name, name in lookups, self.running) for name in drafters}
        self.drafter = PlannedDrafter(self.played, planner, 1 << 30, lookups, trusted=self.played) if drafters else None
        self.speed = 1.0  # of the machine, against the costs
        self.seconds = 0.0  # of all steps so far

    @property
    def calls(self) -> dict[str, int]:
        """Drafts that each drafter was asked for."""
        return {name: drafter.calls for name, drafter in self.played.items()}

    def write(self, texts: Sequence[RecordedText]) -> list[Played]:
        """Write texts in this order, as many at a time as there are slots."""
        done, left = list[Played](), list(texts)
        rows: dict[int, tuple[Played, list[int]]] = {}
        while left or rows:
            while left and len(rows) < self.slots:
                slot = next(n for n in range(self.slots) if n not in rows)
                text = left.pop(0)
                rows[slot] = Played(text), list(text.prompt)
                self.running[slot] = text
            seconds = self._step(rows)
            for slot, (played, tokens) in list(rows.items()):
                played.seconds += seconds
                if len(tokens) - len(played.text.prompt) >= len(played.text.output):
                    done.append(played)
                    del rows[slot], self.running[slot]
                    self.planner.release(slot)
                    if self.drafter is not None:
                        self.drafter.release(slot)
        return done

    def _step(self, rows: Mapping[int, tuple[Played, list[int]]]) -> float:
        slots, every = list(rows), list(rows.values())
        before = [len(tokens) for _, tokens in every]
        left = [p.text.limit - (n - len(p.text.prompt)) for (p, _), n in zip(every, before, strict=True)]
        budgets = [b.clipped(n - 1) for b, n in zip(self.planner.budgets(slots), left, strict=True)]
        anything: Any = Nothing(len(slots))
        context = DraftContext(
            slots=slots,
            tokens=[tokens for _, tokens in every],
            budgets=budgets,
            warp=anything,
            noise=anything,
            stream=anything,
            needs_probs=False,
            prompt_lengths=[len(p.text.prompt) for p, _ in every],
            left=left,
        )
        for drafter in self.played.values():
            drafter.last = {}
        if self.drafter is not None and any(b.depth for b in budgets):
            draft = self.drafter.propose(context)
        else:
            draft = Draft(*chain([[tokens[-1]] for _, tokens in every]))
        commits = [self._commit(p, n, nodes) for (p, _), n, nodes in zip(every, before, draft.host, strict=True)]
        drafting = self._charged(draft)
        nodes = sum(len(tree) for tree in draft.host)
        forward = self.costs.forward(nodes) * self._noise()
        for (played, tokens), commit, tree in zip(every, commits, draft.host, strict=True):
            tokens += commit.tokens
            played.steps += 1
            played.drafted += len(tree) - 1
            played.accepted += commit.num_accepted
        if self.drafter is not None:
            self.drafter.update(context, commits, TargetPass(draft, np.empty((len(commits), 0))))
        seconds = {"draft": drafting, "target": forward, "verify": 0.0, "commit": 0.0}
        self.planner.observe(Step(draft, Verdict([]), commits, slots, before, budgets, seconds))
        self.seconds += drafting + forward
        return drafting + forward

    def _commit(self, played: Played, position: int, nodes: list[tuple[int, int]]) -> Commit:
        at = position - len(played.text.prompt)
        rest = played.text.output[at:]
        path = accepted_path(nodes, rest)
        new = rest[: len(path)]
        ended = len(new) == len(rest)
        return Commit(new, path[: len(new)], min(len(path) - 1, len(new)), "stop" if ended else None)

    def _charged(self, draft: Draft) -> float:
        """Seconds of drafting in this step. The charges that the planner sees are made of the costs, too."""
        total = (PLANNED + MORE * (len(draft.notes) - 1)) * bool(draft.notes) + DRAFTED * sum(
            len(tree) > 1 for tree in draft.host
        )
        charges: list[Charge] = draft.notes[0].charges if draft.notes else []
        for at, charge in enumerate(charges):
            cost = self.costs.drafters[charge.name]
            seconds = cost.read * charge.read
            if charge.levels:
                together = self.costs.forward(charge.rows) / self.costs.forward(1)
                seconds += (cost.first + cost.level * charge.levels) * together
            charges[at] = charge._replace(seconds=seconds * self._noise())
            total += charges[at].seconds
        return total

    def _noise(self) -> float:
        return (math.exp(self.random.gauss(0, self.jitter)) if self.jitter else 1.0) / self.speed


def plain_seconds(text: RecordedText, costs: CostModel) -> float:
    """Seconds of plain decoding of a text."""
    return len(text.output) * costs.forward(1)


def auto(costs: CostModel, limit: int = DEEPEST, believed: CostModel | None = None) -> Planner:
    """The planner that a server has.

    Args:
        believed: The costs that it starts with, if they are others.
    """
    return Planner(Budget(limit), Costs(believed or costs))


def fixed(costs: CostModel, length: int) -> Planner:
    """A planner with one draft length."""
    return Planner(Budget(length), Costs(costs), Fixed(length))
