"""Draft models read long texts in pieces, between the steps: a step waits for a piece at most, not for a prompt.

A draft model takes in what it has missed of a row when it is first asked to guess for it. Where that is long, and others
write meanwhile, the row goes without guesses until the engine has read most of it.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Mapping
from time import perf_counter

from outrider.core.types import Budget
from outrider.decode import Sequence
from outrider.drafters import ModelDrafter
from outrider.drafters.combine.guard import PerRequestDrafter

PIECE = 256  # tokens that draft models read between two steps
WITHIN = 128  # and within one, the shorter rows filled up to the longest
log = logging.getLogger("outrider.engine")


class Reading:
    """Who reads what. waiting: rows whose drafter is being brought level. spent: seconds of it, by row."""

    def __init__(self, roster: PerRequestDrafter, rows: Mapping[int, Sequence]) -> None:
        self.roster, self.rows = roster, rows
        self.waiting: list[int] = []
        self.spent: dict[int, float] = {}

    def gated(self, rows: abc.Sequence[int], budgets: abc.Sequence[Budget]) -> list[Budget]:
        """The budgets, with none for rows whose drafter would have to read too much first. Nobody waits for a row alone."""
        self.waiting = []
        if len(self.rows) == 1:
            return list(budgets)
        out, most = list[Budget](), max(1, WITHIN // max(1, sum(b.depth > 0 for b in budgets)))
        for row, budget in zip(rows, budgets, strict=True):
            missing = sum(self._missing(d, row) for d in self._drafters(row)) if budget.depth else 0
            if missing > most:
                self.waiting.append(row)
            out.append(Budget(0) if missing > most else budget)
        return out

    def read(self) -> None:
        """A piece, for those that have waited longest."""
        room = PIECE
        for row in self.waiting:
            for drafter in self._drafters(row) if row in self.rows else ():
                count = min(self._missing(drafter, row), room)
                if count > 0:
                    self._read(drafter, row, count)
                    room -= count

    def release(self, row: int) -> None:
        self.spent.pop(row, None)

    def _read(self, drafter: ModelDrafter, row: int, count: int) -> None:
        started = perf_counter()
        try:
            drafter.read(row, self.rows[row].tokens, count)
        except Exception as error:
            self._lose(row, error)
        self.spent[row] = self.spent.get(row, 0.0) + perf_counter() - started

    def _missing(self, drafter: ModelDrafter, row: int) -> int:
        try:
            return drafter.missing(row, self.rows[row].tokens)
        except Exception as error:
            self._lose(row, error)
            return 0

    def _lose(self, row: int, error: Exception) -> None:
        log.warning("the drafter of a row could not read (%s)", type(error).__name__)
        self.roster.lose(self.roster.method(row), [row], error)

    def _drafters(self, row: int) -> list[ModelDrafter]:
        """The draft models behind a row's method."""
        drafter = self.roster.drafter(row)
        return (
            [] if drafter is None else [d for d in (drafter, *drafter.inner().values()) if isinstance(d, ModelDrafter)]
        )
