"""The dashboard of many replicas: their events, summed. Replicas are asked only while a page is open."""

from __future__ import annotations

import secrets
from collections import abc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.core.http import named_events
from outrider.serve.dashboard.figures import Tick, added
from outrider.serve.dashboard.viewers import INTERVAL, Audience, encoded
from outrider.serve.dashboard.watch import RECENT
from outrider_ray.calls import ReplicaRequest

if TYPE_CHECKING:
    from outrider_ray.replicas import RayReplicas

Event = dict[str, Any]


class SummedDashboard(Audience):
    """Asks all replicas for their events at each tick, and sends viewers the sum."""

    def __init__(self, replicas: RayReplicas, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._replicas, self._name = replicas, ""
        self._hellos, self._last = dict[str, Event](), dict[str, Event]()

    def begin(self) -> None:
        """See `Audience.begin`. Under a new name, so that replicas say hello again."""
        self._name, self._hellos, self._last = secrets.token_hex(8), {}, {}

    def hello(self) -> Event | None:
        """See `Audience.hello`."""
        return summed_hello(self._hellos) if self._hellos else None

    async def tick(self) -> None:
        """See `Audience.tick`."""
        pages = await self._replicas.each(ReplicaRequest("POST", "/dashboard/poll", f"viewer={self._name}".encode()))
        ticks, fresh = dict[str, list[Event]](), False
        for name, page in pages.items():
            ticks[name] = []
            for kind, event in named_events([page]):
                assert event is not None
                if kind == "hello":
                    fresh, self._hellos[name] = True, event
                else:
                    ticks[name].append(event)
        for gone in set(self._hellos) - set(pages):
            del self._hellos[gone]
            fresh = bool(self._hellos)
        if fresh:
            self.send(encoded("hello", summed_hello(self._hellos)))
        self._last = {name: (ticks[name] or [self._last.get(name)])[-1] for name in ticks}
        self._last = {name: event for name, event in self._last.items() if event is not None}
        if any(ticks.values()):
            speculates = any(hello["speculates"] for hello in self._hellos.values())
            event = self.told(summed_tick(ticks, len(self._last)), speculates) | summed_state(ticks, self._last)
            self.send(encoded("tick", event))


def summed_hello(hellos: abc.Mapping[str, Event]) -> Event:
    """What does not change, of all replicas. They may differ for a while, in an update."""
    [first, *_] = hellos.values()
    merged = {key: _alike(h[key] for h in hellos.values()) for key in ("model", "method", "verifier", "guarantee")}
    return {
        **first,
        **merged,
        "num_speculative_tokens": max(h["num_speculative_tokens"] for h in hellos.values()),
        "slots": sum(h["slots"] for h in hellos.values()),
        "ended": _ended((name, h["ended"]) for name, h in hellos.items())[-RECENT:],
        "speculates": any(h["speculates"] for h in hellos.values()),
        "shows_text": all(h["shows_text"] for h in hellos.values()),
    }


def summed_tick(ticks: abc.Mapping[str, list[Event]], count: int) -> Tick:
    """One record for those of `count` replicas. The time that went by and the seconds of phases are means over them."""
    total = added(Tick(**tick["sums"]) for some in ticks.values() for tick in some)
    phases = {phase: seconds / max(count, 1) for phase, seconds in total.seconds.items()}
    return replace(total, elapsed=total.elapsed / max(count, 1), seconds=phases)


def summed_state(ticks: abc.Mapping[str, list[Event]], last: abc.Mapping[str, Event]) -> Event:
    """How all replicas are now, and what ended in these ticks. last: the last tick of each."""
    now = list(last.values())
    problems = [f"{name}: {tick['problem']}" for name, tick in last.items() if tick["problem"]]
    return {
        "time": max(tick["time"] for tick in now),
        "engine": {name: _total(tick["engine"][name] for tick in now) for name in now[0]["engine"]},
        "problem": "; ".join(problems) or None,
        "ended": _ended((name, tick["ended"]) for name, some in ticks.items() for tick in some),
    }


def _total(values: abc.Iterable[int | None]) -> int | None:
    """The sum; None if one has no limit."""
    found = list(values)
    return None if None in found else sum(x for x in found if x is not None)


def _alike(values: abc.Iterable[str]) -> str:
    """The values without repetition."""
    return "; ".join(dict.fromkeys(value for value in values if value))


def _ended(requests: abc.Iterable[tuple[str, list[Event]]]) -> list[Event]:
    """Requests that have ended, the oldest first. Their numbers are those of one replica, so its name stands before."""
    found = [{**request, "id": f"{name}:{request['id']}"} for name, some in requests for request in some]
    return sorted(found, key=lambda request: request["at"])
