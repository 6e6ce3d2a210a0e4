"""ASGI middleware before every route: a request id, the API key, and limits on what comes in."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import Refused
from outrider.serve.logs import log
from outrider.serve.metrics import Metrics
from outrider.serve.settings import Settings

OPEN = ("/health", "/", "/favicon.ico")  # load balancers have no key, and the page at / asks for it
PAGES = (  # a browser asks its user for the key
    "/dashboard",
    "/dashboard/events",
    "/dashboard/trial",
    "/explain",
    "/openapi.json",
    "/metrics",
    "/version",
)


class Guard:
    """Reads the whole body before the route sees the request, so an incomplete request only costs a connection.

    An exception in a route becomes an error response without a traceback. The traceback goes to the log.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), perf_counter()
        given = headers.get("x-request-id", "")
        name = given if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = name
        status, gone = 0, False

        async def answer(message: Message) -> None:
            nonlocal status, gone
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            try:
                async with asyncio.timeout(self.settings.send_timeout):
                    await send(message)
            except TimeoutError:
                gone = True
                raise _Gone from None

        self.active += 1
        try:
            try:
                if self.active > self.settings.max_connections:
                    raise Refused("the server has too many connections", 503, code="overloaded", retry=1)
                if scope["path"] not in OPEN:
                    self._check_key(headers, page=scope["path"] in PAGES)
                await self.app(scope, _replayed(await self._body(headers, receive), receive), answer)
            except Refused as refused:
                await refused.response()(scope, receive, answer)
        except _Gone:
            status = 499
        except Exception as error:
            if not gone:
                log.error("%s failed", name, exc_info=error)
            if not status:
                await Refused("the server failed on this request", 500).response()(scope, receive, answer)
        finally:
            self.active -= 1
            self.metrics.http(status or 499)
            took = 1000 * (perf_counter() - started)
            log.info("%s %s %s %s %.0f ms", name, scope["method"], scope["path"], status or "gone", took)

    def _check_key(self, headers: Headers, page: bool) -> None:
        """Raise Refused for a wrong key. Compares digests, so the time shows neither length nor content of the key.

        page: the key may also come as the password of any user, which is what a browser's own dialog sends.
        """
        if self.settings.api_key is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if page and scheme.lower() == "basic":
            scheme, given = "bearer", _password(given)
        wanted = hashlib.sha256(self.settings.api_key.encode()).digest()
        same = hmac.compare_digest(hashlib.sha256(given.strip().encode()).digest(), wanted)
        if not same or scheme.lower() != "bearer":
            what = "send Authorization: Bearer KEY" + (", or give it as the password here" if page else "")
            raise Refused(
                f"the API key is missing or wrong; {what}",
                401,
                code="invalid_api_key",
                challenge='Basic realm="outrider: the API key is the password"' if page else "Bearer",
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self.settings.max_body
        too_large = Refused(f"the request is larger than {limit} bytes", 413, code="request_too_large")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise Refused(f"the request did not arrive within {self.settings.body_timeout:g} s", 408) from None


def _password(given: str) -> str:
    """The password of basic credentials; empty if they cannot be read."""
    try:
        return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


class _Gone(Exception):
    """The client left before its request was complete, or it does not read the response."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receives the body once, then the real messages, such as the disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
