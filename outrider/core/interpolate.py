"""Straight lines through measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping


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
