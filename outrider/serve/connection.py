"""A connection that a response can cut: of a client that reads nothing, unsent bytes would be kept for as long as it likes."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

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
