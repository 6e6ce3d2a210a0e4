"""How a server speaks with clients: uvicorn's settings, and what a connection may cost before its request is complete.

A stranger needs no key to connect. So heads are limited in bytes and time, connections and unfinished requests are counted
by address. Where there is no room, the connections that keep the server waiting go first. It holds for each of uvicorn's parsers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import Counter
from collections.abc import Coroutine, MutableMapping
from functools import lru_cache, partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, TypeVar

import psutil
import uvicorn
from starlette.types import Receive
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from outrider.serve.errors import Refused, dumps
from outrider.serve.options import ServeOptions

T = TypeVar("T")
_Base: Any = object  # one of uvicorn's protocols comes after it
_ABORT = "outrider.abort"
HEAD = 64 << 10  # bytes of the head of a request
HEAD_SECONDS = 10.0  # of a head, from accept or from its first byte to its end
IDLE = 30  # seconds that a connection may stay without a request
ACCEPTED = 16  # connections that asyncio accepts in one go: each takes time from the answers that are written
WAITING = 2048  # connections that wait in the kernel meanwhile
FILES = 64  # files that the process may open beside connections


class Reception:
    """The connections of a server, by address. It makes room by closing those that keep the server waiting, oldest first.

    A connection waits while it has no complete request: it sends nothing, or half of a head or of a body.
    connections: open at once; an address may have half. held: bytes of requests that are kept until they are answered; an
    address may have half. request: bytes of one request, as they are sent.
    """

    def __init__(self, connections: int, max_body: int) -> None:
        self.connections, self.held, self.request = connections, 16 * max_body, 2 * max_body
        self.open, self.bytes = Counter[str](), Counter[str]()
        self.waiting = dict[LimitedConnection, None]()  # the oldest first

    def enter(self, one: LimitedConnection) -> bool:
        """Admit a new connection. False if there is no room, and no connection that could go."""
        full = self.open[one.address] >= max(1, self.connections // 2)
        if full or self.open.total() >= self.connections:
            waiting = (c.address for c in self.waiting)
            crowd = one.address if full else max(waiting, key=self.open.__getitem__, default="")
            oldest = next((c for c in self.waiting if c.address == crowd), None)
            if oldest is None:
                return False
            oldest.cut()
        self.open[one.address] += 1
        self.mark(one, waits=True)
        return True

    def leave(self, one: LimitedConnection) -> None:
        """A connection is gone."""
        self.mark(one, waits=False)
        self.release(one)
        self.open[one.address] -= 1
        self.open += Counter()  # drops the addresses that have none

    def mark(self, one: LimitedConnection, waits: bool) -> None:
        """waits: for the rest of a request. Else the request is complete, and the connection is not closed for others."""
        if waits:
            self.waiting.setdefault(one)
        else:
            self.waiting.pop(one, None)

    def hold(self, one: LimitedConnection, count: int) -> None:
        """Count bytes of a request. If they are too many, the largest unfinished one is refused."""
        one.held += count
        self.bytes[one.address] += count
        crowded = self.bytes[one.address] > self.held // 2
        if crowded or self.bytes.total() > self.held:
            crowd = [c for c in self.waiting if not crowded or c.address == one.address]
            if crowd:
                max(crowd, key=lambda c: c.held).refuse(429, "the server holds too many unfinished requests")

    def release(self, one: LimitedConnection) -> None:
        """Its request is answered."""
        self.bytes[one.address] -= one.held
        self.bytes += Counter()
        one.held = 0


class LimitedConnection(_Base):
    """Limits for one of uvicorn's protocols, and each request knows how to cut its connection.

    address: of the client. held: bytes of a request that is not answered yet.
    """

    def __init__(self, reception: Reception, **options: Any) -> None:
        """options: as of uvicorn's protocols."""
        super().__init__(**options)
        self.reception, self.address, self.held = reception, "", 0
        self._phase = 0  # bytes of this head; in a body, of the whole request
        self._clock: asyncio.TimerHandle | None = None
        self._inside = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = network((transport.get_extra_info("peername") or ("",))[0])
        self._inside = self.reception.enter(self)
        if not self._inside:
            transport.abort()
            return
        self._start_clock()
        app = self.app

        async def with_abort(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            scope[_ABORT] = self.cut
            await app(scope, receive, send)

        self.app = with_abort

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and self._inside and not self.transport.is_closing():
            before, body = self.cycle, self._in_body
            room = HEAD + (self.reception.request if body else 0) - self._phase
            if room <= 0:
                self.refuse(413 if body else 431, f"the {'body' if body else 'head'} of the request is too large")
                return
            part, data = data[:room], data[room:]
            if not body:
                self._start_clock()
            super().data_received(part)
            self._phase += len(part)
            if self.cycle is not before:  # a head is complete
                self._stop_clock()
            if self.cycle is not before or body != self._in_body:
                self._phase = len(part) if self._in_body else 0
            if self._inside:
                self._mark()
                self.reception.hold(self, len(part))

    def on_message_complete(self) -> None:
        """httptools calls it. uvicorn then takes a body that was refused before its end for one that still comes."""
        super().on_message_complete()
        if self.cycle is not None:
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        self.reception.release(self)
        super().on_response_complete()
        if self._inside:
            self._mark()
            if self._phase:  # half of the next head, or the rest of a body that was refused
                self._start_clock()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection ends here. uvicorn would wait until the client has read what is left."""
        self.cut()

    def cut(self) -> None:
        """Close at once; what was not sent is lost."""
        self.leave()
        self.transport.abort()

    def refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, and close."""
        if self.cycle is None or not self.cycle.response_started:
            refused = Refused(message, status, code="overloaded" if status == 429 else "request_too_large")
            body = dumps(refused.body_of({"path": ""} if self.cycle is None else self.cycle.scope))
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.leave()
        self.transport.close()
        self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    @property
    def _in_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    def _mark(self) -> None:
        """Tell whether the client waits for us, or we for it."""
        ours = self.cycle is not None and not self._in_body and not self.cycle.response_complete
        self.reception.mark(self, waits=not ours)

    def leave(self) -> None:
        """Count it no more."""
        self._stop_clock()
        if self._inside:
            self._inside = False
            self.reception.leave(self)

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(HEAD_SECONDS, self._late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        self._clock = None
        if self.cycle is None or self.cycle.response_complete:  # the end of a response starts the clock anew
            self.cut()


class ClientConnection(LimitedConnection, AutoHTTPProtocol):
    """The protocol that uvicorn would take, with limits. See `http_config`."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. If the client of the request leaves first, the work is cancelled, and this raises Refused."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise Refused("the client has left", 499)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def abort(scope: MutableMapping[str, Any]) -> None:
    """Cut the connection of a request at once; what was not sent is lost. Nothing happens under another server."""
    cut = scope.get(_ABORT)
    if cut is not None:
        cut()


@lru_cache(1024)
def network(host: str) -> str:
    """What counts as one address: an IPv4 address, or the network of an IPv6 one, which a single client has as a whole."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else address.exploded[:19]


def connection_limit(max_connections: int) -> int:
    """Connections that may be open: four times the requests, or what the system's limit of open files leaves."""
    wanted = 4 * max_connections
    try:
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened = psutil.Process().num_fds()
    except (ImportError, OSError):
        return wanted
    return wanted if files < 0 else max(8, min(wanted, files - opened - FILES))


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that hold the address and do not listen yet, one for each family of the host. port: 0 for a free one.

    Raises ValueError for an address that is taken, or is not of this machine.
    """
    sockets = list[socket.socket]()
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, _, _, address in dict.fromkeys(addresses):
            one = socket.socket(family, kind)
            try:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]))
            except OSError as error:
                one.close()
                if (
                    error.errno != errno.EADDRNOTAVAIL or len(addresses) == 1
                ):  # a name may have an address that is off here
                    raise
            else:
                sockets.append(one)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        for one in sockets:
            one.close()
        raise ValueError(f"cannot listen at {host}:{port}: {error.strerror}; --port 0 takes a free port") from None
    return sockets


class ManyWaiting(uvicorn.Server):
    """Lets connections wait in the kernel, because asyncio takes few of them at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(WAITING)


def http_config(app: Any, settings: ServeOptions, **more: Any) -> uvicorn.Config:
    """uvicorn's settings for an application. more: settings that are given in place of these."""
    reception = Reception(connection_limit(settings.max_connections), settings.body_bytes)
    usual: dict[str, Any] = {
        "http": partial(ClientConnection, reception),
        "loop": "asyncio",  # uvloop accepts all that wait in one go
        "ws": "none",
        "backlog": ACCEPTED,
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": IDLE,
        "timeout_graceful_shutdown": int(settings.shutdown_timeout) + 5,
        "h11_max_incomplete_event_size": HEAD,
    }
    return uvicorn.Config(app, **{**usual, **more})
