"""Replicas in this process that die when a test says so."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import ASGIApp

from outrider.ray.calls import Call, ReplicaLost, Start, answered


class LocalReplicas:
    """Applications that take turns. dies: given the number of a call and what came of its answer so far (0 for nothing,
    then one more for each event), says whether the replica is lost before the next. calls: what was asked."""

    def __init__(self, apps: dict[str, ASGIApp], dies: Callable[[int, int], bool] = lambda call, events: False) -> None:
        self.apps, self.dies = apps, dies
        self.calls, self.asked = list[Call](), list[str]()

    async def ask(self, call: Call) -> AsyncGenerator[Start | bytes, Any]:
        names, number, events = list(self.apps), len(self.calls), 0
        name = call.home if call.home in self.apps else names[number % len(names)]
        self.calls.append(call)
        self.asked.append(name)
        parts, page = answered(self.apps[name], call, name), False
        try:
            async for part in parts:
                if isinstance(part, Start):
                    self._maybe(number, 0)
                    page = dict(part.headers).get(b"content-type", b"").startswith(b"text/html")
                    yield part
                    continue
                for event in [part] if page else part.split(b"\n\n"):
                    if event:
                        if number % 2 and len(event) > 9:
                            yield event[:9]  # a part of an answer may end anywhere
                            event = event[9:]
                        whole = event + b"\n\n" if part.endswith(b"\n\n") else event
                        events += 1
                        if self.dies(number, events):
                            yield whole[:5]  # what a dying connection may still deliver
                            raise ReplicaLost(name)
                        yield whole
        finally:
            await parts.aclose()  # type: ignore[attr-defined]

    def _maybe(self, number: int, events: int) -> None:
        if self.dies(number, events):
            raise ReplicaLost("before it answered")

    async def each(self, call: Call) -> dict[str, bytes]:
        found = {}
        for name, app in self.apps.items():
            found[name] = b"".join([p async for p in answered(app, call) if isinstance(p, bytes)])
        return found
