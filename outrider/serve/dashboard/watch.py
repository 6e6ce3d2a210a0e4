"""What the dashboard knows of the engine, and its figures: sums over the steps since the last tick, and the requests that have
ended.

A `Watch` is an observer of the engine, and only while a page is open.
"""

from __future__ import annotations

import math
import threading
from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from outrider.control.plan import PlanNote
from outrider.core.intervals import Interval, interval
from outrider.core.origins import PLAIN, letters
from outrider.core.tree import levels
from outrider.core.types import PHASES, Step
from outrider.drafters.method import NONE
from outrider.engine import Engine
from outrider.engine.request import Sequence

WINDOWS = {10: "10 seconds", 60: "minute", 300: "5 minutes"}
REQUESTS, GROUPS = 5, 10  # fewer requests say nothing. Groups of neighbours that the bootstrap draws
RECENT = 12  # requests that a new viewer is shown
FEWEST, PLAIN_STEPS = 3, 64  # plain steps of a batch size whose median counts, at least and at most

READING = "reading"  # a drafter reads, and the step has no draft of it


@dataclass
class Tick:
    """Sums over the steps and requests of a while: of one tick or of many."""

    elapsed: float = 0.0  # seconds of the while
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
        for name in ("elapsed", "steps", "sequences", "tokens", "drafted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.plans, other.plans), (self.seconds, other.seconds)):
            mine |= {name: mine.get(name, 0) + value for name, value in theirs.items()}
        pairs = zip_longest(self.by_depth, other.by_depth, fillvalue=(0, 0))
        self.by_depth = [[a + c, b + d] for (a, b), (c, d) in pairs]
        self.weighed |= other.weighed
        self.requests += [(plain, taken) for plain, taken in other.requests]


@dataclass
class WatchedText:
    """A text in a slot. due: the position that comes next. letters: of its tokens. saved: seconds that plain decoding would have
    taken for it, less those taken; not a number if that is not known."""

    due: int
    letters: str = ""
    saved: float = 0.0


class EndedRequest(NamedTuple):
    """A request that has ended. facts: what viewers are told. origins: one letter for each output token, "" if it was not watched
    from its start."""

    facts: dict[str, Any]
    prompt: list[int]
    output: list[int]
    origins: str


class Watch:
    """Sums up steps for `tick`. The engine's thread writes, the event loop reads."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._lock = engine, threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Begin anew: what was seen before is old."""
        with self._lock:
            self.recent: deque[EndedRequest] = deque(maxlen=RECENT)
            self._tick, self._ended = Tick(), list[EndedRequest]()
            self._then = perf_counter()
            self._plain: dict[int, deque[float]] = {}  # seconds of plain steps, by batch size
            self._texts: dict[int, WatchedText] = {}  # by slot

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """See `Observer.step`."""
        host, taken = step.draft.host, sum(step.seconds.values())
        batch = len(host)
        if any(len(nodes) > 1 for nodes in host):
            plain = self._plain_seconds(batch)
        else:
            plain = taken - step.seconds["draft"]  # a plan is no part of plain decoding
            if None not in seconds:  # a text's first step may be slower
                self._plain.setdefault(batch, deque(maxlen=PLAIN_STEPS)).append(plain)
        for sequence in self.engine.decoder.waiting:  # its prompt is read between two steps
            self._text(sequence.slot, len(sequence.tokens)).saved += plain - taken
        with self._lock:
            for b, commit in enumerate(step.commits):
                count, drafted, reached = len(commit.tokens), len(host[b]) - 1, list[list[int]]()
                new = PLAIN * count
                if drafted:
                    _, parents = zip(*host[b], strict=True)
                    new = letters(drafted, commit.num_accepted, (commit.nodes or (0,))[-1] in parents, count)
                    reached = [[1, level < commit.num_accepted] for level in range(max(levels(parents)))]
                self._tick.add(Tick(sequences=1, tokens=count, drafted=drafted, by_depth=reached))
                text = self._text(step.slots[b], step.positions[b])
                text.due += count
                text.letters += new
                text.saved += count * plain - taken
            for note in step.draft.notes or [None] * batch:  # a step without room for a draft has no notes
                self._tick.add(Tick(plans={NONE: 1}) if note is None else self._planned(note))
            self._tick.add(Tick(steps=1, seconds={phase: step.seconds[phase] for phase in PHASES}))

    def _text(self, slot: int, position: int) -> WatchedText:
        """What is known of the text in a slot that goes on at a position. It is new if it was not watched up to there."""
        text = self._texts.get(slot)
        if text is None or text.due != position:
            text = self._texts[slot] = WatchedText(position)
        return text

    def _planned(self, note: PlanNote) -> Tick:
        """What a plan does. Where lengths are fixed, its costs are not those of this machine, so nothing of them is told."""
        plan, planner = note.plan, self.engine.roster.planner
        names = ("name", "accepted", "tokens", "seconds", "verdict")
        why = plan.why if planner.lengths is None else ()
        weighed = {one.name: {name: getattr(one, name) for name in names} for one in why}
        return Tick(plans={plan.drafter or (READING if plan.read else NONE): 1}, weighed=weighed)

    def finished(self, sequence: Sequence) -> None:
        """See `Observer.finished`."""
        text = self._texts.pop(sequence.slot, WatchedText(0))
        finish = sequence.finish.finish if sequence.finish else "abort"
        reason = sequence.finish and sequence.finish.reason
        facts = {
            "id": sequence.id,
            "prompt_tokens": len(sequence.prompt),
            "tokens": len(sequence.written),
            "steps": len(sequence.counts.drafted),
            "drafted": sum(sequence.counts.drafted),
            "accepted": sum(sequence.counts.accepted),
            "first": sequence.clock.time_to_first_token,
            "seconds": sequence.clock.total,
            "finish": finish,
            "reason": str(reason) if finish in ("error", "abort") and reason is not None else None,
            "method": sequence.counts.method,
        }
        whole = text.letters if len(text.letters) == len(sequence.written) else ""
        ended = EndedRequest(facts, sequence.prompt, sequence.written, whole)
        with self._lock:
            if whole and not math.isnan(text.saved):
                self._tick.requests.append((sequence.clock.total + text.saved, sequence.clock.total))
            self._ended.append(ended)
            self.recent.append(ended)

    def tick(self) -> tuple[Tick, list[EndedRequest]]:
        """What happened since the last tick, and the requests that ended in it."""
        with self._lock:
            now = perf_counter()
            tick, ended = replace(self._tick, elapsed=now - self._then), self._ended
            self._tick, self._ended, self._then = Tick(), [], now
        return tick, ended

    def _plain_seconds(self, batch: int) -> float:
        """Seconds of a plain step: of those seen, else what the planner counts with. Not a number if neither is known."""
        seen, planner = self._plain.get(batch, ()), self.engine.roster.planner
        if len(seen) >= FEWEST:
            return median(seen)
        return planner.costs.forward(batch) if planner.lengths is None else math.nan


def added(ticks: Iterable[Tick]) -> Tick:
    """The sum of records, in the order of time."""
    total = Tick()
    for tick in ticks:
        total.add(tick)
    return total


def recent(ticks: abc.Sequence[Tick], seconds: float) -> Tick:
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


def outlook(total: Tick, seconds: int, speculates: bool) -> dict[str, Any]:
    """The figures of the last seconds, with the answer to "does speculation help now?".

    kind: yes, no, even or unknown. answer: a sentence, with the only figure of the page that compares with plain decoding.
    """
    seen = WINDOWS[seconds] if total.elapsed >= 0.9 * seconds else f"{total.elapsed:.0f} s"
    count, over = len(total.requests), f"the last {seen}"
    speed = gain(tuple(total.requests))
    if not speculates:
        kind, answer = "no", "No: this server decodes plainly."
    elif speed is None:
        counted = f"{count} requests ended over {over} whose time without drafts is known"
        kind, answer = "unknown", f"Too few requests to say: {counted}; outrider bench --base-url measures it."
    else:
        kind, word = ("yes", "Yes") if speed.low > 1 else ("no", "No") if speed.high < 1 else ("even", "No gain")
        between = f"{speed.low:.2f} to {speed.high:.2f}"
        answer = f"{word}: {speed.value:.2f} times as fast as plain decoding ({between}), "
        answer += f"estimated from {count} whole requests over {over}."
    return {**figures(total), "kind": kind, "answer": answer}


@lru_cache(16)  # one is asked for again at each tick, until a request ends
def gain(requests: tuple[tuple[float, float], ...]) -> Interval | None:
    """How many times as fast requests were as plain decoding. None if too few say.

    requests: seconds that plain decoding would have taken, and seconds taken, in the order of time. Neighbours share steps.
    """
    if len(requests) < REQUESTS:
        return None
    starts = range(0, len(requests), math.ceil(len(requests) / GROUPS))
    return interval(np.add.reduceat(np.array(requests), starts))
