"""The way of an answer past Ray: nobody comes in without a ticket, and a replica that dies is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from outrider.serve import connection
from outrider_ray.calls import ReplicaLost, ReplicaRequest, ResponseStart
from outrider_ray.direct import TICKET, Connections, Listener, Reservation, ReservationMiddleware

Lost = asyncio.Future[None]


class Replica:
    """An application that a test drives. left: a client was seen to leave. asked: the scopes."""

    def __init__(self, parts: int = 3, hang: bool = False) -> None:
        self.parts, self.hang, self.left, self.asked = parts, hang, asyncio.Event(), list[Any]()
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope)
        self.body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Kind", b"a"), (b"x-kind", b"b")]})
        for number in range(self.parts):
            await send({"type": "http.response.body", "body": b"part %d;" % number, "more_body": True})
            await asyncio.sleep(0)
        if self.hang:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def replica(app: Replica) -> AsyncIterator[tuple[ReservationMiddleware, Listener, Connections, Reservation]]:
    tickets, connections = ReservationMiddleware(app), Connections()
    listener = Listener(tickets, "127.0.0.1")
    try:
        yield tickets, listener, connections, Reservation("r0", listener.url, tickets.issue())
    finally:
        await connections.close()
        await listener.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_an_answer_comes_in_parts_and_a_ticket_is_good_for_one() -> None:
    async def test() -> None:
        app = Replica()
        async with replica(app) as (tickets, _, connections, place):
            call = ReplicaRequest(
                "POST", "/v1/é x", b"a=%20b", ((b"x-request-id", b"mine"), (b"x-two", b"\xe9")), b'{"b": 1}'
            )
            used = asyncio.ensure_future(tickets.used(place.ticket))
            start, *parts = [p async for p in connections.ask(place, call, Lost())]
            assert isinstance(start, ResponseStart)
            assert (start.status, start.replica) == (200, "r0")
            assert [v for k, v in start.headers if k == b"x-kind"] == [b"a", b"b"]
            assert b"transfer-encoding" not in dict(start.headers)
            assert b"".join(p for p in parts if isinstance(p, bytes)) == b"part 0;part 1;part 2;"
            [scope] = app.asked
            assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v1/é x", b"a=%20b")
            assert app.body == b'{"b": 1}'
            headers = dict(scope["headers"])
            assert headers[b"x-request-id"] == b"mine"
            assert not {b"user-agent", b"accept-encoding", b"content-type"} & set(headers)  # nobody gave them
            await used  # the replica's place is free again
            for ticket in (place.ticket, "", "nonsense"):
                again, *rest = [p async for p in connections.ask(replace(place, ticket=ticket), call, Lost())]
                assert isinstance(again, ResponseStart)
                assert again.status == 401
                assert json.loads(b"".join(p for p in rest if isinstance(p, bytes)))["error"]["code"] == "no_ticket"
            assert len(app.asked) == 1

    run(test)


def test_a_front_that_stops_reading_leaves() -> None:
    async def test() -> None:
        app = Replica(hang=True)
        async with replica(app) as (tickets, _, connections, place):
            used = asyncio.ensure_future(tickets.used(place.ticket))
            async with aclosing(connections.ask(place, ReplicaRequest("GET", "/"), Lost())) as parts:
                async for part in parts:
                    if part == b"part 0;" or isinstance(part, bytes):
                        break
            await app.left.wait()
            await used

    run(test)


@pytest.mark.parametrize("begun", [True, False])
def test_what_ray_knows_ends_the_wait_for_a_host_that_is_silent(begun: bool) -> None:
    async def test() -> None:
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with replica(Replica(hang=True)) as (_, _, connections, place):
            lost = Lost()
            if not begun:
                place = replace(place, url=f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
            asyncio.get_running_loop().call_later(0.2, lost.set_result, None)
            with pytest.raises(ReplicaLost, match="r0"):
                async with asyncio.timeout(5):
                    [p async for p in connections.ask(place, ReplicaRequest("GET", "/"), lost)]
        silent.close()

    run(test)


def test_a_connection_that_breaks_is_a_replica_that_is_lost() -> None:
    async def test() -> None:
        async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n")
            await writer.drain()
            writer.transport.abort()

        server, connections = await asyncio.start_server(half, "127.0.0.1", 0), Connections()
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ReplicaLost):
            [
                p
                async for p in connections.ask(
                    Reservation("r0", f"http://127.0.0.1:{port}", ""), ReplicaRequest("GET", "/"), Lost()
                )
            ]
        server.close()
        await server.wait_closed()
        with pytest.raises(ReplicaLost):  # nobody listens any more
            [
                p
                async for p in connections.ask(
                    Reservation("r0", f"http://127.0.0.1:{port}", ""), ReplicaRequest("GET", "/"), Lost()
                )
            ]
        await connections.close()

    run(test)


def test_listeners_say_what_is_taken_and_finish_what_runs() -> None:
    async def test() -> None:
        app = Replica(parts=400)
        async with replica(app) as (_, listener, connections, place):
            with pytest.raises(OSError, match="in use"):
                Listener(app, "127.0.0.1", listener.port)
            parts = connections.ask(place, ReplicaRequest("GET", "/"), Lost())
            assert isinstance(await anext(parts), ResponseStart)
            closing = asyncio.ensure_future(listener.close())
            body = b"".join([p async for p in parts if isinstance(p, bytes)])
            assert body.endswith(b"part 399;")
            await closing

    run(test)


def test_a_listener_has_the_limits_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connection, "connection_limit", lambda _: 4)

    async def test() -> None:
        listener = Listener(Replica(), "127.0.0.1")
        streams = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(6)]
        for _, writer in streams:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
        ends = await asyncio.gather(*(reader.read() for reader, _ in streams), return_exceptions=True)
        assert all(end == b"" or isinstance(end, ConnectionError) for end in ends)
        await listener.close()

    run(test)


def test_two_fronts_may_listen_at_one_address() -> None:
    async def test() -> None:
        one = Listener(Replica(), "127.0.0.1", reuse=True)
        two = Listener(Replica(), "127.0.0.1", one.port, reuse=True)
        assert one.url == two.url
        await one.close()
        await two.close()

    run(test)


def test_the_ticket_has_a_header_of_its_own() -> None:
    """Clients' own headers reach the replica, but never their ticket: the front sets it."""

    async def test() -> None:
        app = Replica()
        async with replica(app) as (_, _, connections, place):
            call = ReplicaRequest("GET", "/", headers=((TICKET.encode(), b"stolen"),))
            assert [p async for p in connections.ask(place, call, Lost())]
            assert [v for k, v in app.asked[0]["headers"] if k == TICKET.encode()] == [place.ticket.encode()]

    run(test)
