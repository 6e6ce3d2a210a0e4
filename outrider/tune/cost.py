"""What speculation is worth: pure expectations, and a cost model to put seconds into them. No clock, no state.

Acceptance is given as *survival*: survival[j - 1] is the chance that the first j guesses of a chain are all kept (for a
tree: that something is kept at depth j). Equal chances alpha for every guess are the case survival[j - 1] = alpha ** j.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


def geometric(alpha: float, depth: int) -> list[float]:
    """Survival where every guess is kept with probability alpha, whatever came before. Raises ValueError outside 0..1."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is a probability, got {alpha}")
    return [alpha**j for j in range(1, depth + 1)]


def expected_tokens(survival: Sequence[float]) -> float:
    """Tokens a step commits on average, the target's own included. With `geometric` it is (1 - alpha**(gamma + 1)) /
    (1 - alpha), Leviathan et al. 2211.17192, equation 1."""
    return 1 + sum(survival)


def speedup(survival: Sequence[float], draft: float, verify: float = 1.0) -> float:
    """Against plain decoding. draft: seconds of the whole draft, verify: of the target over all its nodes, both in plain
    steps. With `geometric`, verify=1 and draft=gamma * c it is (1 - alpha**(gamma + 1)) / ((1 - alpha) * (gamma * c + 1)),
    Leviathan et al., theorem 3.8."""
    return expected_tokens(survival) / (draft + verify)


def best_depth(survival: Sequence[float], seconds: Sequence[float]) -> int:
    """The depth with the most tokens per second; 0 is plain decoding, and wins a draw. seconds[k]: of a step k deep."""
    rate, tokens, best = 1 / seconds[0], 1.0, 0
    for depth, (kept, time) in enumerate(zip(survival, seconds[1:], strict=False), 1):
        tokens += kept
        if tokens / time > rate:
            rate, best = tokens / time, depth
    return best


def worth_deeper(tokens: float, seconds: float, kept: float, more: float) -> bool:
    """The marginal rule: one guess more, kept with probability `kept` for `more` seconds, pays if its rate beats the
    rate so far. Following it is `best_depth` where survival falls and each level costs no less than the one before."""
    return kept * seconds > more * tokens


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
    """Seconds, measured by `calibrate`. What it was measured on is `key`; another key wants another measurement.

    target: [rows, nodes, context, seconds] of one target forward over `nodes` nodes in each of `rows` rows that hold
    `context` tokens. draft: [rows, context, seconds] of one level of drafting. prefill: seconds per token the drafter must
    read before it can guess. fixed: seconds of a step beside the two models.
    """

    key: dict[str, str]
    target: list[list[float]]
    draft: list[list[float]]
    prefill: float
    fixed: float

    def target_seconds(self, rows: int, nodes: int, context: int) -> float:
        """One target forward. Straight lines between what was measured, in context, then nodes, then rows."""
        return _through(self.target, (rows, nodes, context))

    def draft_seconds(self, rows: int, depth: int, context: int) -> float:
        """The draft of `depth` levels; nothing for none."""
        return depth * _through(self.draft, (rows, context)) if depth and self.draft else 0.0

    def step_seconds(self, rows: int, depth: int, nodes: int, context: int) -> float:
        """A whole step: `nodes` guesses a row, `depth` levels deep."""
        return self.fixed + self.draft_seconds(rows, depth, context) + self.target_seconds(rows, nodes + 1, context)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Raises ValueError for a text that holds no cost model."""
        try:
            model = cls(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no cost model ({error}); measure again with calibrate()") from None
        if not model.target or any(len(row) != 4 for row in model.target) or any(len(r) != 3 for r in model.draft):
            raise ValueError("this cost model holds no table of target seconds; measure again with calibrate()")
        return model


def _through(table: Sequence[Sequence[float]], at: tuple[int, ...]) -> float:
    """Linear interpolation in a table of [x, y, ..., seconds], one coordinate after the other."""
    groups: dict[int, list[Sequence[float]]] = {}
    for row in table:
        groups.setdefault(int(row[0]), []).append(row[1:])
    if len(at) == 1:
        return interpolate({x: rows[0][0] for x, rows in groups.items()}, at[0])
    return interpolate({x: _through(rows, at[1:]) for x, rows in groups.items()}, at[0])
