"""A request that the engine works on, and the response that comes of it: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
from collections import abc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from time import perf_counter, time
from typing import Any, ClassVar

from outrider._version import __version__
from outrider.core.detokenizer import TokenBytes
from outrider.core.outputs import Delta
from outrider.engine import Engine, EngineStopped, QueueFull
from outrider.engine.fingerprint import Fingerprints
from outrider.engine.request import Request, Sequence
from outrider.engine.scheduler import LATE
from outrider.serve.errors import Refused
from outrider.serve.openai.protocol import CommonRequest
from outrider.serve.openai.responses import ChoiceWriter, metrics, usage
from outrider.serve.openai.tools import ToolCallReader


class PendingAnswer:
    """The texts of one HTTP request, from the queue to the response.

    Read it once in a `with` block, with `whole` or `chunks`. Leaving the block early cancels the texts.
    results: the sequences that have ended, by index.
    """

    quiet: ClassVar[float] = 15.0  # seconds without a chunk, at most

    def __init__(
        self,
        engine: Engine,
        requests: abc.Sequence[Request],
        body: CommonRequest,
        *,
        loop: asyncio.AbstractEventLoop,
        name: str,
        model: str,
        tokens: TokenBytes,
        reader: Callable[[], ToolCallReader] | None = None,
        fingerprints: Fingerprints | None = None,
    ) -> None:
        """Queue the texts, all or none.

        Args:
            engine: writes them.
            requests: one for each text.
            body: what the requests were made of.
            loop: where the answer is read.
            name: of the HTTP request.
            model: by which clients call the model.
            tokens: as of `ChoiceWriter`.
            reader: makes a reader of tool calls.
            fingerprints: as of `ChoiceWriter`.

        Raises ValueError for what the engine cannot run, and Refused if it takes nothing now.
        """
        self.engine, self.body, self._loop = engine, body, loop
        self._deltas, self.results = asyncio.Queue[tuple[int, Delta | None]](), dict[int, Sequence]()
        self._ends_alone = False  # `whole` needs no other delta; each wakes the event loop, and the engine waits for it
        try:
            self.sequences = engine.submit(
                [replace(request, sink=partial(self._hand_over, index)) for index, request in enumerate(requests)]
            )
        except QueueFull as full:
            raise Refused(str(full), 429, code="queue_full", retry=full.retry_after) from full
        except EngineStopped as stopped:
            raise Refused(str(stopped), 503, code="stopped") from stopped
        self.id, self._guarantee = ("chatcmpl-" if body.is_chat else "cmpl-") + name, engine.decoder.guarantee.value
        kind = "chat.completion.chunk" if body.is_chat else "text_completion"
        self._head = {"id": self.id, "object": kind, "created": int(time()), "model": model}
        self._head["system_fingerprint"] = f"outrider-{__version__}"
        if body.stream and body.stream_options and body.stream_options.include_usage:
            self._head["usage"] = None  # in all chunks but the last
        self._choices = [
            ChoiceWriter(body, self._head, index, sequence, tokens, reader and reader(), fingerprints)
            for index, sequence in enumerate(self.sequences)
        ]

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {"x-outrider-guarantee": self._guarantee}

    async def whole(self) -> dict[str, Any]:
        """Wait for all texts. Raises Refused if one failed, and what `check_written` raises."""
        self._ends_alone = True
        async for _ in self.deltas():
            pass
        self.check_written()
        choices = await asyncio.to_thread(lambda: [choice.whole() for choice in self._choices])  # logprobs take long
        shows_ids = self.body.is_chat and self.body.return_token_ids
        ids = {"prompt_token_ids": self.sequences[0].prompt} if shows_ids else {}
        return {**self._totals(choices), "object": self._head["object"].removesuffix(".chunk"), **ids}

    def check_written(self) -> None:
        """Raise Refused if all texts were aborted before their first token.

        A deadline that has passed is 408: another server would be as late. A server that stops is 503.
        """
        results = self.sequences
        if all(r.finish and r.finish.finish == "abort" and not r.written for r in results):
            reason = results[0].finish and results[0].finish.reason
            if reason == LATE:
                raise Refused(f"nothing was written: {reason}; allow more time", 408, code="timeout")
            raise Refused(f"nothing was written: {reason}", 503, code="aborted", retry=1)

    async def chunks(self, interval: float | None, usage: bool = False) -> AsyncIterator[dict[str, Any] | None]:
        """The chunks of a stream, as they come; None where none came for a while. usage: the last one has it, also if the body
        does not ask for it. Raises Refused if a text fails.

        interval: seconds. With an interval each chunk has one token and leaves on a tick of an even clock. Then neither
        size nor time nor `pieces` shows how many draft tokens were accepted (arXiv 2411.01076). None sends text as it comes.
        """
        options, start, silent = self.body.stream_options, perf_counter(), False
        counts = bool(options and options.continuous_usage_stats)
        for choice in self._choices:
            if not choice.is_open and not self.body.opens_late and (chunk := choice.open()):
                yield chunk
        async for index, delta in self.deltas():
            if delta is None:
                if silent:
                    yield None
                silent = True
                continue
            choice = self._choices[index]
            # The engine has read the prompt before its first delta.
            if not choice.is_open and (chunk := await asyncio.to_thread(choice.open)):
                yield chunk
            if interval is None:
                made = choice.read(delta.text, delta)
            else:
                parts = one_by_one(delta, self.body.shows_tokens)
                made = [chunk for part in parts for chunk in choice.read(part.text, part)]
            if counts:
                choice.count(delta)
                made = [{**chunk, "so_far": choice.so_far} for chunk in made]
            if delta.ended:
                made += choice.close()
                made[-1]["guarantee"] = self._guarantee
            for chunk in made:
                silent = False
                if interval is not None:
                    await asyncio.sleep(interval - (perf_counter() - start) % interval)
                yield chunk
        if usage or (options and options.include_usage):
            yield self._totals([])

    async def deltas(self) -> AsyncIterator[tuple[int, Delta | None]]:
        """Each delta of each text with the text's index, until all texts have ended. None now and then.

        Raises Refused if a text fails."""
        while len(self.results) < len(self.sequences):
            index, delta = await self._deltas.get()
            if delta is not None and delta.ended:
                result = self.results[index] = self.sequences[index]
                if result.finish and result.finish.finish == "error":
                    why = f"the text could not be written: {result.finish.reason}"
                    raise Refused(why, 500, code="generation_failed")
            yield index, delta

    def __enter__(self) -> PendingAnswer:
        self._timer = self._loop.call_later(self.quiet / 2, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if len(self.results) < len(self.sequences):
            self.engine.cancel(self.sequences)

    def _tick(self) -> None:
        """Wake the reader now and then: a stream that is silent for long has a comment."""
        self._deltas.put_nowait((0, None))
        self._timer = self._loop.call_later(self.quiet / 2, self._tick)

    def _totals(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer with usage and metrics."""
        counts = usage(self.sequences, self.body.n or 1), metrics(self.sequences, bool(self.body.detailed_metrics))
        ends = {"guarantee": self._guarantee, "usage": counts[0], "metrics": counts[1]}
        return {**self._head, "choices": choices, **ends}

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
