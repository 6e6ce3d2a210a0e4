"""Draft models read long texts in pieces, between the steps: a step waits for a piece at most, not for a prompt.

A draft model takes in what it has missed of a row when it is first asked to guess for it. Where that is long, and others
write meanwhile, the row goes without guesses until the engine has read most of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch

from outrider.decode import Row
from outrider.drafters import ModelDrafter
from outrider.drafters.roster import Roster
from outrider.types import Budget

PIECE = 256  # tokens that draft models read between two steps
WITHIN = 128  # and within one, the shorter rows filled up to the longest
log = logging.getLogger("outrider.engine")


class Reading:
    """Who reads what. waiting: rows whose drafter is being brought level. spent: seconds of it, by row."""

    def __init__(self, roster: Roster, rows: Mapping[int, Row]) -> None:
        self.roster, self.rows = roster, rows
        self.waiting: list[int] = []
        self.spent: dict[int, float] = {}

    def gated(self, rows: Sequence[int], budgets: Sequence[Budget]) -> list[Budget]:
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
        started, have = perf_counter(), drafter.cache.length[row]
        piece = self.rows[row].tokens[have : have + count]
        try:
            drafter.model.forward(torch.tensor([piece]), drafter.cache, [row], want="none")
            drafter.cache.commit([row], [range(len(piece))])
        except Exception as error:
            log.warning("the drafter of a row could not read (%s)", type(error).__name__)
            self.roster._lose(self.roster.method(row), [row], error)
        self.spent[row] = self.spent.get(row, 0.0) + perf_counter() - started

    def _drafters(self, row: int) -> list[ModelDrafter]:
        """The draft models behind a row's method that read the target's own tokens into a cache of their own."""
        if row in self.roster.lost:
            return []
        drafter = self.roster.drafters.get(self.roster.method(row))
        inner = [drafter, *getattr(drafter, "drafters", {}).values()]
        return [d for d in inner if type(d) is ModelDrafter]

    def _missing(self, drafter: ModelDrafter, row: int) -> int:
        """Tokens that a drafter has not read of a row; none where it will not draft, as the text is too long for it."""
        tokens = len(self.rows[row].tokens)
        return 0 if tokens >= drafter.model.max_length else tokens - 1 - drafter.cache.length[row]
