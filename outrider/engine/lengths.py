"""Draft lengths that single requests asked for."""

from __future__ import annotations

from outrider.tune import Controller
from outrider.types import Budget, Step


class PerRow:
    """A controller that lets single rows have a draft length of their own."""

    def __init__(self, inner: Controller) -> None:
        self.inner = inner
        self.depth: dict[int, int] = {}  # by row

    def budgets(self, rows: list[int]) -> list[Budget]:
        budgets = self.inner.budgets(rows)
        if not self.depth:
            return budgets
        return [
            b if (depth := self.depth.get(row)) is None else Budget(depth, b.width) if depth else Budget(0)
            for row, b in zip(rows, budgets, strict=True)
        ]

    def observe(self, step: Step) -> None:
        self.inner.observe(step)

    def release(self, row: int) -> None:
        self.depth.pop(row, None)
        self.inner.release(row)
