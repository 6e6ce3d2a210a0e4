"""How a server speaks with clients: uvicorn's settings, and a connection that a response can cut.

Of a client that reads nothing, unsent bytes would be kept for as long as it likes.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from asyncio import BaseTransport

    Protocol: Any = object
else:
    Protocol = AutoHTTPProtocol

_ABORT = "outrider.abort"


class AbortableProtocol(Protocol):
    """uvicorn's own protocol. Each request knows how to cut its connection: give it as `http` to `uvicorn.Config`."""

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        app = self.app

        async def with_abort(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            scope[_ABORT] = getattr(transport, "abort", transport.close)
            await app(scope, receive, send)

        self.app = with_abort


def abort(scope: MutableMapping[str, Any]) -> None:
    """Cut the connection of a request at once; what was not sent is lost. Nothing happens under another server."""
    cut = scope.get(_ABORT)
    if cut is not None:
        cut()


def http_config(app: Any, shutdown_timeout: float, **more: Any) -> uvicorn.Config:
    """uvicorn's settings for an application. shutdown_timeout: seconds for responses that run when the server ends."""
    given: dict[str, Any] = {
        "http": AbortableProtocol,
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": int(shutdown_timeout) + 5,
        "h11_max_incomplete_event_size": 64 << 10,
    }
    return uvicorn.Config(app, **{**given, **more})
