"""The same draft length in every step."""

from __future__ import annotations

from outrider.core.types import Budget, Step


class Fixed:
    """A controller with the same budget for every slot and step."""

    def __init__(self, depth: int, width: int = 1, nodes: int | None = None) -> None:
        self.budget = Budget(depth, width, nodes)

    def budgets(self, slots: list[int]) -> list[Budget]:
        return [self.budget] * len(slots)

    def observe(self, step: Step) -> None: ...

    def release(self, slot: int) -> None: ...
