"""How an answer reaches its client: as events, or whole; and what happens if the client leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import anyio
from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.serve.connection import disconnected
from outrider.serve.errors import Refused
from outrider.serve.openai.pending import PendingAnswer


class EventResponse(StreamingResponse):
    """A stream of events. When it ends, for any reason, the pending answer ends too."""

    def __init__(self, pending: PendingAnswer, events: AsyncIterator[bytes]) -> None:
        headers = {**pending.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.pending = pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.pending:
            await super().__call__(scope, receive, send)


async def unless_gone(request: Request, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Wait for the answer. Cancel it and raise Refused if the client leaves first."""
    found: dict[str, Any] | Refused = Refused("the client has left", 499)
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            await disconnected(request.receive)
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            found = await answer
        except Refused as refused:
            found = refused
        tasks.cancel_scope.cancel()
    if isinstance(found, Refused):
        raise found
    return found
