"""From the body of a request to its response: what the routes and the writers of all protocols share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from outrider.serve.answer import Answer, ChoiceReader, Part
from outrider.serve.connection import unless_gone
from outrider.serve.errors import Refused, called, dumps, json_response
from outrider.serve.requests import ChatRequest, CompletionRequest
from outrider.serve.service import Service

if TYPE_CHECKING:
    from outrider.serve.pool import ModelPool
    from outrider.serve.spans import Spans

Event = dict[str, Any]


class Writer(ABC):
    """Writes one answer in a protocol: as a stream of events, or as the whole that its events add up to.

    begin: the bytes of a stream before the parts. end: those after them. comment: those where no part comes for long, because
    clients and proxies give up a connection that is silent.
    """

    media_type = "text/event-stream"
    begin: Sequence[bytes] = ()
    end, comment = b"", b": still reading\n\n"
    result: dict[str, Any]  # of `whole`, complete after `totals`

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    @abstractmethod
    async def part(self, choice: ChoiceReader, part: Part) -> list[Event]:
        """The events of a part. Raises Refused for an answer that failed."""

    @abstractmethod
    def totals(self) -> list[Event]:
        """The events after all parts: what was used."""

    @abstractmethod
    def failed(self, refused: Refused) -> list[Event]:
        """The events of an answer that could not be written."""

    def encoded(self, event: Event) -> bytes:
        """An event as it is sent."""
        return b"event: " + event["type"].encode() + b"\ndata: " + dumps(event) + b"\n\n"

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece. Raises Refused."""
        async for item in self.answer.parts():
            if item is not None:
                self.answer.check_written()
                await self.part(*item)
        self.totals()
        return self.result

    async def stream(self, interval: float | None) -> AsyncIterator[bytes]:
        """The events, as they come.

        interval: seconds. With an interval each event has one token and leaves on a tick of an even clock. Then neither size
        nor time nor `pieces` shows how many draft tokens were accepted (arXiv 2411.01076). None sends text as it comes.
        """
        for data in self.begin:
            yield data
        start = perf_counter()
        try:
            async for item in self.answer.parts(one_token=interval is not None):
                data = self.comment if item is None else self._joined(await self.part(*item))
                if interval is not None and item is not None:
                    await asyncio.sleep(interval - (perf_counter() - start) % interval)
                if data:
                    yield data
            yield self._joined(self.totals())
        except Refused as refused:
            yield self._joined(self.failed(refused))
        yield self.end

    def _joined(self, events: list[Event]) -> bytes:
        return b"".join(map(self.encoded, events))


class Responder:
    """Answers requests for texts. spans: are told of each."""

    def __init__(self, pool: ModelPool, spans: Spans | None = None) -> None:
        self.pool, self._spans = pool, spans

    async def respond(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest,
        request: Request,
        writer_of: Callable[[Answer], Writer],
    ) -> Response:
        """The response to a body: whole, or as a stream. writer_of: makes the writer of its protocol. Raises Refused."""
        state = request.state
        waited, client = getattr(state, "waited", 0.0), body.user or state.owner
        with called(body.called):
            writer = await service.accept(body, writer_of, state.request_id, client, state.owner, waited)
        if self._spans is not None:  # it ends after the answer
            state.ends.callback(self._spans.watch(writer.answer, service.settings.model_name, body, request.headers))
        state.ends.enter_context(writer.answer)
        headers = {"x-outrider-guarantee": writer.answer.guarantee}
        if body.stream:
            headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
            events = writer.stream(service.settings.pad_seconds)
            return StreamingResponse(events, headers=headers, media_type=writer.media_type)
        return json_response(await unless_gone(request.receive, writer.whole()), headers=headers)
