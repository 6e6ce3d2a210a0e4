"""How much to spend on guesses: controllers turn what has been observed into the budget of the next step."""

from __future__ import annotations

from typing import Protocol

from outrider.types import Budget, Step


class Controller(Protocol):
    """Decides budgets. It changes speed, never the law; under `match`, never even the text."""

    def budgets(self, rows: list[int]) -> list[Budget]: ...

    def observe(self, step: Step) -> None: ...

    def release(self, row: int) -> None: ...


class Fixed:
    """The same budget for every row and step."""

    def __init__(self, depth: int, width: int = 1, nodes: int | None = None) -> None:
        self.budget = Budget(depth, width, nodes)

    def budgets(self, rows: list[int]) -> list[Budget]:
        return [self.budget] * len(rows)

    def observe(self, step: Step) -> None: ...

    def release(self, row: int) -> None: ...
