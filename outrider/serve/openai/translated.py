"""Answers in another protocol than chat and text completions: what their writers and their routes share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from outrider.engine.scheduler import LATE
from outrider.serve.connection import unless_gone
from outrider.serve.errors import Refused, dumps, json_response
from outrider.serve.openai.pending import EventResponse, PendingAnswer
from outrider.serve.openai.protocol import ChatRequest, CompletionRequest, StreamOptions
from outrider.serve.openai.thinking import ThinkingReader, thinks
from outrider.serve.service import Service

if TYPE_CHECKING:
    from outrider.serve.pool import ModelPool
    from outrider.serve.spans import Spans

Event = dict[str, Any]
END = 64  # tokens of a prompt that may show that the template began a thought


class AnswerTranslator(ABC):
    """Writes one answer in another protocol, from the chunks of a completion with one choice.

    Each method returns the events of what it adds. answer: the whole answer, which is what the events add up to.
    """

    media_type = "text/event-stream"
    answer: dict[str, Any]

    def begin(self) -> list[Event]:
        """The events before the answer."""
        return []

    @abstractmethod
    def chunk(self, chunk: dict[str, Any]) -> list[Event]:
        """Add a chunk of the completion. The last one has the usage and no choice. Raises Refused for an answer that failed."""

    @abstractmethod
    def failed(self, refused: Refused) -> list[Event]:
        """The end of an answer that could not be written."""

    def encoded(self, event: Event) -> bytes:
        """An event as it is sent."""
        return b"event: " + event["type"].encode() + b"\ndata: " + dumps(event) + b"\n\n"

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The answer of a whole completion."""
        choice = completion["choices"][0]
        self.chunk({**completion, "choices": [{**choice, "delta": choice.get("message", {})}]})
        self.chunk({**completion, "choices": []})
        return self.answer

    async def events(self, pending: PendingAnswer, interval: float | None) -> AsyncIterator[bytes]:
        """The stream. interval: see `Pace`."""
        for event in self.begin():
            yield self.encoded(event)
        try:
            async for chunk in pending.chunks(StreamOptions(include_usage=True), interval):
                for event in self.chunk(chunk):
                    yield self.encoded(event)
        except Refused as refused:
            for event in self.failed(refused):
                yield self.encoded(event)


def check_whole(choice: dict[str, Any]) -> None:
    """Raise Refused for a choice that was cut off by its deadline or by the end of the server."""
    if choice["finish_reason"] == "abort":
        reason = choice["stop_reason"]
        raise Refused(f"the answer was cut off: {reason}", 408 if reason == LATE else 503)


class Answering:
    """From the body of a request to its response. spans: are told of each request."""

    def __init__(self, pool: ModelPool, spans: Spans | None = None) -> None:
        self.pool, self._spans = pool, spans

    async def accept(self, service: Service, body: CompletionRequest | ChatRequest, request: Request) -> PendingAnswer:
        """Queue the texts of a request. Raises Refused."""
        owner, waited = request.state.owner, getattr(request.state, "waited", 0.0)
        if waited:
            left = min(body.timeout or math.inf, service.settings.request_timeout) - waited
            body = body.model_copy(update={"timeout": max(left, 1e-3)})
        pending = await service.accept(body, request.state.request_id, body.user or owner, owner)
        if self._spans is not None:
            self._spans.watch(pending, service.settings.model_name, body, request.headers)
        return pending

    async def answer(self, body: CompletionRequest | ChatRequest, request: Request) -> Response:
        """The response as a completion: whole, or as events."""
        service = await self.pool.lend(body.model, request, body.timeout)
        pending = await self.accept(service, body, request)
        if body.stream:
            return EventResponse(pending, pending.stream(body.stream_options, service.settings.pad_seconds))
        return json_response(await unless_gone(request.receive, pending.whole()), headers=pending.headers)

    async def translated(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest,
        request: Request,
        make: Callable[[PendingAnswer], AnswerTranslator],
    ) -> Response:
        """The response in another protocol. make: its writer."""
        pending = await self.accept(service, body, request)
        writer = make(pending)
        if body.stream:
            return EventResponse(pending, writer.events(pending, service.settings.pad_seconds), writer.media_type)
        return json_response(writer.whole(await unless_gone(request.receive, pending.whole())), headers=pending.headers)


def thinking_reader(service: Service, pending: PendingAnswer) -> ThinkingReader | None:
    """What reads the thought of an answer; None for a model that does not think."""
    return ThinkingReader(service.decode(pending.writer.prompts[0][-END:])) if thinks(service.template) else None
