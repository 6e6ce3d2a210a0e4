"""From requests to jobs, and from what the engine tells to answers."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter, time
from typing import Any, TypeVar

from outrider.core.grammar import GrammarMask, Grammars, available
from outrider.decode import Request, draw_seed
from outrider.engine import Engine, EngineStopped, Job, QueueFull, Result, Update
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.serve.errors import Refused, dumps
from outrider.serve.logs import log
from outrider.serve.protocol import ChatRequest, Common, CompletionRequest
from outrider.serve.responses import Shown, Writer
from outrider.serve.settings import Settings
from outrider.serve.tools import PLAIN, Format, Offer, Reader, chosen, offered, spelled_out

T = TypeVar("T")
COMPILE_TIMEOUT = 10.0  # seconds for a grammar


class Call:
    """The jobs of one request and what comes of them. Leaving the `with` block early cancels them."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.jobs, self.results = engine, list[Job](), dict[int, Result]()
        self.ended: Callable[[Call], None] | None = None  # is told when the call ends
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Update]]()

    def sink(self, index: int) -> Callable[[Update], None]:
        def tell(update: Update) -> None:
            self._loop.call_soon_threadsafe(self._told.put_nowait, (index, update))

        return tell

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Everything the jobs are told, until all are finished. What has piled up behind a slow reader comes at once."""
        while len(self.results) < len(self.jobs):
            index, update = await self._told.get()
            if update.result is not None:
                self.results[index] = update.result
            yield index, update

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self.results) < len(self.jobs):
            self.engine.cancel(self.jobs)
        if self.ended is not None:
            self.ended(self)
            self.ended = None


class Service:
    """An engine behind OpenAI's requests."""

    def __init__(self, llm: LLM, engine: Engine, settings: Settings) -> None:
        self.llm, self.engine, self.settings = llm, engine, settings
        self.started = int(time())
        self._grammars: Grammars | None = None
        self._encoder = ThreadPoolExecutor(1, "outrider-encode")  # tokenizers are not asked by two threads at once
        self._compiler = ThreadPoolExecutor(2, "outrider-grammar")

    async def encode(self, prompt: Any, **options: Any) -> list[int]:
        """The tokens of a text, of messages or of {"prompt_token_ids": ...}, with the event loop free meanwhile."""
        return await self._try(self._encoder, lambda: self._encode(prompt, **options))

    def decode(self, tokens: Sequence[int]) -> str:
        return "" if self.llm.tokenizer is None else self.llm.tokenizer.decode(list(tokens))

    def model(self, name: str | None) -> None:
        """Raise Refused for a model that is not served."""
        if name is not None and name != self.settings.model_name:
            served = self.settings.model_name
            raise Refused(
                f"there is no model {name[:80]!r} here; this server has {served!r}",
                404,
                param="model",
                code="model_not_found",
            )

    async def complete(self, body: CompletionRequest | ChatRequest, name: str, client: str) -> tuple[Writer, Call, int]:
        """Check a request and queue its jobs: how to answer it, the call, and the number of its prompts."""
        self.model(body.model)
        chat = isinstance(body, ChatRequest)
        offer, reader, special = self._tools(body)
        mask = await self._grammar(body, offer if offer and offer.forced else None)
        if isinstance(body, ChatRequest):
            prompts = [await self._chat(body)]
            most = body.max_completion_tokens or body.max_tokens
            logprobs = None if not body.logprobs else body.top_logprobs or 0
            shown = Shown(logprobs, token_ids=bool(body.return_token_ids))
        else:
            given = body.prompts
            if not given:
                raise Refused("prompt is an empty list", param="prompt")
            if len(given) * (body.n or 1) > self.settings.max_choices:
                raise Refused(f"one request may ask for {self.settings.max_choices} texts here", param="n")
            prompts = [await self.encode(p) for p in given]
            most, logprobs = 16 if body.max_tokens is None else body.max_tokens, body.logprobs
            shown = Shown(logprobs, body.prompt_logprobs, bool(body.echo), bool(body.return_token_ids))
        if (body.n or 1) > self.settings.max_choices:
            raise Refused(f"n is at most {self.settings.max_choices} here, got {body.n}", param="n")
        depth = body.guesses
        if depth is not None and depth > (limit := self.settings.max_speculative_tokens):
            raise Refused(f"num_speculative_tokens is at most {limit} here", param="num_speculative_tokens")
        try:
            params = body.params(most or None, logprobs, self.settings).with_(prompt_logprobs=shown.of_prompt)
            params = params.with_(skip_special_tokens=params.skip_special_tokens and not special)
        except ValueError as error:
            raise Refused(str(error)) from error
        requests = await self._try(
            self._encoder, lambda: [r for p in prompts for r in self._requests(p, params, mask, most == 0)]
        )
        if self.settings.log_prompts:
            log.info("%s asks %s", name, [self.decode(p) for p in prompts])
        writer = self._writer(name, chat, shown, [r.prompt for r in requests], reader)
        return writer, self._submit(requests, body, client), len(prompts)

    def _tools(self, body: Common) -> tuple[Offer | None, Callable[[], Reader] | None, bool]:
        """What tools are offered, who reads calls of them, and whether special tokens must be seen to read those."""
        if not isinstance(body, ChatRequest):
            return None, None, False
        try:
            offer = offered(body.tools, body.tool_choice, body.parallel_tool_calls is not False)
        except ValueError as error:
            raise Refused(str(error), param="tools" if str(error).startswith("tools") else "tool_choice") from error
        form = self.tool_format
        if offer is None or (form is None and not offer.forced):
            return offer, None, False
        form = form or PLAIN
        known = [] if self.llm.tokenizer is None else list(self.llm.tokenizer.all_special_tokens)
        special = form.opening in known and not form.bare
        hidden = known if special and body.skip_special_tokens is not False else []
        return offer, lambda: Reader(form, offer.names, hidden), special

    @property
    def tool_format(self) -> Format | None:
        """How the model writes calls of tools, as far as it is known."""
        return chosen(self.settings.tool_call_parser, getattr(self.llm.tokenizer, "chat_template", None))

    def _submit(self, requests: list[Request], body: Common, client: str) -> Call:
        call = Call(self.engine)
        seconds = min(body.timeout or math.inf, self.settings.request_timeout)
        for index, request in enumerate(requests):
            job = Job(request, call.sink(index), client, body.method, body.guesses, perf_counter() + seconds)
            call.jobs.append(job)
        try:
            self.engine.submit(call.jobs)
        except QueueFull as full:
            raise Refused(str(full), 429, code="queue_full", retry=full.retry_after) from full
        except EngineStopped as stopped:
            raise Refused(str(stopped), 503, code="stopped") from stopped
        except ValueError as error:
            raise Refused(str(error)) from error
        return call

    def _writer(
        self, name: str, chat: bool, shown: Shown, prompts: list[list[int]], reader: Callable[[], Reader] | None
    ) -> Writer:
        kind, model = "chatcmpl-" if chat else "cmpl-", self.settings.model_name
        guarantee = self.engine.decoder.guarantee
        return Writer(kind + name, int(time()), model, chat, guarantee, self.decode, shown, prompts, reader)

    def _requests(
        self, prompt: list[int], params: SamplingParams, mask: Callable[[], GrammarMask] | None, prefill_only: bool
    ) -> list[Request]:
        if params.seed is None:
            params = params.with_(seed=draw_seed() % 2**53)  # JSON numbers are exact up to there
        made = [
            replace(request, mask=mask() if mask else None, prefill_only=prefill_only)
            for request in self.llm.requests({"prompt_token_ids": prompt}, params)
        ]
        self.engine.decoder.check(made[0])  # the engine may hold shorter texts than the LLM
        return made

    async def _chat(self, body: ChatRequest) -> list[int]:
        try:
            messages = spelled_out(body.plain_messages)
        except ValueError as error:
            raise Refused(str(error), param="messages") from error
        tools = None if body.tool_choice == "none" else body.tools
        return await self.encode(messages, tools=tools, chat=body.chat_template_kwargs or {})

    def _encode(self, prompt: Any, tools: Any = None, chat: dict[str, Any] | None = None) -> list[int]:
        if not isinstance(prompt, list) or self.llm.tokenizer is None or not self.llm.tokenizer.chat_template:
            return self.llm.encode(prompt)
        reserved = inspect.signature(
            self.llm.tokenizer.apply_chat_template
        ).parameters  # a template of one's own among them
        options = {k: v for k, v in (chat or {}).items() if k not in reserved}
        try:
            encoded = self.llm.tokenizer.apply_chat_template(
                prompt, tools=tools, add_generation_prompt=True, return_dict=True, **options
            )
        except Exception as error:  # a template is a program and fails in its own ways
            raise ValueError(f"the model's chat template does not take these messages: {error}") from error
        return list(encoded["input_ids"])

    async def _grammar(self, body: Common, forced: Offer | None) -> Callable[[], GrammarMask] | None:
        """A maker of masks, one a text, if the request asks for a grammar, or for a call of a tool."""
        form, own = body.response_format, body.structured_outputs
        form = None if form is not None and form.type == "text" else form
        if own is None and form is None and forced is None:
            return None
        if sum(x is not None for x in (form, own, forced)) > 1:
            raise Refused(
                "response_format, structured_outputs and a tool_choice that asks for a call exclude each other"
            )
        if not available():
            raise Refused(
                "this server has no grammars; install them with: pip install 'outrider[grammar]'",
                param="tool_choice" if forced else "response_format",
            )

        def compiled() -> Callable[[], GrammarMask]:
            if self._grammars is None:
                self._grammars = Grammars(
                    self.llm.tokenizer, self.engine.decoder.target.vocab_size, self.llm.loaded.end_ids
                )
            grammars = self._grammars
            if forced is not None:
                made = grammars.tag(forced.grammar(self.tool_format or PLAIN))
            elif own is not None:
                asked = [x is not None for x in (own.json_, own.regex, own.choice)] + [bool(own.json_object)]
                if sum(asked) != 1:
                    raise ValueError("structured_outputs takes one of json, regex, choice and json_object")
                if own.regex is not None:
                    made = grammars.regex(own.regex)
                elif own.choice is not None:
                    made = grammars.choice(own.choice)
                else:
                    made = grammars.json() if own.json_ is None else grammars.schema(own.json_)
            else:
                assert form is not None
                given = form.json_schema.schema_ if form.json_schema else None
                if form.type == "json_schema" and given is None:
                    raise ValueError(
                        'response_format is {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
                    )
                made = grammars.json() if given is None else grammars.schema(given)
            return lambda: grammars.mask(made)

        return await self._try(self._compiler, compiled, COMPILE_TIMEOUT)

    async def _try(self, pool: ThreadPoolExecutor, act: Callable[[], T], timeout: float | None = None) -> T:
        """Run in a thread of a pool; what is wrong with the request becomes an answer."""
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, act), timeout)
        except TimeoutError:
            raise Refused("the grammar is too large to be compiled in time") from None
        except (ValueError, RecursionError) as error:
            raise Refused(str(error) or "nested too deeply") from error

    # -- answers ----------------------------------------------------------------------------------------------------

    async def whole(self, writer: Writer, call: Call, detailed: bool, prompts: int) -> dict[str, Any]:
        """Wait for all texts. Raises Refused where one could not be written."""
        with call:
            async for _, update in call.updates():
                if update.result is not None:
                    _check(update.result)
        results = [call.results[i] for i in range(len(call.jobs))]
        if all(r.output.finish_reason == "abort" and not r.output.token_ids for r in results):
            raise Refused(f"nothing was written: {results[0].output.stop_reason}", 503, code="aborted", retry=1)
        return writer.whole(results, detailed, prompts)

    async def stream(self, writer: Writer, call: Call, body: Common, prompts: int) -> AsyncIterator[bytes]:
        """Server-sent events, to the last one. Whoever reads them ends the call."""
        options, pace = body.stream_options, Pace(self.settings.pad_stream)
        late = set(range(len(call.jobs))) if writer.opens_late else set[int]()
        for index in range(len(call.jobs)):
            if index not in late and (chunk := writer.opening(index)):
                yield _event(chunk)
        offsets = [len(text) for text in writer.echoes]
        readers = [writer.reader() if writer.reader else None for _ in offsets]
        counts = [{"tokens": 0, "drafted": 0, "accepted": 0} for _ in offsets]
        try:
            async for index, update in call.updates():
                so_far, reader = counts[index], readers[index]
                if index in late:  # the first update comes when the prompt has been read
                    late.remove(index)
                    row = call.jobs[index].row
                    if chunk := writer.opening(index, row.prompt_logprobs if row else []):
                        yield _event(chunk)
                so_far["tokens"] += len(update.token_ids)
                so_far["drafted"] += update.drafted
                so_far["accepted"] += update.accepted
                for text, own in pace.cut(update, writer.shows_tokens):
                    for chunk in _chunks(writer, index, reader, text, own, offsets[index]):
                        if options and options.continuous_usage_stats:
                            chunk["so_far"] = so_far
                        await pace.tick()
                        yield _event(chunk)
                    offsets[index] += len(text)
                if update.result is not None:
                    _check(update.result)
                    for chunk in _chunks(writer, index, reader, "", None, offsets[index], last=True):
                        await pace.tick()
                        yield _event(chunk)
                    yield _event(writer.closing(index, update.result, reader is not None and reader.called > 0))
        except Refused as refused:
            yield _event(refused.body)
        else:
            if options and options.include_usage:
                results = [call.results[i] for i in range(len(call.jobs))]
                yield _event(writer.totals(results, bool(body.detailed_metrics), prompts))
        yield b"data: [DONE]\n\n"

    def close(self) -> None:
        self.engine.close()
        self._encoder.shutdown(cancel_futures=True)
        self._compiler.shutdown(wait=False, cancel_futures=True)


