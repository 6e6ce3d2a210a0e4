"""The front: one address before many replicas. It knows HTTP and our events, and no Ray.

A request without an answer so far is sent to another replica when its replica dies. A stream goes on elsewhere: the front reads
its events, remembers the token ids, and says with which request another replica goes on. Noise is keyed by position, so the rest
of the text is the same. The client sees one stream: nothing twice, nothing left out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.engine.decoder import draw_seed
from outrider.engine.scheduler import CLOSING
from outrider.serve.connection import unless_gone
from outrider.serve.errors import Refused, dumps
from outrider.serve.guard import OWNER, guards
from outrider.serve.logs import log
from outrider.serve.metrics import CONTENT_TYPE, Metrics
from outrider.serve.options import ServeOptions
from outrider_ray.calls import DROP_FROM_REQUEST, ReplicaLost, ReplicaRequest, ResponseStart
from outrider_ray.metrics import merged_metrics

if TYPE_CHECKING:
    from outrider_ray.replicas import RayReplicas

STREAMED = ("/v1/completions", "/v1/chat/completions")
RESPONSES = "/v1/responses"
HEAD = 16 << 10  # characters of a prompt that the router sees
PATIENCE = 60.0  # seconds that a request looks for a replica that lives
NO_DASHBOARD = (
    "the dashboard shows one server, and this address has several; /metrics has the counts of all, with the label replica: let "
    "Prometheus read it, recipes/monitoring has a dashboard for Grafana"
)
PAUSE = 0.1  # seconds before the second try; each further one waits twice as long, a second at most


class Front:
    """An ASGI application that hands requests to replicas. moved: requests that another replica took over."""

    def __init__(self, replicas: RayReplicas, settings: ServeOptions, patience: float = PATIENCE) -> None:
        self.replicas, self.settings, self.patience = replicas, settings, patience
        self.metrics, self.moved = Metrics(settings.metrics_prefix, settings.model_name), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. The guard before it has read the whole body and gave the request its id."""
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        if scope["type"] != "http":
            raise NotImplementedError(f"no {scope['type']} here")
        request = Request(scope, receive)
        body = await request.body()
        name = request.state.request_id.encode()
        added = (b"x-request-id", name), (OWNER, request.state.owner.encode())
        headers = [
            (k, v) for k, v in scope["headers"] if k.lower() not in DROP_FROM_REQUEST and k.lower() != b"x-request-id"
        ]
        call = ReplicaRequest(scope["method"], scope["path"], scope["query_string"], (*headers, *added), body)
        if call.path == "/metrics" and call.method == "GET":
            page = merged_metrics(await self.replicas.each(call), self.metrics.page(), self.settings.metrics_prefix)
            await Response(page, headers={"content-type": CONTENT_TYPE})(scope, receive, send)
            return
        if call.path.startswith("/dashboard"):
            raise Refused(NO_DASHBOARD, 404)
        parsed = _parsed(body) if call.method == "POST" else None
        if parsed is not None:
            call = replace(call, prompt=_beginning(parsed))
        if call.path.startswith(RESPONSES):
            call = replace(call, home=_home(call.path, parsed or {}))
        streams = parsed is not None and call.path in STREAMED and parsed.get("stream") is True
        await _sent(self._answer(call, ResumableStream(parsed) if streams and parsed else None), receive, send)

    async def _answer(
        self, call: ReplicaRequest, stream: ResumableStream | None
    ) -> AsyncGenerator[ResponseStart | bytes, None]:
        """An answer, from one replica after the other. stream: its events; None for what only one replica can write.

        Another replica may be asked until the first part was handed on, and for a stream also afterwards.
        """
        tries, begun = _Tries(self), False
        while stream is None or not stream.done:
            sent = call if stream is None else replace(call, body=stream.request())
            try:
                async with aclosing(self.replicas.ask(sent)) as parts:
                    start, first = await _begun(parts)
                    if tries.again(start, first):
                        call = replace(call, prompt="")  # the place of its prefix is full or ends
                        continue
                    if begun and start.status != 200:
                        yield b"data: " + first + b"\n\n" + END
                        return
                    if stream is None or start.status != 200:
                        held = [first]
                        if not dict(start.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                            held += [part async for part in parts]  # type: ignore[misc]
                        begun, stream = True, None
                        yield start
                        for part in held:
                            yield part
                        async for part in parts:
                            yield part
                        return
                    if not begun:
                        begun = True
                        yield start
                    if events := stream.read(first):
                        yield events
                    async for part in parts:
                        assert isinstance(part, bytes)
                        if events := stream.read(part):
                            yield events
                    if not stream.done:
                        raise ReplicaLost("the stream ended in the middle")
            except ReplicaLost as lost:
                if stream is None and begun:
                    raise
                if stream is not None:
                    stream.move()
                try:
                    await tries.wait(lost)
                except Refused as refused:
                    if not begun:
                        raise
                    yield b"data: " + dumps(refused.body) + b"\n\n" + END
                    return


class _Tries:
    """How often a request was moved, and whether it may be once more."""

    def __init__(self, front: Front) -> None:
        self._front, self._count, self._until, self._refused = front, 0, 0.0, False

    def again(self, start: ResponseStart, first: bytes) -> bool:
        """Whether an answer is an error that another replica need not have: it stops, or its queue is full."""
        if start.status == 503:
            error = (_parsed(first) or {}).get("error", {})
            if isinstance(error, dict) and error.get("code") in MOVES:
                raise ReplicaLost(str(error.get("message")))
        if start.status == 429 and not self._refused:
            self._refused = True
            return True
        return False

    async def wait(self, lost: ReplicaLost) -> None:
        """Wait before the next try. Raises Refused when the patience has ended."""
        now = perf_counter()
        self._until = self._until or now + self._front.patience
        if now > self._until:
            raise Refused(f"no replica could answer: {lost}", 503, code="no_replica", retry=5) from lost
        log.warning("a replica was lost (%s); its request goes on elsewhere", lost)
        self._front.moved += 1
        await asyncio.sleep(0 if self._count == 0 else min(1.0, PAUSE * 2 ** (self._count - 1)))
        self._count += 1


def guarded(front: Front) -> ASGIApp:
    """The front behind the middleware of a server."""
    app: ASGIApp = front
    for guard in reversed(guards(front.settings, front.metrics)):
        app = guard.cls(app, *guard.args, **guard.kwargs)
    return app


async def _begun(parts: AsyncGenerator[ResponseStart | bytes, None]) -> tuple[ResponseStart, bytes]:
    """The start of an answer and the first part of its body."""
    start = await anext(parts, None)
    if start is None or isinstance(start, bytes):
        raise ReplicaLost("it closed without an answer")
    first = await anext(parts, b"")
    assert isinstance(first, bytes)
    return start, first


async def _sent(answer: AsyncGenerator[ResponseStart | bytes, None], receive: Receive, send: Send) -> None:
    """Send an answer. When the client leaves, the answer is closed, and the replica stops writing."""

    async def forward() -> None:
        async with aclosing(answer):
            async for part in answer:
                if not isinstance(part, bytes):
                    headers = [*part.headers, (b"x-outrider-replica", part.replica.encode())]
                    await send({"type": "http.response.start", "status": part.status, "headers": headers})
                elif part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    await unless_gone(receive, forward())


def _parsed(body: bytes) -> dict[str, Any] | None:
    """A JSON object, or None for anything else: the replica says what is wrong with it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _beginning(body: dict[str, Any]) -> str:
    """What the prompt of a request begins with. Two prompts with a common beginning have it here, too."""
    for name in ("prompt", "messages", "input"):
        if prompt := body.get(name):
            head = prompt[:HEAD] if isinstance(prompt, (str, list)) else prompt
            return (head if isinstance(head, str) else json.dumps([body.get("tools"), head], ensure_ascii=False))[:HEAD]
    return ""


def _home(path: str, body: dict[str, Any]) -> str:
    """The replica that keeps the response that a request is about."""
    about = path.removeprefix(RESPONSES).strip("/") or body.get("previous_response_id")
    parts = about.split("_", 2) if isinstance(about, str) else []  # resp_NUMBER_REPLICA
    return parts[2] if len(parts) == 3 and parts[0] == "resp" else ""


END = b"data: [DONE]\n\n"
MOVES = frozenset({"stopped", "aborted", "unhealthy"})  # codes of errors that another replica does not have


class ResumableStream:
    """One streamed answer. body: the client's request, a JSON object. done: its last event was read."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.done, self._started = False, perf_counter()
        self._shows_ids = bool(body.get("return_token_ids"))
        self._shows_empty = self._shows_ids or body.get("logprobs") not in (None, False)
        self._body = {**body, "return_token_ids": True}
        if self._body.get("seed") is None:
            self._body["seed"] = draw_seed() % 2**53  # what goes on elsewhere needs the same one
        self._tokens = _continued(body)
        self._opened, self._ended = set[int](), set[int]()
        self._head: dict[str, Any] | None = None  # of the first chunk: an answer keeps its id
        self._rest = b""

    def request(self) -> bytes:
        """The body of the request that writes what is missing."""
        body = self._body
        if any(self._tokens):
            body = {**body, "continued_tokens": self._tokens}
        if isinstance(body.get("timeout"), (int, float)):
            body = {**body, "timeout": max(0.001, body["timeout"] - (perf_counter() - self._started))}
        return dumps(body)

    def move(self) -> None:
        """The replica is lost. The next events come from another one."""
        self._rest = b""

    def read(self, data: bytes) -> bytes:
        """The events in the next part of the body, as the client is to see them.

        Raises ReplicaLost if they say that this replica does not go on.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._event(event) for event in events)

    def _event(self, event: bytes) -> bytes:
        if event == END.rstrip():
            self.done = True
            return END
        chunk = json.loads(event.removeprefix(b"data: "))
        if "choices" not in chunk:
            if chunk.get("error", {}).get("code") in MOVES:
                raise ReplicaLost(chunk["error"]["message"])
            return event + b"\n\n"
        self._head = self._head or {name: chunk[name] for name in ("id", "created") if name in chunk}
        chunk |= self._head
        for choice in chunk["choices"]:
            if not self._wanted(choice, chunk):
                return b""
        if not self._shows_ids:
            chunk.pop("prompt_token_ids", None)
        return b"data: " + dumps(chunk) + b"\n\n"

    def _wanted(self, choice: dict[str, Any], chunk: dict[str, Any]) -> bool:
        """Take over the tokens of a choice, and its ids out of it. False if the client is not to see it."""
        index = choice["index"]
        opening = "prompt_token_ids" in choice or "prompt_token_ids" in chunk
        if index in self._ended or (opening and index in self._opened):
            return False
        if choice.get("finish_reason") == "length" and choice.get("stop_reason") == CLOSING:
            raise ReplicaLost(CLOSING)
        tokens = choice.get("token_ids", [])
        self._tokens[index] += tokens
        if opening:
            self._opened.add(index)
        if choice.get("finish_reason") is not None:
            self._ended.add(index)
            return True
        if not self._shows_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        delta = choice.get("delta", {})
        shown = choice.get("text") or delta.get("content") or "role" in delta or "tool_calls" in delta
        return bool(shown or (opening and self._shows_ids) or (self._shows_empty and not opening))


def _continued(body: dict[str, Any]) -> list[list[int]]:
    """The tokens so far of each choice.

    The replica judges the request first, so what is not valid here only needs some value.
    """
    prompt, n, before = body.get("prompt"), body.get("n"), body.get("continued_tokens")
    single = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
    count = (1 if single else len(prompt or ())) * (n if isinstance(n, int) and 0 < n <= 1024 else 1)
    if isinstance(before, list) and before:
        lists = [list(x) for x in before] if isinstance(before[0], list) else [list(before)]
        if len(lists) == count:
            return lists
    return [[] for _ in range(count)]
