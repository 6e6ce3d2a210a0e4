"""An HTTP request on its way to a replica, and an application that answers one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from outrider.serve.guard import OWNER

# Headers of a client that its replica does not get, and headers of a replica that its client does not get.
OURS = {
    b"content-length",
    b"connection",
    b"transfer-encoding",
    b"keep-alive",
    b"host",
    b"authorization",
    b"origin",
    OWNER,
}
THEIRS = {b"connection", b"transfer-encoding", b"x-request-id"}


@dataclass(frozen=True)
class Call:
    """An HTTP request. prompt: what its prompt begins with, for the router; empty if it has none.

    home: the replica that keeps what the request is about; empty if any will do.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    prompt: str = ""
    home: str = ""


@dataclass(frozen=True)
class Start:
    """The first part of an answer. replica: which one answers."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    replica: str = ""


class ReplicaLost(Exception):
    """A replica is gone, and its answer with it. Another one may be asked."""


class Replicas(Protocol):
    """The replicas of one server."""

    def ask(self, call: Call) -> AsyncGenerator[Start | bytes, None]:
        """Send a call to one of them. Yields a `Start`, then the parts of the body.

        Raises ReplicaLost when the replica dies, and Refused when none can take the call. A reader that stops early
        cancels the call.
        """
        ...

    async def each(self, call: Call) -> dict[str, bytes]:
        """The body of every replica's answer, by replica. A replica that does not answer is left out."""
        ...


async def answered(app: ASGIApp, call: Call, replica: str = "") -> AsyncIterator[Start | bytes]:
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
                headers = tuple((k, v) for k, v in message.get("headers", ()) if k.lower() not in THEIRS)
                yield Start(message["status"], headers, replica)
            elif body := message.get("body", b""):
                yield body
        await task  # raises what the application raised
    finally:
        gone.set()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
