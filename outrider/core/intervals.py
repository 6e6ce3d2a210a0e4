"""Confidence intervals of ratios of sums, by resampling groups. Pure functions of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

DRAWS, CONFIDENCE = 4000, 0.95
Value = Callable[[np.ndarray], np.ndarray]
"""Sums [..., column] -> [...]."""


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval. groups: number of prompts (or groups of prompts) behind it."""

    value: float
    low: float
    high: float
    groups: int

    @property
    def significant(self) -> bool:
        """For a ratio: 1 is outside of the interval, so the difference is more than noise."""
        return self.low > 1 or self.high < 1


def per(sums: np.ndarray) -> np.ndarray:
    """The ratio of two sums [..., 2]."""
    return sums[..., 0] / sums[..., 1]


def interval(table: np.ndarray, ratio: Value = per) -> Interval:
    """A ratio of sums over groups, with a bootstrap interval.

    table: float [group, column], the values to sum. ratio: sums [..., column] -> [...]. The standard error of the logarithm
    comes from `DRAWS` resamples of the groups. It is widened for a small number of groups by Student's t and the divisor
    n - 1: plain bootstrap percentiles of a dozen groups contain the truth too seldom (lab/tests/bench/test_stats.py).
    """
    n, value = len(table), float(ratio(table.sum(0)))
    if n < 2 or not 0 < value < math.inf:
        return Interval(value, 0.0, math.inf, n)
    picks = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), DRAWS)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(ratio(picks @ table)) * math.sqrt(n / (n - 1))
    finite = logs[np.isfinite(logs)]
    half = student_quantile(n - 1) * float(np.std(finite)) if len(finite) else math.inf
    with np.errstate(over="ignore"):
        return Interval(value, float(value * np.exp(-half)), float(value * np.exp(half)), n)


def student_quantile(df: int) -> float:
    """Quantile (1 + CONFIDENCE) / 2 of Student's t distribution, to 3 digits (Cornish-Fisher expansion)."""
    p = (1 + CONFIDENCE) / 2
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df**power for power, term in enumerate(terms, 1))
