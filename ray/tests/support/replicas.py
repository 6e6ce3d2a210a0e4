"""Replicas in this process that die when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from outrider_ray.calls import DROP_FROM_RESPONSE, ReplicaLost, ReplicaRequest, ResponseStart


async def answered(app: ASGIApp, call: ReplicaRequest, replica: str = "") -> AsyncIterator[ResponseStart | bytes]:
    """Let an application answer a call. A reader that stops early is a client that has left."""
    messages, gone = asyncio.Queue[Message | None](), asyncio.Event()
    given = False

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": [*call.headers, (b"content-length", str(len(call.body)).encode())],
        "client": None,
        "server": None,
        "state": {},
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                headers = tuple((k, v) for k, v in message.get("headers", ()) if k.lower() not in DROP_FROM_RESPONSE)
                yield ResponseStart(message["status"], headers, replica)
            elif body := message.get("body", b""):
                yield body
        await task  # raises what the application raised
    finally:
        gone.set()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


class LocalReplicas:
    """Applications that take turns. dies: given the number of a call and what came of its answer so far (0 for nothing,
    then one more for each event), says whether the replica is lost before the next. calls: what was asked."""

    def __init__(self, apps: dict[str, ASGIApp], dies: Callable[[int, int], bool] = lambda call, events: False) -> None:
        self.apps, self.dies = apps, dies
        self.calls, self.asked = list[ReplicaRequest](), list[str]()

    async def ask(self, call: ReplicaRequest) -> AsyncGenerator[ResponseStart | bytes, Any]:
        names, number, events = list(self.apps), len(self.calls), 0
        name = call.home if call.home in self.apps else names[number % len(names)]
        self.calls.append(call)
        self.asked.append(name)
        parts, page = answered(self.apps[name], call, name), False
        try:
            async for part in parts:
                if isinstance(part, ResponseStart):
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

    async def each(self, call: ReplicaRequest) -> dict[str, bytes]:
        found = {}
        for name, app in self.apps.items():
            found[name] = b"".join([p async for p in answered(app, call) if isinstance(p, bytes)])
        return found
