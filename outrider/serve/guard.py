"""ASGI middleware before every route: a request id, the host, the origin, the API key, and limits on what comes in."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
from contextlib import ExitStack
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.connection import abort, network
from outrider.serve.errors import Refused, refusing
from outrider.serve.logs import log
from outrider.serve.metrics import ENGINE, Metrics
from outrider.serve.options import ServeOptions
from outrider.serve.requests import check_body

OPEN = ("/health", "/", "/home.js", "/favicon.ico")  # load balancers have no key, and the page at / asks for it
MONITOR = ("/health", "/metrics")  # answered under any load
HEADS = (*MONITOR, "/v1/models", "/version", "/api/tags", "/api/version")  # answer HEAD as they answer GET
OWNER = b"x-outrider-owner"  # header from a front to its replicas: whose request it is
_HOST = re.compile(r"\[?([^\[\]]*?)\.?\]?(?::\d*)?")  # a name or an address, with a port
SHOWN = 200  # characters of a path in the log
# A browser asks its user for the key of these
PAGES = ("/dashboard", "/dashboard/events", "/openapi.json", "/metrics", "/version")


class Guard:
    """Reads the whole body before the route sees the request, so an incomplete request only costs a connection.

    An exception in a route becomes an error response without a traceback. The traceback goes to the log. Each request is told
    its `owner`: its key, else the network of its client. Owners share the slots.
    """

    def __init__(self, app: ASGIApp, settings: ServeOptions, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), perf_counter()
        asked = headers.get("x-request-id", "")
        name = asked if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", asked) else secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state |= {"request_id": name, "waited": 0.0}
        if scope["path"].startswith("/api/"):  # Ollama's clients need not say that a body is JSON
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        status, gone, counted = 0, False, False

        async def answer(message: Message) -> None:
            nonlocal status, gone
            if message["type"] == "http.response.start":
                status = message["status"]
                told = MutableHeaders(scope=message)
                told["x-request-id"] = told["request-id"] = name  # the second is Anthropic's
            try:
                async with asyncio.timeout(self.settings.send_timeout):
                    await send(message)
            except TimeoutError:
                gone = True
                raise _Gone from None

        try:
            try:
                state["owner"] = self._check(scope, headers)
                received = await self._received(headers, receive)
                if scope["path"] not in MONITOR:
                    self.active, counted = self.active + 1, True
                    if self.active > self.settings.max_connections:
                        raise Refused("the server has too many requests", 503, code="overloaded", retry=1)
                with ExitStack() as state["ends"]:  # what ends with the request: its answer, the loan of its model
                    head = scope["method"] == "HEAD" and scope["path"] in HEADS
                    await self.app({**scope, "method": "GET"} if head else scope, received, answer)
            except Refused as refused:
                await refused.response(scope)(scope, receive, answer)
        except _Gone:
            status = 499
            abort(scope)
        except Exception as error:
            if not gone:
                log.error("%s failed", name, exc_info=error)
            if not status:
                failed = Refused("the server failed on this request", 500)
                await failed.response(scope)(scope, receive, answer)
        finally:
            self.active -= counted
            name_of_model = state.get("model", self.metrics.model_name)
            self.metrics.responses.labels(name_of_model, ENGINE, str(status or 499)).inc()
            took = 1000 * (perf_counter() - started)
            log.info("%s %s %s %s %.0f ms", name, scope["method"], scope["path"][:SHOWN], status or "gone", took)

    def _check(self, scope: Scope, headers: Headers) -> str:
        """The owner of a request. Raises Refused for a host, an origin or a key that may not."""
        settings, path = self.settings, scope["path"]
        if settings.replica_name:  # the front has checked
            return headers.get(OWNER.decode(), "")
        named = _HOST.fullmatch(headers.get("host", ""))
        host = named[1].lower() if named else ""
        if settings.hosts and host not in settings.hosts:
            raise Refused(
                f"this server does not answer as {host[:80]!r}; start it with --allowed-host {host[:80]}, or with a key",
                403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None:  # a link to a page is followed; what a page loads by itself is not
            apart = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
            foreign = apart and headers.get("sec-fetch-mode") != "navigate"
        else:
            foreign = origin.partition("://")[2] != headers.get("host", "-")
            foreign = foreign and not {origin, "*"} & set(settings.cors_origin)
        if foreign and (not settings.api_key or path in PAGES):
            raise Refused(
                "a page of another site may not use this server; start it with --cors-origin ORIGIN to allow one",
                403,
                code="cross_origin",
            )
        if path not in OPEN and settings.api_key:
            return f"key {self._check_key(headers, page=path in PAGES)}"
        return network((scope.get("client") or ("",))[0])

    def _check_key(self, headers: Headers, page: bool) -> str:
        """A digest of the key: its place among the keys may change. Raises Refused for a wrong one.

        Compares digests with every key, so the time shows neither length nor content of a key.
        page: the key may also come as the password of any user, which is what a browser's own dialog sends.
        """
        sent = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"  # the second is Anthropic's way
        scheme, _, word = sent.partition(" ")
        if page and scheme.lower() == "basic":
            scheme, word = "bearer", _password(word)
        digest = hashlib.sha256(word.strip().encode()).digest()
        same = [hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in self.settings.api_key]
        if not any(same) or scheme.lower() != "bearer":
            what = "send Authorization: Bearer KEY or X-Api-Key: KEY" + (
                ", or give it as the password here" if page else ""
            )
            raise Refused(
                f"the API key is missing or wrong; {what}",
                401,
                code="invalid_api_key",
                challenge='Basic realm="outrider: the API key is the password"' if page else "Bearer",
            )
        return digest.hex()[:16]

    async def _received(self, headers: Headers, receive: Receive) -> Receive:
        """Receives the whole body once, then the real messages, such as the disconnect."""
        limit = self.settings.body_bytes
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise Refused(f"the body has the content-encoding {coding[:40]!r}; send it as it is", 415)
        length = headers.get("content-length", "")
        body, more = bytearray(), True
        size = int(length) if length.isdecimal() else 0
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                while more and size <= limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    body += message.get("body", b"")
                    size, more = len(body), bool(message.get("more_body"))
        except TimeoutError:
            raise Refused(f"the request did not arrive within {self.settings.body_timeout:g} s", 408) from None
        if size > limit:
            raise Refused(f"the request is larger than {limit} bytes", 413, code="request_too_large")
        whole = bytes(body)
        with refusing():
            check_body(whole)
        messages: list[Message] = [{"type": "http.request", "body": whole, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay


def guards(settings: ServeOptions, metrics: Metrics) -> list[Middleware]:
    """The middleware of an application: the limits, the key and the origins of its settings."""
    cors = Middleware(CORSMiddleware, allow_origins=settings.cors_origin, allow_methods=["*"], allow_headers=["*"])
    return [*([cors] if settings.cors_origin else []), Middleware(Guard, settings=settings, metrics=metrics)]


def _password(given: str) -> str:
    """The password of basic credentials; empty if they cannot be read."""
    try:
        return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


class _Gone(Exception):
    """The client left before its request was complete, or it does not read the response."""
