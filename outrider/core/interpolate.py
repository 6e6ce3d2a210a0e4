"""Straight lines through measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence


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


def through(table: Sequence[Sequence[float]], at: tuple[float, ...]) -> float:
    """Linear interpolation in a table of [x, y, ..., seconds], one coordinate after the other."""
    groups: dict[int, list[Sequence[float]]] = {}
    for row in table:
        groups.setdefault(int(row[0]), []).append(row[1:])
    if len(at) == 1:
        return interpolate({x: rows[0][0] for x, rows in groups.items()}, at[0])
    return interpolate({x: through(rows, at[1:]) for x, rows in groups.items()}, at[0])
