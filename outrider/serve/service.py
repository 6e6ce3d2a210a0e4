"""From HTTP requests to requests of the engine and to responses: tools, grammars, tokens, sampling parameters."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NamedTuple

from fastapi import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from outrider.core.extras import install
from outrider.core.infill import Infilling
from outrider.core.params import BadParameter, ContextOverflow, SamplingParams
from outrider.engine import Engine
from outrider.engine.decoder import draw_seed
from outrider.engine.fingerprint import Fingerprints
from outrider.engine.request import Request, Sequence
from outrider.serve.answer import Answer, ChoiceReader, Writer
from outrider.serve.connection import unless_gone
from outrider.serve.encoding import LONG, WIDE, Encoder
from outrider.serve.errors import Refused, called, json_response, refusing
from outrider.serve.grammar import Grammar, GrammarMask, Grammars, available
from outrider.serve.logs import log
from outrider.serve.options import ServeOptions
from outrider.serve.requests import ChatRequest, CommonRequest, CompletionRequest, ResponseFormat, StructuredOutputs
from outrider.serve.tools import (
    PLAIN,
    THOUGHT_TOKENS,
    ThinkingReader,
    ToolCallReader,
    ToolFormat,
    ToolOffer,
    chosen,
    thinks,
)

MaskMaker = Callable[[], GrammarMask]


class ToolUse(NamedTuple):
    """What tools change in an answer."""

    forced: ToolOffer | None = None  # the tools of which one must be called
    reader: Callable[[], ToolCallReader] | None = None  # makes a reader of calls
    special: bool = False  # readers must see special tokens


class Service:
    """An engine behind the protocols.

    Args:
        engine: writes the texts.
        settings: of the server.
        notes: what the user should know of the model.
        chats: it has a chat template of its own.
        caches: bytes that keys, values and prefixes may take.
    """

    def __init__(
        self, engine: Engine, settings: ServeOptions, notes: Iterable[str] = (), chats: bool = True, caches: int = 0
    ) -> None:
        self.engine, self.runtime, self.settings = engine, engine.runtime, settings
        self.notes, self.chats, self.caches = notes, chats, caches
        self.prompts = self.runtime.prompts
        self._told_of_tools = False
        self.tokens = engine.decoder.tokens
        self.encoder = Encoder(self.prompts, engine.decoder.max_length, settings.model_name)

    async def respond(
        self,
        body: CompletionRequest | ChatRequest,
        request: HttpRequest,
        make: Callable[[Answer, Service], Writer],
    ) -> Response:
        """The response to a body: whole, or as a stream. make: as of `accept`. Raises Refused."""
        state = request.state
        client = body.user or state.owner
        writer = await self.accept(body, make, state.request_id, client, state.owner, state.waited)
        state.ends.enter_context(writer.answer)
        headers = {"x-outrider-guarantee": writer.answer.guarantee}
        if body.stream:
            headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
            pad = self.settings.pad_stream
            events = writer.stream(None if pad is None else pad / 1000)
            return StreamingResponse(events, headers=headers, media_type=writer.media_type)
        return json_response(await unless_gone(request.receive, writer.whole()), headers=headers)

    async def accept(
        self,
        body: CompletionRequest | ChatRequest,
        make: Callable[[Answer, Service], Writer],
        request_id: str,
        client: str,
        owner: str = "",
        waited: float = 0.0,
    ) -> Writer:
        """Check a request and queue its texts. Returns what writes the answer.

        Args:
            body: what is asked.
            make: what writes the answer. It runs beside the event loop, because it may work on the whole prompt.
            request_id: the name of the HTTP request.
            client: as in `Request`.
            owner: as in `Request`.
            waited: seconds of its time that are over.

        Raises Refused for what the server cannot answer.
        """
        with called(body.called, body.renamed):
            with refusing():
                tools = self._tools(body)
                params = body.params()
            if tools.special:
                params = params.with_(skip_special_tokens=False)
            mask = await self._grammar(body, tools.forced)
            if body.return_fingerprint and (mask or body.limit == 0):
                raise Refused(
                    "a text with a grammar or a forced tool call has no fingerprint, nor has a prompt without a text; "
                    "leave out return_fingerprint"
                )
            prompts, ends = await self._prompts(body)
            if ends:
                params = params.with_(stop_token_ids=[*params.stop_token_ids, *ends])
            before = _continued(body, len(prompts) * params.n)
            if body.max_total_tokens is not None:
                params = self._within(params, body.max_total_tokens, max(map(len, prompts)))
            seconds = min(body.timeout or math.inf, self.settings.request_timeout) - waited
            wishes = {
                "client": client,
                "owner": owner,
                "prefill_only": body.limit == 0,
                "method": body.method,
                "num_speculative_tokens": body.depth,
                "deadline": perf_counter() + seconds,
            }
            loop = asyncio.get_running_loop()

            def begin() -> Writer:
                """Beside the event loop, because all of it grows with the request."""
                requests = self._requests(prompts, before, params, mask, wishes)
                if self.settings.log_prompts:
                    log.info("%s asks %s", request_id, [self.tokens.decode(p) for p in prompts])
                if body.return_fingerprint:
                    _ = self.fingerprints  # to make it reads the model's files
                choice = partial(self._choice, body, tools)
                return make(Answer(self.engine, requests, body, loop, request_id, choice), self)

            words = sum(map(len, body.bad_words or ())) + len(params.prediction or ())
            size = LONG + 1 if body.return_fingerprint else sum(map(len, prompts)) * params.n + words
            return await self.encoder.run(begin, size)

    @property
    def template(self) -> Any:
        """The model's chat templates, or None."""
        template = getattr(self.encoder.tokenizer, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None if that is not known."""
        return chosen(self.settings.tool_call_parser, str(self.template or ""))

    def close(self) -> None:
        """End the engine and the threads."""
        self.engine.close()
        self.encoder.close()

    def _tools(self, body: CommonRequest) -> ToolUse:
        """What a request offers, and how its calls are read."""
        offer, form = body.offer, self.tool_format
        if offer is not None and form is None and not offer.forced and not self._told_of_tools:
            self._told_of_tools = True
            log.warning(
                "a request offers tools, and the chat template of %s has no tool calls, so the answers are texts. A call is made "
                'where tool_choice is "required" or names a function',
                self.settings.model_name,
            )
        if offer is None or (form is None and not offer.forced):
            return ToolUse()
        form = form or PLAIN
        specials = [] if self.encoder.tokenizer is None else list(self.encoder.tokenizer.all_special_tokens)
        special = form.opening in specials and not form.bare
        hidden = specials if special and body.skip_special_tokens is not False else []
        reader = partial(ToolCallReader, form, offer.names, hidden, offer.many)
        return ToolUse(offer if offer.forced else None, reader, special)

    async def _prompts(self, body: CompletionRequest | ChatRequest) -> tuple[list[list[int]], tuple[int, ...]]:
        """The prompts of a request, and the tokens that end an answer beside the model's own. Raises Refused."""
        if body.is_chat:
            return [await self.encoder.chat(body)], ()
        if not body.prompts:
            raise Refused("prompt is an empty list", param="prompt")
        if body.suffix:
            return await self._infilled(body.prompts, body.suffix)
        return [p if isinstance(p, list) else await self.encoder.prompt(p) for p in body.prompts], ()

    async def _infilled(self, prompts: list[Any], suffix: str) -> tuple[list[list[int]], tuple[int, ...]]:
        """The prompts of gaps before one suffix, and the tokens that end an answer. Raises Refused."""
        form = self.infilling
        if form is None:
            raise Refused(
                "this model was not trained to fill in the middle: its tokenizer has no tokens for it; leave out suffix, or "
                "serve a model such as Qwen2.5-Coder",
                param="suffix",
            )
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise Refused("beside a suffix the prompt is a text, not token ids", param="prompt")
        run = self.encoder.run
        return [await run(partial(form.prompt, p, suffix), len(p) + len(suffix), "suffix") for p in prompts], form.ends

    @cached_property
    def infilling(self) -> Infilling | None:
        """How the model fills a gap; None if it does not."""
        return Infilling.of(self.prompts.tokenizer)

    def _within(self, params: SamplingParams, total: int, prompt: int) -> SamplingParams:
        """The parameters, with no more tokens than fit behind a prompt. Raises Refused if none fits."""
        total = min(total, self.engine.decoder.max_length)
        with refusing("max_total_tokens"):
            if prompt >= total:
                raise ContextOverflow(prompt, total)
            return params.with_(max_tokens=min(params.max_tokens or total, total - prompt))

    def _choice(self, body: CommonRequest, tools: ToolUse, place: int, sequence: Sequence) -> ChoiceReader:
        """What reads a text of an answer."""
        thoughts = None
        if body.tells_thoughts and thinks(self.template):
            thoughts = ThinkingReader(self.tokens.decode(sequence.prompt[-THOUGHT_TOKENS:]))
        shows_tokens = bool(body.return_token_ids) or body.alternatives is not None
        return ChoiceReader(place, sequence, shows_tokens, tools.reader and tools.reader(), thoughts)

    @cached_property
    def fingerprints(self) -> Fingerprints:
        """What makes the fingerprints of texts. To make it reads the model's files."""
        return Fingerprints(self.runtime, self.settings.model_name)

    def _requests(
        self,
        prompts: list[list[int]],
        before: list[list[int]],
        params: SamplingParams,
        mask: MaskMaker | None,
        wishes: dict[str, Any],
    ) -> list[Request]:
        """The engine's requests, params.n for each prompt. before: the tokens that each continues. wishes: fields of all of them.

        Raises ValueError for what cannot be encoded.
        """
        requests, room = list[Request](), WIDE * self.engine.decoder.max_length
        if isinstance(params.prediction, str):  # what cannot be written is never drafted
            params = params.with_(prediction=params.prediction[:room])
        for prompt in prompts:
            drawn = params if params.seed is not None else params.with_(seed=draw_seed() % 2**53)  # exact in JSON
            requests += self.prompts.requests(prompt, drawn, **wishes)
            if len(prompts) > 1:  # as token ids they need not be encoded again
                params = params.with_(bad_words=list(requests[0].bad_words), prediction=requests[0].prediction or None)
        if before:
            requests = [replace(r, continued=tuple(tokens)) for r, tokens in zip(requests, before, strict=True)]
        if mask is None:
            return requests
        if any(not mask().allowed(tokens, 0, ()).any() for tokens in before):
            raise BadParameter(
                "continued_tokens break the grammar; continue a text with the one that it began with",
                "continued_tokens",
            )
        return [replace(request, mask=mask()) for request in requests]

    async def _grammar(self, body: CommonRequest, forced: ToolOffer | None) -> MaskMaker | None:
        """A maker of masks, one for each text; None for a request without a grammar or a forced tool call. Raises Refused."""
        form, outputs = body.response_format, body.structured_outputs
        form = None if form is None or form.type == "text" else form
        asked = sum(x is not None for x in (form, outputs, forced))
        if not asked:
            return None
        if asked > 1:
            raise Refused(
                "response_format, structured_outputs and a tool_choice that asks for a call exclude each other",
                param="structured_outputs" if outputs else "tool_choice",
            )
        if not available():
            raise Refused(
                f"this server has no grammars; for the next start: {install('grammar')}",
                param="tool_choice" if forced else "response_format",
            )
        param = "tools" if forced else "structured_outputs" if outputs else "response_format"
        make = partial(self._asked, form, outputs, forced)
        matcher = await self.encoder.run(lambda: self._grammars.compiled(make()), LONG + 1, param)
        return partial(self._grammars.mask, matcher)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.prompts.tokenizer, self.engine.decoder.target.vocab_size, self.runtime.loaded.end_ids)

    def _asked(
        self, form: ResponseFormat | None, outputs: StructuredOutputs | None, forced: ToolOffer | None
    ) -> Grammar:
        """The grammar of the one of the three that is given. Raises ValueError for one that is not valid."""
        if forced is not None:
            return Grammar.tools(forced.grammar(self.tool_format or PLAIN), [forced.tools[n] for n in forced.names])
        if outputs is not None:
            kinds = outputs.json_, outputs.regex, outputs.choice, outputs.json_object or None
            if sum(kind is not None for kind in kinds) != 1:
                raise ValueError("structured_outputs takes one of json, regex, choice and json_object")
            if outputs.regex is not None:
                return Grammar.regex(outputs.regex)
            if outputs.choice is not None:
                return Grammar.choice(outputs.choice)
            return Grammar.schema(outputs.json_)
        assert form is not None
        schema = form.json_schema.schema_ if form.json_schema else None
        if form.type == "json_schema" and schema is None:
            raise ValueError(
                'response_format is {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            )
        return Grammar.schema(schema)


def _continued(body: CommonRequest, count: int) -> list[list[int]]:
    """The answer so far of each choice; nothing where all are new. count: choices. Raises Refused for another number of them."""
    continued = body.continued_tokens
    if continued is None:
        return []
    before = [x for x in continued if isinstance(x, list)] or [[x for x in continued if isinstance(x, int)]]
    if len(before) != count:
        raise Refused(
            f"continued_tokens has {len(before)} lists of token ids, and the request asks for {count} texts",
            param="continued_tokens",
        )
    return before
