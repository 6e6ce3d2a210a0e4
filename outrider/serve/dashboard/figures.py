"""The figures of the dashboard, from ticks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, sqrt
from typing import Any

from outrider.core.intervals import student_quantile

COUNTED = (
    "elapsed", "steps", "rows", "tokens", "drafted", "accepted", "depth", "drafts", "worth", "taken", "planned", "sigma", "own",
    "processor",
)  # fmt: skip
WINDOWS = {10: "10 seconds", 60: "minute", 300: "5 minutes"}
RESTING = 0.9  # share of the steps without a draft: then drafting rests
_FEWEST, _STRETCHES = 5, 10  # that a window is cut into; fewer say nothing


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

    rate: tokens per second. speedup: against plain decoding, from what a plain step takes. between: its interval. length: tokens
    per sequence and step, the target's own included. acceptance: of draft tokens. depth: levels of a draft, 0 without one. sigma:
    the speed over plain decoding that plans counted with. rows: sequences per step. survival: the share of drafts whose first j
    tokens were all accepted. plans: the share of sequences in steps, by what was done for them. weighed: what was said last of
    each drafter. phases: seconds; `outside` is not in steps.
    """
    total = added(ticks)
    phases, plans, by_depth = total["seconds"], total["plans"], total["by_depth"]

    def ratio(part: str, whole: str) -> float | None:
        return total[part] / total[whole] if total[whole] > 0 else None

    return {
        "elapsed": total["elapsed"],
        "rate": ratio("tokens", "elapsed"),
        "speedup": ratio("worth", "taken"),
        "between": _between([(tick["worth"], tick["taken"]) for tick in ticks]),
        "length": ratio("tokens", "rows"),
        "acceptance": ratio("accepted", "drafted"),
        "depth": ratio("depth", "rows"),
        "sigma": ratio("sigma", "planned"),
        "rows": ratio("rows", "steps"),
        "survival": [accepted / by_depth[0][0] for _, accepted in by_depth],
        "plans": {name: count / sum(plans.values()) for name, count in plans.items()},
        "weighed": total["weighed"],
        "phases": {**phases, "outside": max(total["elapsed"] - sum(phases.values()), 0.0)},
    }


def outlook(ticks: Sequence[dict[str, Any]], last: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The figures of the last seconds, with the answer to "does speculation help now?". last: the last tick as it came.

    kind: yes, no, rest, even or unknown. answer: a sentence, whose first words say the same. sources: what was measured, what is
    estimated and what is expected, a sentence each.
    """
    now = figures(recent(ticks, seconds))
    trial: dict[str, Any] = last["trial"] or {"ratio": None}
    over = _span(now["elapsed"], seconds)
    sources = {
        "Measured": "not yet; the A/B trial does it",
        "Estimated": "not yet",
        "Expected": "nothing: no draft is weighed",
    }
    estimate, trusted = None, None
    if now["speedup"] is not None:
        estimate = (now["speedup"], *(now["between"] or ()))
        sources["Estimated"] = (
            f"{_times(*estimate, note='95 % interval ')} over {over}: "
            f"the time that plain steps would take ({last['speed_from']}), over the time taken"
        )
    if trial["ratio"] is not None:
        found = (trial["ratio"], trial["low"], trial["high"])
        sources["Measured"] = (
            f"{_times(*found, note='95 % interval ')} by the A/B trial, "
            f"{sum(trial['ended'].values())} requests, {trial['ago']:.0f} s ago"
        )
        if min(trial["ended"].values()) >= _FEWEST and trial["ago"] <= seconds:
            trusted = found
    if now["sigma"] is not None:
        sources["Expected"] = f"{_times(now['sigma'])}: the speed that the plans of {over} count with"
    resting = now["plans"].get("none", 0.0)
    if not last["speculates"]:
        kind, answer = "no", "No: this server decodes plainly."
    elif trusted is not None:
        kind, answer = _answer(trusted, f"measured by the A/B trial on {sum(trial['ended'].values())} requests")
    elif not now["plans"]:
        kind, answer = "unknown", f"Too few requests to say: nothing was written over {over}."
    elif estimate is not None and len(estimate) > 1 and (estimate[1] > 1 or resting < RESTING):
        kind, answer = _answer(estimate, f"estimated from the times of the steps over {over}")
    elif resting >= RESTING:
        plain = f"{100 * resting:.0f} % of the steps over {over} had no draft"
        kind, answer = "rest", f"Not now: {plain}, because none was worth its time or none was asked for."
    elif estimate is None:
        kind, answer = "unknown", "Not known: no plain step was seen to compare with; an A/B trial compares."
    else:
        kind, answer = "unknown", f"Too few requests to say: {_times(*estimate)} over {over}."
    return {**now, "kind": kind, "answer": answer, "sources": sources}


def _between(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The 95 % interval of a ratio of sums; None if too little happened.

    pairs: the parts of both sums, in the order of time. Neighbours are of the same texts, so stretches of the time are compared.
    """
    busy = [pair for pair in pairs if pair[1] > 0]
    size = ceil(len(busy) / _STRETCHES)
    if len(busy) < _FEWEST:
        return None
    parts = [[sum(column) for column in zip(*busy[at : at + size], strict=True)] for at in range(0, len(busy), size)]
    over, under = (sum(column) for column in zip(*parts, strict=True))
    apart = sum((a - over / under * b) ** 2 for a, b in parts) * len(parts) / (len(parts) - 1)
    reach = student_quantile(len(parts) - 1) * sqrt(apart) / under
    return max(over / under - reach, 0.0), over / under + reach


def _times(ratio: float, low: float | None = None, high: float | None = None, *, note: str = "") -> str:
    between = "" if low is None else f" ({note}{low:.2f} to {high:.2f})"
    return f"{ratio:.2f} times as fast as plain decoding{between}"


def _answer(found: tuple[float, ...], source: str) -> tuple[str, str]:
    """The kind and the sentence of a ratio with its interval."""
    _, low, high = found
    kind, word = ("yes", "Yes") if low > 1 else ("no", "No") if high < 1 else ("even", "No difference is shown")
    return kind, f"{word}: {_times(*found)}, {source}."


def _span(elapsed: float, seconds: float) -> str:
    """The last seconds in words. elapsed: those of them that were seen."""
    if elapsed < 0.9 * seconds or seconds not in WINDOWS:
        return f"the last {elapsed:.0f} s"
    return f"the last {WINDOWS[int(seconds)]}"
