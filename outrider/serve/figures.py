"""The figures of the dashboard, from ticks, for `outrider top`. `assets/sums.js` computes the same. Imports nothing large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def recent(ticks: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """The ticks of the last `seconds`, newest last."""
    kept, whole = list[dict[str, Any]](), 0.0
    for tick in reversed(ticks):
        if whole >= seconds - 1e-9:
            break
        kept.append(tick)
        whole += tick["elapsed"]
    return kept[::-1]


def figures(ticks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of some ticks; None where nothing happened that could say.

    rate: tokens per second. speedup: against plain decoding, from what a plain step takes. length: tokens per sequence and step,
    the target's own included. acceptance: of draft tokens. depth: levels of a draft, 0 without one. sigma: the speed over plain
    decoding that plans counted with. rows: sequences per step. survival: the share of drafts whose first j tokens were all
    accepted. plans: the share of sequences in steps, by what was done for them. weighed: what was said last of each drafter.
    phases: seconds; `outside` is not in steps.
    """
    phases, plans, weighed = dict[str, float](), dict[str, int](), dict[str, dict[str, Any]]()
    by_depth = list[list[int]]()
    for tick in ticks:
        for name, value in tick["seconds"].items():
            phases[name] = phases.get(name, 0.0) + value
        for name, count in tick["plans"].items():
            plans[name] = plans.get(name, 0) + count
        weighed |= tick["weighed"]
        for level, (drafted, accepted) in enumerate(tick["by_depth"]):
            if level == len(by_depth):
                by_depth.append([0, 0])
            by_depth[level][0] += drafted
            by_depth[level][1] += accepted

    def total(name: str) -> float:
        return sum(tick[name] for tick in ticks)

    def ratio(part: str, whole: str) -> float | None:
        return total(part) / total(whole) if total(whole) > 0 else None

    return {
        "elapsed": total("elapsed"),
        "rate": ratio("tokens", "elapsed"),
        "speedup": ratio("worth", "taken"),
        "length": ratio("tokens", "rows"),
        "acceptance": ratio("accepted", "drafted"),
        "depth": ratio("depth", "rows"),
        "sigma": ratio("sigma", "planned"),
        "rows": ratio("rows", "steps"),
        "survival": [accepted / by_depth[0][0] for _, accepted in by_depth],
        "plans": {name: count / sum(plans.values()) for name, count in plans.items()},
        "weighed": weighed,
        "phases": {**phases, "outside": max(total("elapsed") - sum(phases.values()), 0.0)},
    }
