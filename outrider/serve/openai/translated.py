"""From a request to its response, in each protocol: what their writers and their routes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from outrider.engine.scheduler import LATE
from outrider.serve.connection import unless_gone
from outrider.serve.errors import Refused, called, dumps, json_response
from outrider.serve.openai.pending import PendingAnswer
from outrider.serve.openai.protocol import ChatRequest, CompletionRequest
from outrider.serve.openai.tools import begun
from outrider.serve.service import Service

if TYPE_CHECKING:
    from outrider.serve.pool import ModelPool
    from outrider.serve.spans import Spans

Event = dict[str, Any]
OPENING, CLOSING = "<think>", "</think>"  # of a thought
END = 64  # tokens of a prompt that may show that the template began a thought


class AnswerWriter:
    """Writes one answer from its chunks: as they are, which is what clients of OpenAI read.

    begin: the bytes of a stream before the answer; end: those after it; comment: those while a long prompt is read. Clients and
    proxies give up a connection that is silent.
    """

    media_type = "text/event-stream"
    begin, end, comment, usage = b"", b"data: [DONE]\n\n", b": still reading\n\n", False

    def sent(self, chunk: dict[str, Any]) -> bytes:
        """What a stream has for a chunk. Raises Refused for an answer that failed."""
        return b"data: " + dumps(chunk) + b"\n\n"

    def refused(self, refused: Refused) -> bytes:
        """What a stream has for an answer that could not be written."""
        return self.sent(refused.body)

    async def whole(self, pending: PendingAnswer) -> dict[str, Any]:
        """The answer in one piece. Raises Refused."""
        return await pending.whole()

    async def events(self, pending: PendingAnswer, interval: float | None) -> AsyncIterator[bytes]:
        """The stream. interval: see `PendingAnswer.chunks`."""
        yield self.begin
        try:
            async for chunk in pending.chunks(interval, self.usage):
                yield self.comment if chunk is None else self.sent(chunk)
        except Refused as refused:
            yield self.refused(refused)
        yield self.end


_WRITER = AnswerWriter()  # it keeps nothing, so one is enough


class AnswerTranslator(AnswerWriter, ABC):
    """Writes one answer in another protocol, from the chunks of a completion with one choice.

    Each method returns the events of what it adds. answer: the whole answer, which is what the events add up to.
    """

    end, usage = b"", True
    answer: dict[str, Any]

    @abstractmethod
    def chunk(self, chunk: dict[str, Any]) -> list[Event]:
        """Add a chunk of the completion. The last one has the usage and no choice. Raises Refused for an answer that failed."""

    @abstractmethod
    def failed(self, refused: Refused) -> list[Event]:
        """The end of an answer that could not be written."""

    def encoded(self, event: Event) -> bytes:
        """An event as it is sent."""
        return b"event: " + event["type"].encode() + b"\ndata: " + dumps(event) + b"\n\n"

    def sent(self, chunk: dict[str, Any]) -> bytes:
        return b"".join(map(self.encoded, self.chunk(chunk)))

    def refused(self, refused: Refused) -> bytes:
        return b"".join(map(self.encoded, self.failed(refused)))

    async def whole(self, pending: PendingAnswer) -> dict[str, Any]:
        async for chunk in pending.chunks(None, True):  # text and calls in their order, which no completion tells
            pending.check_written()
            if chunk is not None:
                self.chunk(chunk)
        return self.answer


def cut_by(choice: dict[str, Any]) -> str | None:
    """Why a choice was cut off: its deadline, or the end of the server. None if it was not."""
    return choice["stop_reason"] if choice["finish_reason"] == "length" else None


def check_whole(choice: dict[str, Any]) -> None:
    """Raise Refused for a choice that was cut off by its deadline or by the end of the server."""
    if (reason := cut_by(choice)) is not None:
        raise Refused(f"the answer was cut off: {reason}", 408 if reason == LATE else 503)


class Answering:
    """From the body of a request to its response. spans: are told of each request."""

    def __init__(self, pool: ModelPool, spans: Spans | None = None) -> None:
        self.pool, self._spans = pool, spans

    async def answer(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest,
        request: Request,
        make: Callable[[PendingAnswer], AnswerWriter] = lambda _: _WRITER,
    ) -> Response:
        """The response: whole, or as events. make: its writer. Raises Refused."""
        state = request.state
        waited, client = getattr(state, "waited", 0.0), body.user or state.owner
        with called(body.called):
            pending = await service.accept(body, state.request_id, client, state.owner, waited)
        if self._spans is not None:  # it ends after the answer
            state.ends.callback(self._spans.watch(pending, service.settings.model_name, body, request.headers))
        state.ends.enter_context(pending)
        writer = make(pending)
        if body.stream:
            headers = {**pending.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
            events = writer.events(pending, service.settings.pad_seconds)
            return StreamingResponse(events, headers=headers, media_type=writer.media_type)
        return json_response(await unless_gone(request.receive, writer.whole(pending)), headers=pending.headers)


class ThinkingReader:
    """Splits the text of one answer into thought and content. How the text is cut into pieces changes nothing."""

    def __init__(self, prompt: str = "") -> None:
        """prompt: its end, or all of it. Some templates begin the thought themselves."""
        self._inside, self._text = prompt.rstrip().endswith(OPENING), ""
        self._over, self._trim = False, self._inside  # no thought can follow; space before the next text goes

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """Add text. Returns the thought and the content that are certain now. last: there is no more text."""
        self._text += text
        thought = content = ""
        if not self._inside and not self._over:
            start = self._text.lstrip()
            if start.startswith(OPENING):
                self._text, self._inside, self._trim = start[len(OPENING) :], True, True
            elif last or not OPENING.startswith(start):
                self._over = True
        if self._inside:
            self._trimmed()
            thought, closed, rest = self._text.partition(CLOSING)
            if closed:
                self._text, self._inside, self._over, self._trim = rest, False, True, True
            else:
                sure = len(thought if last else thought[: len(thought) - begun(thought, CLOSING)].rstrip())
                thought, self._text = thought[:sure], thought[sure:]
            thought = thought.rstrip()
        if self._over:
            self._trimmed()
            content, self._text = self._text, ""
        return thought, content

    def _trimmed(self) -> None:
        """Leave out the space at the beginning of a part."""
        if self._trim:
            self._text = self._text.lstrip()
            self._trim = not self._text


def thinks(template: Any) -> bool:
    """Whether a chat template is one of a model that thinks."""
    return CLOSING in str(template or "")


def thinking_reader(service: Service, pending: PendingAnswer) -> ThinkingReader | None:
    """What reads the thought of an answer; None for a model that does not think."""
    return (
        ThinkingReader(service.tokens.decode(pending.sequences[0].prompt[-END:])) if thinks(service.template) else None
    )
