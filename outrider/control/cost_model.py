"""A cost model: the seconds that put a price on `outrider.control.expectation`. No clock, no state."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


def interpolate(points: Mapping[int, float], x: float) -> float:
    """Straight lines through the points; beyond them the last line goes on, never downwards. One point is level."""
    xs = sorted(points)
    if x in points:
        return points[int(x)]
    if len(xs) == 1:
        return points[xs[0]]
    at = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low, high = xs[at - 1], xs[at]
    slope = (points[high] - points[low]) / (high - low)
    if x > xs[-1]:
        return points[high] + max(slope, 0.0) * (x - high)
    if x < xs[0]:
        return max(points[low] + slope * (x - low), 0.0)
    return points[low] + slope * (x - low)


@dataclass(frozen=True)
class CostModel:
    """Seconds, measured by `outrider.calibrate`. What it was measured on is `key`; another key wants another measurement.

    target: [rows, nodes, context, seconds] of all of a step but its draft: the forward over `nodes` nodes, the root counted,
    in each of `rows` rows that hold `context` tokens, the verdict, the commit. draft: [rows, width, depth, context, seconds]
    of a draft; depth 0 is what a step costs before anybody guesses. prefill: seconds per token the drafter must read before
    it can guess. fixed: seconds of a step that none of its parts accounts for.
    """

    key: dict[str, str]
    target: list[list[float]]
    draft: list[list[float]]
    prefill: float
    fixed: float

    def target_seconds(self, rows: int, nodes: int, context: int) -> float:
        """A step without its draft. Straight lines between what was measured, in context, then nodes, then rows."""
        return through(self.target, (rows, nodes, context))

    def draft_seconds(self, rows: int, depth: int, context: int, width: int = 1) -> float:
        """The draft of `depth` levels, a chain or as wide a tree as was measured."""
        return through(self.draft, (rows, width, depth, context)) if self.draft else 0.0

    def step_seconds(self, rows: int, depth: int, nodes: int, context: int, width: int = 1) -> float:
        """A whole step: `nodes` guesses a row, `depth` levels deep."""
        draft = self.draft_seconds(rows, depth, context, width)
        return self.fixed + draft + self.target_seconds(rows, nodes + 1, context)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Raises ValueError for a text that holds no cost model."""
        try:
            model = cls(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no cost model ({error}); measure again with calibrate()") from None
        if not model.target or any(len(row) != 4 for row in model.target) or any(len(r) != 5 for r in model.draft):
            raise ValueError("this cost model holds no table of target seconds; measure again with calibrate()")
        return model


def through(table: Sequence[Sequence[float]], at: tuple[float, ...]) -> float:
    """Linear interpolation in a table of [x, y, ..., seconds], one coordinate after the other."""
    groups: dict[int, list[Sequence[float]]] = {}
    for row in table:
        groups.setdefault(int(row[0]), []).append(row[1:])
    if len(at) == 1:
        return interpolate({x: rows[0][0] for x, rows in groups.items()}, at[0])
    return interpolate({x: through(rows, at[1:]) for x, rows in groups.items()}, at[0])
