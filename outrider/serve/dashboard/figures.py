"""The record of a tick, what records add up to, and the figures that the dashboard shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from math import ceil
from typing import Any

import numpy as np

from outrider.core.intervals import interval

WINDOWS = {10: "10 seconds", 60: "minute", 300: "5 minutes"}
_FEWEST, _GROUPS = 5, 10  # requests; fewer say nothing. Groups of neighbours that the bootstrap draws


@dataclass
class Tick:
    """Sums over the steps and requests of a while: of one tick or of many."""

    elapsed: float = 0.0  # seconds of the while
    processor: float = 0.0  # processor seconds of the whole process
    spent: float = 0.0  # those of them that the dashboard took
    steps: int = 0
    sequences: int = 0  # of the steps, summed
    tokens: int = 0  # written
    drafted: int = 0  # draft tokens
    # for each depth [drafted, accepted], over sequences; a tree drafts at a depth that it reaches
    by_depth: list[list[int]] = field(default_factory=lambda: list[list[int]]())
    # sequences, by what was done for them: a drafter's name, "none" or "reading"
    plans: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    seconds: dict[str, float] = field(default_factory=lambda: dict[str, float]())  # of steps, by phase
    # what the last plan said of each drafter
    weighed: dict[str, dict[str, Any]] = field(default_factory=lambda: dict[str, dict[str, Any]]())
    # of each that ended, seconds from its arrival to its end: those that plain decoding would have taken, and those taken
    requests: list[tuple[float, float]] = field(default_factory=lambda: list[tuple[float, float]]())

    @property
    def depth(self) -> int:
        """Levels of the drafts, summed over sequences."""
        return sum(drafted for drafted, _ in self.by_depth)

    @property
    def accepted(self) -> int:
        """Draft tokens that became text."""
        return sum(accepted for _, accepted in self.by_depth)

    def add(self, other: Tick) -> None:
        """Add a later record. What it weighed takes the place of what was weighed before."""
        for name in ("elapsed", "processor", "spent", "steps", "sequences", "tokens", "drafted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.plans, other.plans), (self.seconds, other.seconds)):
            mine |= {name: mine.get(name, 0) + value for name, value in theirs.items()}
        pairs = zip_longest(self.by_depth, other.by_depth, fillvalue=(0, 0))
        self.by_depth = [[a + c, b + d] for (a, b), (c, d) in pairs]
        self.weighed |= other.weighed
        self.requests += [(plain, taken) for plain, taken in other.requests]


def added(ticks: Iterable[Tick]) -> Tick:
    """The sum of records, in the order of time."""
    total = Tick()
    for tick in ticks:
        total.add(tick)
    return total


def recent(ticks: Sequence[Tick], seconds: float) -> Tick:
    """The sum of the last `seconds`."""
    some, whole = list[Tick](), 0.0
    for tick in reversed(ticks):
        if whole >= seconds - 1e-9:
            break
        some.append(tick)
        whole += tick.elapsed
    return added(reversed(some))


def figures(total: Tick) -> dict[str, Any]:
    """What the page draws; None where nothing happened that could say.

    The rate is tokens per second. The length is tokens per sequence and step, with the target's own. The depth counts the levels
    of a draft, 0 without one. `survival` has the share of drafts whose first j tokens were all accepted. `plans` has the share of
    sequences in steps, by what was done for them. The phases are in seconds; `outside` is not in steps.
    """

    def ratio(part: float, whole: float) -> float | None:
        return part / whole if whole > 0 else None

    outside = max(total.elapsed - sum(total.seconds.values()), 0.0)
    return {
        "rate": ratio(total.tokens, total.elapsed),
        "length": ratio(total.tokens, total.sequences),
        "acceptance": ratio(total.accepted, total.drafted),
        "depth": ratio(total.depth, total.sequences),
        "survival": [accepted / total.by_depth[0][0] for _, accepted in total.by_depth],
        "plans": {name: count / sum(total.plans.values()) for name, count in total.plans.items()},
        "weighed": total.weighed,
        "phases": {**total.seconds, "outside": outside},
    }


def outlook(total: Tick, seconds: float, speculates: bool) -> dict[str, Any]:
    """The figures of the last seconds, with the answer to "does speculation help now?".

    kind: yes, no, even or unknown. answer: a sentence, with the only figure of the page that compares with plain decoding.
    """
    count, over = len(total.requests), _span(total.elapsed, seconds)
    speed = gain(tuple(total.requests))
    if not speculates:
        kind, answer = "no", "No: this server decodes plainly."
    elif speed is None:
        counted = f"{count} requests ended over {over} whose time without drafts is known"
        kind, answer = "unknown", f"Too few requests to say: {counted}; outrider bench --base-url measures it."
    else:
        kind, word = ("yes", "Yes") if speed["low"] > 1 else ("no", "No") if speed["high"] < 1 else ("even", "No gain")
        between = f"{speed['low']:.2f} to {speed['high']:.2f}"
        answer = f"{word}: {speed['ratio']:.2f} times as fast as plain decoding ({between}), "
        answer += f"estimated from {count} whole requests over {over}."
    return {**figures(total), "kind": kind, "answer": answer}


@lru_cache(16)  # one is asked for again at each tick, until a request ends
def gain(requests: tuple[tuple[float, float], ...]) -> dict[str, float] | None:
    """How many times as fast requests were as plain decoding: ratio, low and high. None if too few say.

    requests: seconds that plain decoding would have taken, and seconds taken, in the order of time. Neighbours share steps.
    """
    if len(requests) < _FEWEST:
        return None
    starts = range(0, len(requests), ceil(len(requests) / _GROUPS))
    speed = interval(np.add.reduceat(np.array(requests), starts))
    return {"ratio": speed.value, "low": speed.low, "high": speed.high}


def _span(elapsed: float, seconds: float) -> str:
    """The last seconds in words. elapsed: those of them that were seen."""
    if elapsed < 0.9 * seconds or seconds not in WINDOWS:
        return f"the last {elapsed:.0f} s"
    return f"the last {WINDOWS[int(seconds)]}"
