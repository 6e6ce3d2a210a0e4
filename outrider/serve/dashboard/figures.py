"""The figures of the dashboard, from ticks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np

from outrider.core.intervals import interval

COUNTED = ("elapsed", "steps", "rows", "tokens", "drafted", "accepted", "depth", "drafts", "own", "processor")
WINDOWS = {10: "10 seconds", 60: "minute", 300: "5 minutes"}
_FEWEST, _GROUPS = 5, 10  # requests; fewer say nothing. Groups of neighbours that the bootstrap draws


def recent(ticks: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """The ticks of the last `seconds`, newest last."""
    kept, whole = list[dict[str, Any]](), 0.0
    for tick in reversed(ticks):
        if whole >= seconds - 1e-9:
            break
        kept.append(tick)
        whole += tick["elapsed"]
    return kept[::-1]


def added(ticks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ticks counted together, those of a while or those of several servers. weighed: what was said last of each drafter."""
    depths = max((len(tick["by_depth"]) for tick in ticks), default=0)
    reached = [[tick["by_depth"][level] for tick in ticks if level < len(tick["by_depth"])] for level in range(depths)]
    return {
        **{name: sum(tick.get(name, 0) for tick in ticks) for name in COUNTED},
        **{name: _added(tick[name] for tick in ticks) for name in ("seconds", "plans")},
        "weighed": {name: one for tick in ticks for name, one in tick["weighed"].items()},
        "requests": [(plain, taken) for tick in ticks for plain, taken in tick["requests"]],
        "by_depth": [[sum(column) for column in zip(*level, strict=True)] for level in reached],
    }


def _added(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for part in parts:
        for name, value in part.items():
            found[name] = found.get(name, 0) + value
    return found


def figures(ticks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of some ticks; None where nothing happened that could say.

    rate: tokens per second. length: tokens per sequence and step, the target's own included. acceptance: of draft tokens.
    depth: levels of a draft, 0 without one. rows: sequences per step. survival: the share of drafts whose first j tokens were all
    accepted. plans: the share of sequences in steps, by what was done for them. weighed: what was said last of each drafter.
    phases: seconds; `outside` is not in steps.
    """
    total = added(ticks)
    phases, plans, by_depth = total["seconds"], total["plans"], total["by_depth"]

    def ratio(part: str, whole: str) -> float | None:
        return total[part] / total[whole] if total[whole] > 0 else None

    return {
        "elapsed": total["elapsed"],
        "rate": ratio("tokens", "elapsed"),
        "length": ratio("tokens", "rows"),
        "acceptance": ratio("accepted", "drafted"),
        "depth": ratio("depth", "rows"),
        "rows": ratio("rows", "steps"),
        "survival": [accepted / by_depth[0][0] for _, accepted in by_depth],
        "plans": {name: count / sum(plans.values()) for name, count in plans.items()},
        "weighed": total["weighed"],
        "phases": {**phases, "outside": max(total["elapsed"] - sum(phases.values()), 0.0)},
    }


def outlook(ticks: Sequence[dict[str, Any]], last: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The figures of the last seconds, with the answer to "does speculation help now?". last: the last tick as it came.

    kind: yes, no, even or unknown. answer: a sentence, with the only figure of the page that compares with plain decoding.
    """
    some = recent(ticks, seconds)
    now, requests = figures(some), added(some)["requests"]
    count, over = len(requests), _span(now["elapsed"], seconds)
    speed = gain(tuple(requests))
    if not last["speculates"]:
        kind, answer = "no", "No: this server decodes plainly."
    elif speed is None:
        known = f"{count} requests ended over {over} whose time without drafts is known"
        kind, answer = "unknown", f"Too few requests to say: {known}; outrider bench --base-url measures it."
    else:
        kind, word = ("yes", "Yes") if speed["low"] > 1 else ("no", "No") if speed["high"] < 1 else ("even", "No gain")
        between = f"{speed['low']:.2f} to {speed['high']:.2f}"
        answer = f"{word}: {speed['ratio']:.2f} times as fast as plain decoding ({between}), "
        answer += f"estimated from {count} whole requests over {over}."
    return {**now, "kind": kind, "answer": answer}


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
