"""What a stranger can take of a server without a request: connections, heads, halves of bodies."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import uvicorn
from patience import PATIENCE
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.serve import connection
from outrider.serve.connection import LimitedConnection, Reception, network
from outrider.serve.options import ServeOptions

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BODY = HALF + b"content-length: 1000\r\n\r\n{"


class Echo:
    """An application that reads a body and says how long it is; `/slow` waits until it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.working = threading.Event()  # a request for `/slow` has come in whole

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        length, more = 0, scope["path"] != "/refuse"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            length, more = length + len(message["body"]), message["more_body"]
        if scope["path"] == "/slow":
            self.working.set()
        while scope["path"] == "/slow" and not self.go.is_set():
            await asyncio.sleep(0.01)
        said = b"%d" % length
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
        await send({"type": "http.response.body", "body": said})


class Live:
    """A server of `Echo` for small crowds."""

    def __init__(self) -> None:
        self.app = Echo()
        config = connection.http_config(self.app, ServeOptions(model="m", max_body=64), port=0, lifespan="off")
        http: Any = config.http
        self.reception: Reception = http.args[0]
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.app.go.set()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol])
def live(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A server with each of the parsers that uvicorn may find."""
    monkeypatch.setattr(connection, "ClientConnection", type("Chosen", (LimitedConnection, request.param), {}))
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(connection, "connection_limit", lambda _: 8)
    found = Live()
    yield found
    found.stop()


def sent(live: Live, *parts: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", live.port), 30)
    for part in parts:
        made.sendall(part)
    return made


def answer(one: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    with one, contextlib.suppress(ConnectionError):
        while part := one.recv(65536):
            found += part
    return found


def asked(live: Live, path: str = "/") -> httpx.Response:
    got = httpx.post(live.url + path, content=b"a" * 100)
    assert (got.status_code, got.text) == (200, "100")
    return got


@pytest.mark.parametrize("head", [b"GET /version HTTP/1.1\r\nhost: x\r\nx: ", b"GET /"])
def test_a_head_is_limited_in_bytes(live: Live, head: bytes) -> None:
    flood = sent(live, head)
    with contextlib.suppress(ConnectionError):
        for _ in range(4):  # less than an address may hold
            flood.sendall(b"a" * (1 << 15))
        flood.sendall(b" HTTP/1.1\r\n\r\n")
    found = answer(flood)
    assert b"HTTP/1.1 200" not in found
    assert live.reception.bytes.total() == 0
    whole = sent(live, b"GET /version HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 60000 + b"\r\nconnection: close\r\n\r\n")
    assert answer(whole).startswith(b"HTTP/1.1 200")


def test_many_small_fields_and_trailers_are_a_head_too(live: Live) -> None:
    for start in (b"GET /version HTTP/1.1\r\n", HALF + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"):
        flood = sent(live, start)
        with contextlib.suppress(ConnectionError):
            for n in range(110):
                flood.sendall(b"".join(b"x-%d: %s\r\n" % (100 * n + i, b"v" * 20) for i in range(100)))
            flood.sendall(b"\r\n")
        assert b"HTTP/1.1 200" not in answer(flood)


def test_a_head_is_limited_in_time_on_every_request_of_a_connection(live: Live) -> None:
    assert answer(sent(live)) == answer(sent(live, b"G")) == answer(sent(live, HALF)) == b""
    again = sent(live, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    assert again.recv(65536).startswith(b"HTTP/1.1 200")
    again.sendall(HALF)
    assert b"HTTP/1.1" not in answer(again)


def test_a_body_may_take_longer_than_a_head(live: Live) -> None:
    slow = sent(live, HALF + b"connection: close\r\ncontent-length: 30\r\n\r\n{")
    assert answer(sent(live, b"G")) == b""  # the time of a head has passed
    slow.sendall(b"a" * 29)
    assert answer(slow).startswith(b"HTTP/1.1 200")


def test_strangers_who_wait_go_first_and_a_request_that_runs_stays(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 600)
    runs = sent(live, b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert live.app.working.wait(PATIENCE)  # before that it is a stranger too
    with ExitStack() as stack:
        for crowd in (HALF, BODY, b""):
            for _ in range(20):
                stack.enter_context(sent(live, crowd))
            asked(live)
            assert live.reception.open.total() <= 4  # half of what all addresses have
        live.app.go.set()
        assert answer(runs).startswith(b"HTTP/1.1 200")


def test_where_all_connections_work_a_stranger_is_let_go(live: Live) -> None:
    runs = [sent(live, b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") for _ in range(4)]
    while live.reception.open.total() < 4 or live.reception.waiting:
        pass
    assert answer(sent(live, HALF)) == b""
    live.app.go.set()
    assert all(answer(one).startswith(b"HTTP/1.1 200") for one in runs)
    asked(live)


def test_bodies_that_are_not_complete_have_a_budget(live: Live) -> None:
    """The largest of them is refused, so a small request still comes through."""
    desk = live.reception
    with ExitStack() as stack:
        part = HALF + b"content-length: 60000\r\n\r\n" + b"a" * 50000
        desk.held = 4 * len(part)  # of which an address has half
        held = [stack.enter_context(sent(live, part)) for _ in range(3)]
        refused, _, _ = select.select(held, [], [], 60)
        assert refused[0].recv(4096).startswith(b"HTTP/1.1 429")
        asked(live)
    assert desk.bytes.total() <= desk.held // 2


def test_a_refused_body_is_not_read_for_ever(live: Live) -> None:
    flood = sent(live, HALF.replace(b"/v1/completions", b"/refuse") + b"content-length: 1000000000\r\n\r\n")
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            flood.sendall(b"a" * (1 << 16))
    flood.close()
    asked(live)


def test_when_all_have_left_nothing_is_counted(live: Live) -> None:
    for crowd in (HALF, BODY, b"", b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", b"nonsense\r\n\r\n"):
        for _ in range(10):
            sent(live, crowd).close()
    desk = live.reception
    while desk.open.total() or desk.bytes.total():
        assert httpx.get(live.url, headers={"connection": "close"}).status_code == 200
    assert not desk.waiting


def test_an_address_is_a_host_or_the_network_of_one() -> None:
    assert network("203.0.113.9") == network("::ffff:203.0.113.9") == "203.0.113.9"
    assert network("2001:db8:1:2::1") == network("2001:db8:1:2:ffff::9") != network("2001:db8:1:3::1")
    assert network("testclient") == "testclient"


def test_the_limit_of_open_files_bounds_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    for files, most in ((100, 40), (1 << 20, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert 8 <= connection.connection_limit(256) <= most
