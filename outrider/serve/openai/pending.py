"""A request that the engine works on, and the response that comes of it: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import math
from collections import abc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from outrider.core.outputs import Delta
from outrider.engine import Engine, EngineStopped, QueueFull
from outrider.engine.request import Request, Sequence
from outrider.engine.scheduler import LATE
from outrider.serve.errors import Refused, dumps
from outrider.serve.openai.protocol import StreamOptions
from outrider.serve.openai.responses import ResponseWriter
from outrider.serve.openai.tools import ToolCallReader


class PendingAnswer:
    """The texts of one HTTP request, from the queue to the response.

    Use it in a `with` block and read it once, with `whole` or `stream`. Leaving the block early cancels the texts.
    on_end: called once when the block is left.
    """

    writer: ResponseWriter

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequences, self.results = list[Sequence](), dict[int, Sequence]()
        self.on_end: Callable[[PendingAnswer], None] | None = None
        self._loop, self._deltas = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Delta]]()

    def submit(self, requests: abc.Sequence[Request]) -> None:
        """Queue the texts, all or none. Raises ValueError for what the engine cannot run, and Refused if it takes nothing now."""
        try:
            self.sequences = self.engine.submit(
                [replace(request, sink=partial(self._hand_over, index)) for index, request in enumerate(requests)]
            )
        except QueueFull as full:
            raise Refused(str(full), 429, code="queue_full", retry=full.retry_after) from full
        except EngineStopped as stopped:
            raise Refused(str(stopped), 503, code="stopped") from stopped

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {"x-outrider-guarantee": self.writer.guarantee.value}

    async def whole(self) -> dict[str, Any]:
        """Wait for all texts. Raises Refused if one failed, or if all were aborted before their first token.

        A deadline that has passed is 408: another server would be as late. A server that stops is 503.
        """
        with self:
            async for index, delta in self.deltas():
                if delta.ended:
                    _check(self.sequences[index])
        results = self._ordered()
        if all(r.finish and r.finish.finish == "abort" and not r.written for r in results):
            reason = results[0].finish and results[0].finish.reason
            if reason == LATE:
                raise Refused(f"nothing was written: {reason}; allow more time", 408, code="timeout")
            raise Refused(f"nothing was written: {reason}", 503, code="aborted", retry=1)
        return await asyncio.to_thread(self.writer.whole, results)  # many log-probabilities take long

    async def stream(self, options: StreamOptions | None, interval: float | None) -> AsyncIterator[bytes]:
        """Server-sent events, up to `[DONE]`. interval: see `Pace`."""
        try:
            async for chunk in self.chunks(options, interval):
                yield _event(chunk)
        except Refused as refused:
            yield _event(refused.body)
        yield b"data: [DONE]\n\n"

    async def chunks(self, options: StreamOptions | None, interval: float | None) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream, as they come. interval: see `Pace`. Raises Refused if a text fails."""
        pace, choices = Pace(interval), [StreamedChoice(self.writer, i, s) for i, s in enumerate(self.sequences)]
        counts = bool(options and options.continuous_usage_stats)
        for choice in choices:
            if not self.writer.opens_late and not choice.is_open and (chunk := choice.open()):
                yield chunk
        async for index, delta in self.deltas():
            choice = choices[index]
            # The engine has read the prompt before its first delta.
            if not choice.is_open and (
                chunk := await asyncio.to_thread(choice.open, self.sequences[index].prompt_logprobs)
            ):
                yield chunk
            if counts:
                choice.count(delta)
            for part in pace.cut(delta, self.writer.shows_tokens):
                for chunk in choice.read(part.text, part):
                    await pace.tick()
                    yield {**chunk, "so_far": choice.so_far} if counts else chunk
            if delta.ended:
                _check(self.sequences[index])
                *rest, end = choice.close()
                for chunk in rest:
                    await pace.tick()
                    yield chunk
                yield end
        if options and options.include_usage:
            yield self.writer.totals(self._ordered())

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Each delta of each text with the text's index, until all texts have ended."""
        while len(self.results) < len(self.sequences):
            index, delta = await self._deltas.get()
            if delta.ended:
                self.results[index] = self.sequences[index]
            yield index, delta

    def __enter__(self) -> PendingAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self.results) < len(self.sequences):
            self.engine.cancel(self.sequences)
        if self.on_end is not None:
            self.on_end(self)
            self.on_end = None

    def _ordered(self) -> list[Sequence]:
        return [self.results[i] for i in range(len(self.sequences))]

    def _hand_over(self, index: int, delta: Delta) -> None:
        """For the engine's thread: hands a delta to the event loop."""
        self._loop.call_soon_threadsafe(self._deltas.put_nowait, (index, delta))