class Pace:
    """How a stream leaves. With an interval: one token an event, and every event on a tick of an even clock, so that
    neither size nor time tells how many guesses were accepted (arXiv 2411.01076)."""

    def __init__(self, interval: float | None) -> None:
        self.interval, self._start = interval, perf_counter()

    def cut(self, update: Update, tokens: bool = True) -> list[tuple[str, Update | None]]:
        """The texts of the events for an update, each with what it says of its tokens. tokens: ids or log-probabilities
        are shown, so a token without text needs an event, too."""
        if self.interval is None:
            return [(update.text, update)] if update.text or (tokens and update.token_ids) else []
        count = max(len(update.pieces), len(update.token_ids) if tokens else 0)
        pieces = [*update.pieces, *[""] * (count - len(update.pieces))]
        return [
            (piece, Update(piece, update.token_ids[i : i + 1], [piece], update.logprobs[i : i + 1]))
            for i, piece in enumerate(pieces)
        ]

    async def tick(self) -> None:
        if self.interval is not None:
            late = (perf_counter() - self._start) % self.interval
            await asyncio.sleep(self.interval - late)


def _chunks(
    writer: Writer, index: int, reader: Reader | None, text: str, own: Update | None, offset: int, last: bool = False
) -> list[dict[str, Any]]:
    """The chunks for a piece of a choice's text: what is content, then the calls that are complete with it."""
    content, calls = reader.feed(text, last) if reader else (text, [])
    tokens = own is not None and own.token_ids and writer.shows_tokens
    chunks = [writer.piece(index, content, own, offset)] if content or tokens else []
    first = reader.called - len(calls) if reader else 0
    return chunks + [writer.call(index, n, call) for n, call in enumerate(calls, first)]


def _check(result: Result) -> None:
    if result.output.finish_reason == "error":
        raise Refused(f"the text could not be written: {result.output.stop_reason}", 500, code="generation_failed")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + dumps(body) + b"\n\n"
