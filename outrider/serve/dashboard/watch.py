"""What the dashboard knows of the engine: sums over the steps since the last tick, and the requests that have ended.

A `Watch` is an observer of the engine, and only while a page is open.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter, process_time, thread_time, time
from typing import Any, NamedTuple

from outrider.control.plan import PlanNote
from outrider.core.origins import PLAIN, letters
from outrider.core.tree import levels
from outrider.core.types import PHASES, Step
from outrider.drafters.method import NONE
from outrider.engine import Engine
from outrider.engine.request import Sequence
from outrider.serve.dashboard.figures import Tick

RECENT = 12  # requests that a new viewer is shown
FEWEST, PLAIN_STEPS = 3, 64  # plain steps of a batch size whose median counts, at least and at most

READING = "reading"  # a drafter reads, and the step has no draft of it


@dataclass
class WatchedText:
    """A text in a slot. due: the position that comes next. letters: of each step. saved: seconds that plain decoding would have
    taken for it, less those taken; not a number if that is not known."""

    due: int
    letters: list[str] = field(default_factory=lambda: list[str]())
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
            self._then, self._used = perf_counter(), process_time()
            self._plain: dict[int, deque[float]] = {}  # seconds of plain steps, by batch size
            self._texts: dict[int, WatchedText] = {}  # by slot

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """See `Observer.step`."""
        begun = thread_time()
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
                text.letters.append(new)
                text.saved += count * plain - taken
            for note in step.draft.notes or [None] * batch:  # a step without room for a draft has no notes
                self._tick.add(Tick(plans={NONE: 1}) if note is None else self._planned(note))
            seconds_of = {phase: step.seconds[phase] for phase in PHASES}
            self._tick.add(Tick(steps=1, seconds=seconds_of, spent=thread_time() - begun))

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
        origins = "".join(text.letters)
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
            if whole and not math.isnan(text.saved):
                self._tick.requests.append((sequence.clock.total + text.saved, sequence.clock.total))
            self._ended.append(ended)
            self.recent.append(ended)

    def tick(self, spent: float = 0.0) -> tuple[Tick, list[EndedRequest]]:
        """What happened since the last tick, and the requests that ended in it. spent: processor seconds for viewers."""
        with self._lock:
            now, used = perf_counter(), process_time()
            tick, ended = self._tick, self._ended
            tick = replace(tick, elapsed=now - self._then, processor=used - self._used, spent=tick.spent + spent)
            self._tick, self._ended, self._then, self._used = Tick(), [], now, used
        return tick, ended

    def _plain_seconds(self, batch: int) -> float:
        """Seconds of a plain step: of those seen, else what the planner counts with. Not a number if neither is known."""
        seen, planner = self._plain.get(batch, ()), self.engine.roster.planner
        if len(seen) >= FEWEST:
            return median(seen)
        return planner.costs.forward(batch) if planner.lengths is None else math.nan
