"""The viewers of the live page of a server. Nothing is computed or sent while no page is open.

Each viewer has a short queue. A viewer that does not read is dropped, and its queue with it. Every viewer is dropped after
`LEASE` seconds and its browser comes back, so one that has gone to sleep holds nothing.
"""

from __future__ import annotations

import asyncio
from collections import abc, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from time import time
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.core.detokenizer import Detokenizer
from outrider.drafters.method import NONE
from outrider.engine.trace import Detail
from outrider.serve.connection import abort, unless_gone
from outrider.serve.dashboard.watch import WINDOWS, EndedRequest, Tick, Watch, figures, outlook, recent
from outrider.serve.errors import Refused, dumps
from outrider.serve.service import Service

INTERVAL = 0.5  # seconds between two ticks
KEPT = 600  # ticks: the longest window
WAITING = 8  # ticks that a viewer may be behind
VIEWERS = 16
LEASE = 900.0  # seconds of a viewer; browsers connect again
TOKENS = 300  # of a prompt and of an answer that are sent
HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "frame-ancestors 'none'",
}


class Dashboard:
    """Viewers, and the task that feeds them while there are any. Then `watch` is an observer of the engine."""

    def __init__(self, service: Service, models: Callable[[], list[str]]) -> None:
        """models: the names of those that are loaded."""
        self.service, self.watch, self._models = service, Watch(service.engine), models
        self.interval, self.viewers = INTERVAL, list[Viewer]()
        self.dropped = 0  # viewers that did not read
        self._past, self._windows, self._turn = deque[Tick](maxlen=KEPT), dict[str, dict[str, Any]](), 0
        self._ticker: asyncio.Task[None] | None = None
        trace = service.engine.scheduler.trace
        self.shows_text = trace is not None and trace.detail is not Detail.COUNTS
        self.speculates = service.engine.roster.default != NONE

    def join(self, viewer: Viewer) -> None:
        """A viewer has come. The first one starts the ticks. Raises Refused if there are too many."""
        if len(self.viewers) >= VIEWERS:
            raise Refused(f"the dashboard has {VIEWERS} viewers already; close one", 503, code="overloaded", retry=5)
        if self._ticker is None:
            self._past.clear()
            self.watch.clear()
            self.service.engine.scheduler.watch(self.watch)
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        viewer.offer(encoded("hello", self.hello()))
        self.viewers.append(viewer)

    def leave(self, viewer: Viewer) -> None:
        """A viewer is gone. With the last one the ticks end."""
        if viewer in self.viewers:
            self.viewers.remove(viewer)
        if not self.viewers and self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
            self.service.engine.scheduler.unwatch(self.watch)

    def send(self, data: bytes) -> None:
        """Queue an event for all. Viewers that do not read are dropped."""
        for viewer in [one for one in self.viewers if not one.offer(data)]:
            self.dropped += 1
            viewer.drop()
            self.leave(viewer)

    def told(self, tick: Tick) -> dict[str, Any]:
        """What viewers are told of a tick, and of those before it.

        sums: the tick. windows: the outlook of each, by seconds. A long window changes slowly, so it is summed up at every second
        or tenth tick. point: speed and depth of four ticks.
        """
        self._past.append(tick)
        self._turn += 1
        for seconds in WINDOWS:
            if self._turn % max(min(len(self._past), 2 * seconds) // 60, 1) == 0:
                self._windows[str(seconds)] = outlook(recent(self._past, seconds), seconds, self.speculates)
        now = figures(recent(self._past, 3.5 * self.interval))
        return {"sums": vars(tick), "windows": self._windows, "point": [now["rate"], now["depth"]]}

    def close(self) -> None:
        """Send every viewer away. Their browsers come back."""
        for viewer in list(self.viewers):
            viewer.drop()
            self.leave(viewer)

    async def _tick(self) -> None:
        """Send what happened since the last tick, again and again."""
        engine = self.service.engine
        while True:
            await asyncio.sleep(self.interval)
            tick, ended = self.watch.tick()
            event = {
                **self.told(tick),
                "time": time(),
                "engine": asdict(engine.stats),
                "problem": engine.problem,
                "ended": [self._shown(request) for request in ended],
                "models": self._models(),
            }
            if engine.closing:
                self.close()
            self.send(encoded("tick", event))

    def hello(self) -> dict[str, Any]:
        """What does not change, and the requests that have ended lately."""
        service, decoder = self.service, self.service.engine.decoder
        config = service.runtime.config
        return {
            "model": service.settings.model_name,
            "method": "+".join(config.methods),
            "num_speculative_tokens": config.budget.depth,
            "speculates": self.speculates,
            "verifier": decoder.verifier.name,
            "guarantee": decoder.guarantee.value,
            "slots": decoder.cache.num_slots,
            "shows_text": self.shows_text,
            "ended": [self._shown(request) for request in self.watch.recent],
        }

    def _shown(self, request: EndedRequest) -> dict[str, Any]:
        """A request for viewers; its texts only if the server's trace holds them too."""
        shown = dict(request.facts)
        if self.shows_text:
            prompt, output = request.prompt, request.output[:TOKENS]
            origins = request.origins or "?" * len(request.output)
            runs = groupby(zip(origins, output, strict=False), key=lambda pair: pair[0])
            reader = Detokenizer(self.service.tokens, prompt[:-TOKENS], skip_special_tokens=False)
            shown["prompt"] = reader.push(*prompt[-TOKENS:])
            shown["text"] = [[letter, reader.push(*(t for _, t in some))] for letter, some in runs]
        return shown


class Viewer(Response):
    """The events of a client that looks. Its queue is short; `drop` ends it, whatever it waits for."""

    media_type = "text/event-stream"

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(headers={**HEADERS, "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.dashboard, self._scope = dashboard, anyio.CancelScope()
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(WAITING)

    def offer(self, data: bytes) -> bool:
        """Queue an event; False if the client has not read for too long."""
        try:
            self._queue.put_nowait(data)
        except asyncio.QueueFull:
            return False
        return True

    def drop(self) -> None:
        self._scope.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what comes, until the client leaves or is dropped, or until the lease ends."""
        self.dashboard.join(self)
        try:
            with suppress(Refused):  # the client has left, so there is no answer
                await unless_gone(receive, self._stream(scope, send))
        finally:
            self.dashboard.leave(self)

    async def _stream(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with self._scope, anyio.move_on_after(LEASE):
            while True:
                await send({"type": "http.response.body", "body": await self._queue.get(), "more_body": True})
        with anyio.move_on_after(1) as late:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if late.cancelled_caught:  # one that does not read cannot be told
            abort(scope)


def encoded(name: str, event: abc.Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: ".encode() + dumps(event) + b"\n\n"
