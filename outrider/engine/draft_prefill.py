"""Draft models read long texts in pieces, between the steps. A step waits for a piece at most, not for a prompt.

A draft model reads what it has missed of a sequence when it is first asked for a draft. Where that is long and other
sequences are decoding, the sequence goes without drafts until most of it is read.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

from outrider.control import Controller
from outrider.core.types import Budget, Step
from outrider.decode import Sequence
from outrider.drafters import ModelDrafter
from outrider.drafters.combine.guard import PerRequestDrafter

PIECE = 256  # tokens that draft models read between two steps
WITHIN = 128  # and within one, the shorter sequences filled up to the longest
log = logging.getLogger("outrider.engine")


def may_miss(drafted: int) -> int:
    """Tokens that the draft model may still have to read of each of `drafted` sequences, within a step."""
    return max(1, WITHIN // max(1, drafted))


class DraftPrefill:
    """What draft models have yet to read.

    drafter, sequences: of the decoder, the latter by slot. waiting: slots whose draft model is behind. spent: seconds of
    reading by slot, until a step accounts for them.
    """

    def __init__(self, drafter: PerRequestDrafter, sequences: Mapping[int, Sequence]) -> None:
        self.drafter, self.sequences = drafter, sequences
        self.waiting: list[int] = []
        self.spent: dict[int, float] = {}

    def gated(self, slots: abc.Sequence[int], budgets: abc.Sequence[Budget]) -> list[Budget]:
        """The budgets, with 0 where a draft model would have to read too much first. A sequence alone never waits."""
        self.waiting = []
        if len(self.sequences) == 1:
            return list(budgets)
        out, most = list[Budget](), may_miss(sum(b.depth > 0 for b in budgets))
        for slot, budget in zip(slots, budgets, strict=True):
            missing = sum(self._missing(d, slot) for d in self._draft_models(slot)) if budget.depth else 0
            if missing > most:
                self.waiting.append(slot)
            out.append(Budget(0) if missing > most else budget)
        return out

    def read(self) -> None:
        """Read a piece, for the slots that have waited longest."""
        room = PIECE
        for slot in self.waiting:
            for model in self._draft_models(slot) if slot in self.sequences else ():
                count = min(self._missing(model, slot), room)
                if count > 0:
                    self._read(model, slot, count)
                    room -= count

    def release(self, slot: int) -> None:
        """The sequence in this slot has left."""
        self.spent.pop(slot, None)

    def _read(self, model: ModelDrafter, slot: int, count: int) -> None:
        started = perf_counter()
        try:
            model.read(slot, self.sequences[slot].tokens, count)
        except Exception as error:
            self._lose(slot, error)
        self.spent[slot] = self.spent.get(slot, 0.0) + perf_counter() - started

    def _missing(self, model: ModelDrafter, slot: int) -> int:
        try:
            return model.missing(slot, self.sequences[slot].tokens)
        except Exception as error:
            self._lose(slot, error)
            return 0

    def _lose(self, slot: int, error: Exception) -> None:
        log.warning("the drafter of a sequence could not read (%s)", type(error).__name__)
        self.drafter.lose(self.drafter.method(slot), [slot], error)

    def _draft_models(self, slot: int) -> list[ModelDrafter]:
        """The draft models behind a sequence's method."""
        drafter = self.drafter.drafter(slot)
        every = () if drafter is None else (drafter, *drafter.inner().values())
        return [d for d in every if isinstance(d, ModelDrafter)]


class RequestBudgets:
    """A controller around another, for what single requests need.

    A request may have a draft length of its own. A sequence gets no draft while its draft model is behind.
    depth: the requested lengths by slot. reading: keeps draft models level.
    """

    def __init__(self, inner: Controller, reading: DraftPrefill) -> None:
        self.inner, self.reading = inner, reading
        self.depth: dict[int, int] = {}

    def budgets(self, slots: list[int]) -> list[Budget]:
        given = zip(slots, self.inner.budgets(slots), strict=True)
        return self.reading.gated(slots, [self._own(slot, budget) for slot, budget in given])

    def observe(self, step: Step) -> None:
        """Count the seconds of reading between steps in the step that first drafts for the sequence."""
        if self.reading.spent:
            drafter, total = self.reading.drafter, step.seconds["draft"]
            for slot, budget in zip(step.slots, step.budgets, strict=True):
                if budget.depth:
                    spent, name = self.reading.spent.pop(slot, 0.0), drafter.method(slot)
                    total += spent
                    drafter.draft_seconds[name] = drafter.draft_seconds.get(name, 0.0) + spent
            step = replace(step, seconds={**step.seconds, "draft": total})
        self.inner.observe(step)

    def release(self, slot: int) -> None:
        self.depth.pop(slot, None)
        self.reading.release(slot)
        self.inner.release(slot)

    def _own(self, slot: int, budget: Budget) -> Budget:
        """The same tree, as deep as the request wants it."""
        depth = self.depth.get(slot)
        return budget if depth is None else replace(budget, depth=depth) if depth else Budget(0)
