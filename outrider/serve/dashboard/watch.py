"""What the dashboard knows of the engine: sums over the steps since the last tick, and the requests that have ended.

A `Watch` is an observer of the engine, and only while a page is open.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter, process_time, thread_time, time
from typing import Any, NamedTuple

from outrider.control.planner import PlanNote
from outrider.core.origins import PLAIN, letters
from outrider.core.tree import levels
from outrider.core.types import PHASES, Step
from outrider.drafters.method import NONE
from outrider.engine import Engine
from outrider.engine.request import Sequence

RECENT = 12  # requests that a new viewer is shown
PLAIN_STEPS = 64  # plain steps of a batch size whose median counts

READING = "reading"  # a drafter reads, and the step has no draft of it
MEASURED = "costs measured at load, corrected by every step"
SEEN = "plain steps seen while there was a viewer"


@dataclass
class TickSums:
    """Sums over the steps since the last tick.

    rows: sequences, summed over steps. tokens: written. depth: levels of the drafts, summed over sequences. worth: plain
    seconds of the tokens of steps whose plain seconds are known; taken: the seconds of these steps. planned: plans. sigma: the
    speed over plain decoding that they counted with, summed over them. by_depth: for each depth [drafted, accepted], over
    sequences; a tree drafts at a depth that it reaches. plans: sequences, by what was done for them: a drafter's name, "none" or
    "reading". weighed: what the last plan said of each drafter. seconds: by phase. own: processor seconds that the watch took.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    drafts: int = 0
    worth: float = 0.0
    taken: float = 0.0
    planned: int = 0
    sigma: float = 0.0
    own: float = 0.0
    plans: Counter[str] = field(default_factory=lambda: Counter[str]())
    weighed: dict[str, dict[str, Any]] = field(default_factory=lambda: dict[str, dict[str, Any]]())
    by_depth: list[list[int]] = field(default_factory=lambda: list[list[int]]())
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


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
        self.engine = engine
        self.recent: deque[EndedRequest] = deque(maxlen=RECENT)
        self._sums, self._ended, self._then = TickSums(), list[EndedRequest](), perf_counter()
        self._lock = threading.Lock()
        self._plain: dict[int, deque[float]] = {}  # seconds of plain steps, by batch size
        self._origins: dict[
            int, tuple[int, list[str]]
        ] = {}  # by slot: the position that comes next, letters of each step
        self._used = process_time()
        self._source, self._reason, self._words = SEEN, "", True  # words are made once for each tick
        self._drift = dict[str, float]()

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """See `Observer.step`."""
        begun = thread_time()
        host, taken = step.draft.host, sum(step.seconds.values())
        batch = len(host)
        if not any(len(nodes) > 1 for nodes in host):
            self._plain.setdefault(batch, deque(maxlen=PLAIN_STEPS)).append(taken)
        plain = self._plain_seconds(batch)
        with self._lock:
            sums = self._sums
            sums.steps += 1
            sums.rows += batch
            for phase in PHASES:
                sums.seconds[phase] += step.seconds[phase]
            written = 0
            for b, commit in enumerate(step.commits):
                count, drafted = len(commit.tokens), len(host[b]) - 1
                written += count
                new = PLAIN * count
                if drafted:
                    _, parents = zip(*host[b], strict=True)
                    new = letters(drafted, commit.num_accepted, (commit.nodes or (0,))[-1] in parents, count)
                    sums.drafts += 1
                    sums.drafted += drafted
                    sums.accepted += commit.num_accepted
                    depth = max(levels(parents))
                    sums.depth += depth
                    sums.by_depth += [[0, 0] for _ in range(depth - len(sums.by_depth))]
                    for level in range(depth):
                        sums.by_depth[level][0] += 1
                        sums.by_depth[level][1] += level < commit.num_accepted
                slot, position = step.slots[b], step.positions[b]
                due, known = self._origins.get(slot, (-1, []))
                if due != position:  # not watched from its start
                    known = []
                known.append(new)
                self._origins[slot] = (position + count, known)
            for note in step.draft.notes or [None] * batch:  # a step without room for a draft has no notes
                if note is not None:
                    self._planned(sums, note, batch)
                else:
                    sums.plans[NONE] += 1
            sums.tokens += written
            if plain is not None:
                sums.worth += written * plain / batch
                sums.taken += taken
            sums.own += thread_time() - begun

    def _planned(self, sums: TickSums, note: PlanNote, batch: int) -> None:
        """Count a plan. Where lengths are fixed, its costs are not those of this machine, so nothing of them is told."""
        plan, planner = note.plan, self.engine.roster.planner
        sums.plans[plan.drafter or (READING if plan.read else NONE)] += 1
        if planner.lengths is None:
            sums.planned += 1
            sums.sigma += plan.price * planner.costs.forward(batch) / batch
            for one in plan.why:
                least = plan.budget.min_probability if one.name == plan.drafter else 0.0
                sums.weighed[one.name] = {**one._asdict(), "least": least or None}

    def finished(self, sequence: Sequence) -> None:
        """See `Observer.finished`."""
        origins = "".join(self._origins.pop(sequence.slot, (0, []))[1])
        finish = sequence.finish.finish if sequence.finish else "abort"
        reason = sequence.finish and sequence.finish.reason
        facts = {
            "id": sequence.id,
            "at": time(),
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
        whole = origins if len(origins) == len(sequence.written) else ""
        ended = EndedRequest(facts, sequence.prompt, sequence.written, whole)
        with self._lock:
            self._ended.append(ended)
            self.recent.append(ended)

    def clear(self) -> None:
        """Begin anew: what was seen before is old."""
        with self._lock:
            self._sums, self._ended, self._then = TickSums(), [], perf_counter()
            self._origins.clear()
            self._plain.clear()
            self.recent.clear()

    def tick(self) -> tuple[dict[str, Any], list[EndedRequest]]:
        """The event for what happened since the last tick, and the requests that ended in it.

        processor: processor seconds of the whole process.
        """
        with self._lock:
            now = perf_counter()
            sums, ended, elapsed = self._sums, self._ended, now - self._then
            self._sums, self._ended, self._then, self._words = TickSums(), [], now, True
        event = {"time": time(), "elapsed": elapsed, **vars(sums), "speed_from": self._source, "why": self._reason}
        event["drift"] = self._drift
        used, self._used = process_time() - self._used, process_time()
        return {**event, "processor": used, "engine": asdict(self.engine.stats), "problem": self.engine.problem}, ended

    def _plain_seconds(self, batch: int) -> float | None:
        """Seconds of a plain step: what the planner counts with, else what was seen. Sets the words for both."""
        planner = self.engine.roster.planner
        if self._words:
            self._reason = planner.state() if planner.lengths is None else "the draft length is fixed"
            self._drift = planner.costs.drift if planner.lengths is None else {}
            self._words = False
        if planner.lengths is None:
            self._source = MEASURED
            return planner.costs.forward(batch)
        self._source = SEEN
        seen = self._plain.get(batch, ())
        return median(seen) if len(seen) >= 3 else None
