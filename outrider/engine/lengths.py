"""Draft lengths that single requests asked for, and none for rows whose drafter is still reading."""

from __future__ import annotations

from dataclasses import replace

from outrider.control import Controller
from outrider.core.types import Budget, Step
from outrider.engine.draft_prefill import Reading


class PerRow:
    """A controller that lets single rows have a draft length of their own. reading: see there; set by the engine."""

    def __init__(self, inner: Controller) -> None:
        self.inner = inner
        self.depth: dict[int, int] = {}  # by row
        self.reading: Reading | None = None

    def budgets(self, rows: list[int]) -> list[Budget]:
        budgets = self.inner.budgets(rows)
        if self.depth:
            budgets = [
                b if (depth := self.depth.get(row)) is None else Budget(depth, b.width) if depth else Budget(0)
                for row, b in zip(rows, budgets, strict=True)
            ]
        return budgets if self.reading is None else self.reading.gated(rows, budgets)

    def observe(self, step: Step) -> None:
        """Seconds of reading between steps count in the step that first drafts for the row, as if it had read there."""
        if self.reading is not None and self.reading.spent:
            drafted = [row for row, budget in zip(step.slots, step.budgets, strict=True) if budget.depth]
            if spent := sum(self.reading.spent.pop(row, 0.0) for row in drafted):
                step = replace(step, seconds={**step.seconds, "draft": step.seconds["draft"] + spent})
        self.inner.observe(step)

    def release(self, row: int) -> None:
        self.depth.pop(row, None)
        if self.reading is not None:
            self.reading.release(row)
        self.inner.release(row)
