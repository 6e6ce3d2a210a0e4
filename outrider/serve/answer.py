"""The answer to a request: its texts from the queue to the response, read into parts, and written as a protocol has them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

from outrider.core.outputs import Delta
from outrider.engine import Engine, EngineStopped, QueueFull
from outrider.engine.request import Request, Sequence
from outrider.engine.scheduler import LATE
from outrider.serve.errors import Refused, dumps
from outrider.serve.requests import CommonRequest
from outrider.serve.tools import ThinkingReader, ToolCall, ToolCallReader

Event = dict[str, Any]


class Ending(NamedTuple):
    """Why a choice ended."""

    finish: str  # stop, tool_calls or length
    reason: str | int | None  # the stop string or token; of a text that was cut off, by what
    note: str | None  # what happened to its drafts

    @property
    def cut_by(self) -> str | int | None:
        """The deadline, or the end of the server. None for a text that was not cut off."""
        return self.reason if self.finish == "length" else None

    def check_whole(self) -> None:
        """Raise Refused for a text that was cut off."""
        if self.cut_by is not None:
            raise Refused(f"the answer was cut off: {self.cut_by}", 408 if self.cut_by == LATE else 503)


class Part(NamedTuple):
    """What comes next in a choice, in the order of the fields."""

    thought: str = ""  # of a model that thinks, where the protocol tells thoughts from texts
    text: str = ""
    call: ToolCall | None = None  # whole
    number: int = 0  # of the call in its choice
    delta: Delta | None = None  # whose tokens are told with this part
    ending: Ending | None = None  # in the last part


class ChoiceReader:
    """Reads one text of an answer. How the engine cuts the text changes no part but its size.

    `so_far` has the counts for `continuous_usage_stats`, and `continues` says that the text goes on from an earlier one.

    Args:
        index: of the text in the answer.
        sequence: the text.
        shows_tokens: a token is told even if it adds no text.
        tools: reads tool calls, where tools were offered.
        thoughts: reads thoughts, where they are told apart.
    """

    def __init__(
        self,
        index: int,
        sequence: Sequence,
        shows_tokens: bool = False,
        tools: ToolCallReader | None = None,
        thoughts: ThinkingReader | None = None,
    ) -> None:
        self.index, self.sequence, self.ended = index, sequence, False
        self._shows_tokens, self._tools, self._thoughts = shows_tokens, tools, thoughts
        self.continues = self._behind = bool(sequence.request.continued)
        self.so_far = {"tokens": len(sequence.request.continued), "drafted": 0, "accepted": 0}

    def read(self, delta: Delta, one_token: bool = False) -> Iterator[Part]:
        """The parts that a delta completes; after the last one those that were held back, and the end.

        one_token: a part has one token at most.
        """
        for name, count in (("tokens", len(delta.token_ids)), ("drafted", delta.drafted), ("accepted", delta.accepted)):
            self.so_far[name] += count
        for step in one_by_one(delta, self._shows_tokens) if one_token else [delta]:
            parts = self._split(step.text)
            if len(parts) == 1 and parts[0].call is None:
                parts = [parts[0]._replace(delta=step)]
            elif self._shows_tokens and step.token_ids:
                # They come last: a client that has read them has the call, so the answer can go on from there.
                parts.append(Part(delta=step))
            yield from parts
        if delta.ended:
            self.ended = True
            yield from self._split("", last=True)
            thought, text = ("", "") if self._thoughts is None else self._thoughts.feed("", last=True)
            called = self._tools is not None and self._tools.called > 0
            yield Part(thought, text, ending=self.ending(called))

    def whole(self) -> tuple[str, list[ToolCall]]:
        """The text and its calls in one piece, thoughts among the text."""
        parts = self._split(self.sequence.new_text, last=True)
        return "".join(part.text for part in parts), [part.call for part in parts if part.call]

    def ending(self, called: bool) -> Ending:
        """Why it ended. called: it has tool calls."""
        finish = self.sequence.finish
        assert finish is not None
        # OpenAI has no other name than `length` for a text that was cut off. The reason says by what.
        name = "length" if finish.finish != "stop" else "tool_calls" if called else "stop"
        return Ending(name, finish.reason, finish.note or self.sequence.counts.undrafted)

    def _split(self, text: str, last: bool = False) -> list[Part]:
        """Content and calls of more text."""
        tools, thoughts = self._tools, self._thoughts
        if self._behind and tools is not None:  # the text before is known since the sequence had its slot
            tools.parts(self.sequence.cursor.continued_text)
        self._behind = False
        pieces = tools.parts(text, last) if tools is not None else [text] if text else []
        number = 0 if tools is None else tools.called - sum(not isinstance(piece, str) for piece in pieces)
        parts = list[Part]()
        for piece in pieces:
            if isinstance(piece, str):
                parts.append(Part("", piece) if thoughts is None else Part(*thoughts.feed(piece)))
            else:
                before = ("", "") if thoughts is None else thoughts.feed("", last=True)
                parts.append(Part(*before, piece, number))
                number += 1
        return parts


class Answer:
    """The texts of one HTTP request. Read it once in a `with` block: leaving the block early cancels the texts.

    Args:
        engine: writes them.
        requests: one for each text. They are queued at once, all or none.
        body: what the requests were made of.
        loop: where the answer is read.
        name: of the HTTP request.
        choice: reads a text, from its place and its sequence.

    Raises ValueError for what the engine cannot run, and Refused if it takes nothing now.
    """

    quiet: ClassVar[float] = 15.0  # seconds without a part, at most

    def __init__(
        self,
        engine: Engine,
        requests: abc.Sequence[Request],
        body: CommonRequest,
        loop: asyncio.AbstractEventLoop,
        name: str,
        choice: Callable[[int, Sequence], ChoiceReader],
    ) -> None:
        self.engine, self.body, self._loop = engine, body, loop
        self._deltas, self._left = asyncio.Queue[tuple[int, Delta | None]](), len(requests)  # texts that have not ended
        self._ends_alone = False  # `end` needs no other delta; each wakes the event loop, and the engine waits for it
        try:
            self.sequences = engine.submit(
                [replace(request, sink=partial(self._hand_over, index)) for index, request in enumerate(requests)]
            )
        except QueueFull as full:
            raise Refused(str(full), 429, code="queue_full", retry=full.retry_after) from full
        except EngineStopped as stopped:
            raise Refused(str(stopped), 503, code="stopped") from stopped
        self.name, self.guarantee = name, engine.decoder.guarantee.value
        self.choices = [choice(index, sequence) for index, sequence in enumerate(self.sequences)]

    async def end(self) -> None:
        """Wait for the end of all texts. Raises Refused if one failed, and what `check_written` raises."""
        self._ends_alone = True
        async for _ in self._read():
            pass
        self.check_written()

    def check_written(self) -> None:
        """Raise Refused if all texts were aborted before their first token.

        A deadline that has passed is 408: another server would be as late. A server that stops is 503.
        """
        if all(s.finish and s.finish.finish == "abort" and not s.written for s in self.sequences):
            reason = self.sequences[0].finish and self.sequences[0].finish.reason
            if reason == LATE:
                raise Refused(f"nothing was written: {reason}; allow more time", 408, code="timeout")
            raise Refused(f"nothing was written: {reason}", 503, code="aborted", retry=1)

    async def parts(self, one_token: bool = False) -> AsyncIterator[tuple[ChoiceReader, Part] | None]:
        """The parts of all texts, as they come; None where none came for a while. one_token: a part has one token at most.

        Raises Refused if a text fails.
        """
        silent = False
        async for index, delta in self._read():
            if delta is None:
                if silent:
                    yield None
                silent = True
                continue
            choice = self.choices[index]
            for part in choice.read(delta, one_token):
                silent = False
                yield choice, part

    async def _read(self) -> AsyncIterator[tuple[int, Delta | None]]:
        """Each delta of each text with the text's index, until all texts have ended. None now and then.

        Raises Refused if a text fails."""
        while self._left:
            index, delta = await self._deltas.get()
            if delta is not None and delta.ended:
                self._left -= 1
                finish = self.sequences[index].finish
                if finish and finish.finish == "error":
                    raise Refused(f"the text could not be written: {finish.reason}", 500, code="generation_failed")
            yield index, delta

    def __enter__(self) -> Answer:
        self._timer = self._loop.call_later(self.quiet / 2, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._left:
            self.engine.cancel(self.sequences)

    def _tick(self) -> None:
        """Wake the reader now and then: a stream that is silent for long has a comment."""
        self._deltas.put_nowait((0, None))
        self._timer = self._loop.call_later(self.quiet / 2, self._tick)

    def _hand_over(self, index: int, delta: Delta) -> None:
        """For the engine's thread: hands a delta to the event loop."""
        if delta.ended or not self._ends_alone:
            self._loop.call_soon_threadsafe(self._deltas.put_nowait, (index, delta))


def one_by_one(delta: Delta, tokens: bool = True) -> list[Delta]:
    """A delta for each token of this one. tokens: those without text, too."""
    count = max(len(delta.pieces), len(delta.token_ids) if tokens else 0)
    pieces = [*delta.pieces, *[("", False)] * (count - len(delta.pieces))]
    return [
        Delta(piece[0], delta.token_ids[i : i + 1], logprobs=delta.logprobs[i : i + 1])
        for i, piece in enumerate(pieces)
    ]


class Writer(ABC):
    """Writes one answer in a protocol: as a stream of events, or as the whole that its events add up to.

    begin: the bytes of a stream before the parts. end: those after them. comment: those where no part comes for long, because
    clients and proxies give up a connection that is silent.
    """

    media_type = "text/event-stream"
    begin: abc.Sequence[bytes] = ()
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