class EventResponse(StreamingResponse):
    """A stream of events. When it ends, for any reason, the pending answer ends too.

    While a long prompt is read, a comment goes out now and then: clients and proxies give up a connection that is silent.
    """

    quiet: ClassVar[float] = 15.0  # seconds before a comment

    def __init__(
        self, pending: PendingAnswer, events: AsyncIterator[bytes], media_type: str = "text/event-stream"
    ) -> None:
        headers = {**pending.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)
        self.pending, self._sent = pending, math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            self._sent = perf_counter() if message.get("more_body", True) else math.inf
            await send(message)

        comments = asyncio.create_task(self._comment(noted))
        try:
            with self.pending:
                await super().__call__(scope, receive, noted)
        finally:
            comments.cancel()

    async def _comment(self, send: Send) -> None:
        while self.media_type == "text/event-stream":  # lines of JSON have no comments
            await asyncio.sleep(self.quiet / 2)
            if perf_counter() - self._sent > self.quiet / 2:
                await send({"type": "http.response.body", "body": b": still reading\n\n", "more_body": True})


class StreamedChoice:
    """One choice of a stream: turns deltas into chunks. so_far: the counts for `continuous_usage_stats`.

    is_open: it had its first chunk. A text that continues another had it there.
    """

    def __init__(self, writer: ResponseWriter, index: int, sequence: Sequence) -> None:
        self._writer, self._index, self._sequence = writer, index, sequence
        self._reader: ToolCallReader | None = writer.reader() if writer.reader else None
        self._offset = len(writer.echoes[index])
        self.is_open = self._behind = bool(sequence.request.continued)
        self.so_far = {"tokens": len(sequence.request.continued), "drafted": 0, "accepted": 0}

    def open(self, prompt_logprobs: abc.Sequence[dict[int, float] | None] = ()) -> dict[str, Any] | None:
        """The first chunk, if the choice needs one."""
        self.is_open = True
        return self._writer.opening(self._index, prompt_logprobs)

    def count(self, delta: Delta) -> None:
        """Add a delta to `so_far`."""
        self.so_far["tokens"] += len(delta.token_ids)
        self.so_far["drafted"] += delta.drafted
        self.so_far["accepted"] += delta.accepted

    def close(self) -> list[dict[str, Any]]:
        """The chunks for what is still held back, then the last chunk."""
        held, called = self.read("", None, last=True), self._reader is not None and self._reader.called > 0
        return [*held, self._writer.closing(self._index, self._sequence, called)]

    def read(self, text: str, delta: Delta | None, last: bool = False) -> list[dict[str, Any]]:
        """The chunks for more text: its content, then the tool calls that it completes."""
        reader, writer, index = self._reader, self._writer, self._index
        if self._behind:  # the text before is known since the sequence had its slot
            before, self._behind = self._sequence.cursor.continued_text, False
            self._offset += len(before)
            if reader is not None:
                reader.feed(before)
        at = self._offset
        self._offset += len(text)
        content, calls = reader.feed(text, last) if reader else (text, [])
        tokens = delta is not None and delta.token_ids and writer.shows_tokens
        if not calls:
            return [writer.piece(index, content, delta, at)] if content or tokens else []
        assert reader is not None
        chunks = [writer.piece(index, content, None, at)] if content else []
        chunks += [writer.call(index, n, call) for n, call in enumerate(calls, reader.called - len(calls))]
        # The tokens come last: a client that has read them has the call, so the answer can go on from there.
        return [*chunks, writer.piece(index, "", delta, at)] if tokens else chunks


class Pace:
    """When the events of a stream leave.

    interval: seconds. With an interval each event has one token and leaves on a tick of an even clock. Then neither
    size nor time nor `pieces` shows how many draft tokens were accepted (arXiv 2411.01076). None sends text as it comes.
    """

    def __init__(self, interval: float | None) -> None:
        self.interval, self._start = interval, perf_counter()

    def cut(self, delta: Delta, tokens: bool = True) -> list[Delta]:
        """One delta for each event. tokens: a token without text needs an event, too."""
        if self.interval is None:
            return [delta] if delta.text or (tokens and delta.token_ids) else []
        count = max(len(delta.pieces), len(delta.token_ids) if tokens else 0)
        pieces = [*delta.pieces, *[("", False)] * (count - len(delta.pieces))]
        return [
            Delta(piece[0], delta.token_ids[i : i + 1], logprobs=delta.logprobs[i : i + 1])
            for i, piece in enumerate(pieces)
        ]

    async def tick(self) -> None:
        """Wait for the next tick."""
        if self.interval is not None:
            late = (perf_counter() - self._start) % self.interval
            await asyncio.sleep(self.interval - late)


def _check(result: Sequence) -> None:
    if result.finish and result.finish.finish == "error":
        raise Refused(f"the text could not be written: {result.finish.reason}", 500, code="generation_failed")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + dumps(body) + b"\n\n"
