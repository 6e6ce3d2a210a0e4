"""Draft lengths that single requests asked for, and none for rows whose drafter is still reading."""

from __future__ import annotations

from dataclasses import replace

from outrider.control import Controller
from outrider.core.types import Budget, Step
from outrider.engine.draft_prefill import Reading


class PerRow:
    """A controller that lets single rows have a draft length of their own. reading: keeps draft models level."""

    def __init__(self, inner: Controller, reading: Reading) -> None:
        self.inner, self.reading = inner, reading
        self.depth: dict[int, int] = {}  # by slot

    def budgets(self, slots: list[int]) -> list[Budget]:
        budgets = self.inner.budgets(slots)
        if self.depth:
            budgets = [
                b
                if (depth := self.depth.get(slot)) is None
                else Budget(depth, b.width, b.nodes)
                if depth
                else Budget(0)
                for slot, b in zip(slots, budgets, strict=True)
            ]
        return self.reading.gated(slots, budgets)

    def observe(self, step: Step) -> None:
        """Seconds of reading between steps count in the step that first drafts for the row, as if it had read there."""
        if self.reading.spent:
            drafted = [slot for slot, budget in zip(step.slots, step.budgets, strict=True) if budget.depth]
            total, by_drafter = step.seconds["draft"], self.reading.roster.draft_seconds
            for slot in drafted:
                spent, name = self.reading.spent.pop(slot, 0.0), self.reading.roster.method(slot)
                total, by_drafter[name] = total + spent, by_drafter.get(name, 0.0) + spent
            step = replace(step, seconds={**step.seconds, "draft": total})
        self.inner.observe(step)

    def release(self, slot: int) -> None:
        self.depth.pop(slot, None)
        self.reading.release(slot)
        self.inner.release(slot)
