"""A trial: some of the next requests run without speculation, by chance, and the difference is measured.

It uses the switch that every request has. With the verifier `match` no text changes; with others the distribution stays.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from outrider.core.intervals import interval_unpaired
from outrider.core.types import Step
from outrider.engine import Engine
from outrider.engine.request import Request, Sequence
from outrider.serve.errors import Refused, refusing

MOST = 10_000
ON, OFF = "on", "off"


class Trial:
    """An observer that gives requests an arm and measures them. Requests with a wish of their own take no part.

    requests: how many are assigned, half of them to each arm. The order is random within pairs, so both arms see the same hours.
    """

    def __init__(self, requests: int, seed: int | None = None) -> None:
        """Raises ValueError for a number that cannot be split into two arms of at least two."""
        if not 4 <= requests <= MOST:
            raise ValueError(f"a trial has 4 to {MOST} requests, got {requests}")
        self.wanted = requests - requests % 2
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._pair = list[str]()
        self._arms: dict[int, str] = {}  # of requests that run
        self.assigned = 0
        # by arm: (tokens, seconds from arrival to end) of each request
        self.done: dict[str, list[tuple[float, float]]] = {ON: [], OFF: []}
        self.left = 0  # requests that failed, were cancelled or wrote nothing
        self._rows = self._steps = 0
        self._last = perf_counter()  # when something was measured

    @property
    def complete(self) -> bool:
        """All requests were assigned, and all have ended."""
        return self.assigned >= self.wanted and not self._arms

    @contextmanager
    def enrolled(self, requests: list[Request]) -> Generator[list[Request], None, None]:
        """The texts of one HTTP request, with the wish of their arm, while they are queued. The first of them is measured.

        They stay as they are when all requests are assigned.
        """
        with self._lock:
            arm = None
            if self.assigned < self.wanted:
                if not self._pair:
                    self._pair = [ON, OFF]
                    self._random.shuffle(self._pair)
                self.assigned += 1
                arm = self._arms[requests[0].id] = self._pair.pop()
        try:
            yield [replace(request, num_speculative_tokens=0) for request in requests] if arm == OFF else requests
        except BaseException:
            with self._lock:
                self.left += self._arms.pop(requests[0].id, None) is not None
            raise

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """See `Observer.step`."""
        self._rows += len(step.slots)
        self._steps += 1

    def finished(self, sequence: Sequence) -> None:
        """See `Observer.finished`."""
        with self._lock:
            arm = self._arms.pop(sequence.id, None)
            if arm is None:
                return
            good = sequence.finish is not None and sequence.finish.finish in ("stop", "length")
            if not good or not sequence.written:
                self.left += 1
            else:
                self.done[arm].append((len(sequence.written), sequence.clock.total))
                self._last = perf_counter()

    def result(self) -> dict[str, Any]:
        """How far it is, and the difference: tokens per second of whole requests with speculation over those without.

        low, high: the 95 % interval of a bootstrap over requests. ago: seconds since the last of them. Numbers are None while too
        few have ended.
        """
        with self._lock:
            tables = {arm: np.array(rows, dtype=float).reshape(-1, 2) for arm, rows in self.done.items()}
            rows = self._rows / self._steps if self._steps else 0.0
            found: dict[str, Any] = {
                "wanted": self.wanted,
                "assigned": self.assigned,
                "ended": {arm: len(table) for arm, table in tables.items()},
                "left": self.left,
                "rows": rows,
                "complete": self.complete,
                "ago": perf_counter() - self._last,
            }
        for arm, table in tables.items():
            found[f"rate_{arm}"] = float(table[:, 0].sum() / table[:, 1].sum()) if len(table) else None
        found |= {"ratio": None, "low": None, "high": None}
        if all(len(table) > 1 for table in tables.values()):
            ratio = interval_unpaired(tables[OFF], tables[ON])
            if np.isfinite([ratio.value, ratio.low, ratio.high]).all():
                found |= {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        return found


class Trials:
    """The trials of a server, one at a time. current: gives requests an arm. latest: what it has measured stays."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.current: Trial | None = None
        self.latest: Trial | None = None

    def start(self, requests: int) -> None:
        """Begin a trial in place of the present one. Raises Refused for a server that does not speculate."""
        if self._engine.roster.default == "none":
            raise Refused("this server decodes plainly, so there is nothing to compare; give it a speculative_config")
        with refusing("requests"):
            trial = Trial(requests)
        self.stop()
        self.current = self.latest = trial
        self._engine.scheduler.watch(trial)

    def stop(self) -> None:
        """End the trial."""
        if self.current is not None:
            self._engine.scheduler.unwatch(self.current)
        self.current = None

    def state(self) -> dict[str, Any] | None:
        """`Trial.result` of the latest, and whether it is running. A trial that is complete ends."""
        if self.latest is None:
            return None
        if self.latest.complete:
            self.stop()
        return {**self.latest.result(), "running": self.current is not None}
