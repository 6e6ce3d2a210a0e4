"""Streams a replica's answer over HTTP of its own: Ray's messages take a millisecond for each token.

Ray picks the replica, counts the request and sees the replica die. What it brings is a reservation for one request.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from multidict import CIMultiDict
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from outrider.serve.connection import ManyWaiting, http_config
from outrider.serve.errors import Refused
from outrider.serve.options import ServeOptions
from outrider_ray.calls import DROP_FROM_RESPONSE, ReplicaLost, ReplicaRequest, ResponseStart

TICKET = "x-outrider-ticket"
CONNECT = 5.0  # seconds to reach a replica
IDLE = 600  # seconds that a replica keeps a connection; the front lets go of it much sooner
SHUTDOWN = 5.0  # seconds for what is left when a listener ends


@dataclass(frozen=True)
class Reservation:
    """Room for one request at a replica. url: where it listens. ticket: the secret that the request brings."""

    replica: str
    url: str
    ticket: str


class ReservationMiddleware:
    """ASGI middleware that answers a request only if it has the ticket of a reservation: nothing goes past Ray."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self._open = app, dict[str, asyncio.Event]()

    def issue(self) -> str:
        """A ticket for one request. Give it back with `drop`."""
        ticket = secrets.token_hex(16)
        self._open[ticket] = asyncio.Event()
        return ticket

    async def used(self, ticket: str) -> None:
        """Wait until the request of a ticket was answered."""
        await self._open[ticket].wait()

    def drop(self, ticket: str) -> None:
        """The ticket opens nothing more."""
        self._open.pop(ticket, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        ticket = dict(scope["headers"]).get(TICKET.encode(), b"").decode("latin-1")
        ended = self._open.get(ticket)
        if ended is None:
            refused = Refused("this address is for the front alone", 401, code="no_ticket")
            await refused.response(scope)(scope, receive, send)
            return
        self.drop(ticket)
        try:
            await self.app(scope, receive, send)
        finally:
            ended.set()


class Listener:
    """An application at an address, in the event loop that runs. reuse: others may listen there, too."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int = 0,
        settings: ServeOptions = ServeOptions(model="", shutdown_timeout=SHUTDOWN),  # noqa: B008
        *,
        reuse: bool = False,
        **more: Any,
    ) -> None:
        """more: as of `http_config`. Raises OSError for an address that is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, port))
        self._socket.listen()  # a taken address is told here, and clients may connect from now on
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._server = _DirectServer(http_config(app, settings, lifespan="off", **more))
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Take no more connections, and wait for the responses that run."""
        self._server.should_exit = True
        await self._serving


class _DirectServer(ManyWaiting):
    """Leaves the signals of the process alone."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class Connections:
    """The front's connections to replicas. They are kept for the next request."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, reservation: Reservation, call: ReplicaRequest, lost: asyncio.Future[None]
    ) -> AsyncGenerator[ResponseStart | bytes, None]:
        """Send a call where it has a reservation. Yields a `ResponseStart`, then the parts of the body.

        lost: is done when Ray knows that the replica is gone: a dead host does not close its connections. Raises ReplicaLost.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
                auto_decompress=False,
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        headers = CIMultiDict((k.decode("latin-1"), v.decode("latin-1")) for k, v in call.headers)
        headers[TICKET] = reservation.ticket
        query = "?" + call.query.decode("latin-1") if call.query else ""
        url = URL(reservation.url + quote(call.path) + query, encoded=True)
        asking = asyncio.ensure_future(
            self._session.request(
                call.method, url, headers=headers, data=call.body or None, allow_redirects=False
            ).__aenter__()
        )
        lost.add_done_callback(lambda _: asking.cancel())
        try:
            async with await asking as response:
                lost.add_done_callback(lambda _: response.close())
                lowered = ((k.lower(), v) for k, v in response.raw_headers)
                yield ResponseStart(
                    response.status,
                    tuple((k, v) for k, v in lowered if k not in DROP_FROM_RESPONSE),
                    reservation.replica,
                )
                async for part in response.content.iter_any():
                    yield part
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if lost.done() and (task is None or not task.cancelling()):  # this task was not cancelled
                raise ReplicaLost(reservation.replica) from None
            asking.cancel()
            raise
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise ReplicaLost(f"{reservation.replica}: {error or type(error).__name__}") from error

    async def close(self) -> None:
        """End the connections that are kept."""
        if self._session is not None:
            await self._session.close()
