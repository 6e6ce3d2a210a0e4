"""From HTTP requests to requests of the engine: models, tools, grammars, tokens, sampling parameters."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from time import time
from typing import Any

from outrider.core.compiling import compiler
from outrider.core.extras import install
from outrider.core.grammar import Grammar, GrammarMask, Grammars, available
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.engine.decoder import draw_seed
from outrider.engine.llm import LLM
from outrider.engine.request import Request
from outrider.serve.dashboard.trial import OFF, Trials
from outrider.serve.encoding import WIDE, Encoder
from outrider.serve.errors import Refused
from outrider.serve.lanes import SECONDS, Lanes
from outrider.serve.logs import log
from outrider.serve.openai.pending import PendingAnswer
from outrider.serve.openai.protocol import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    ResponseFormat,
    StructuredOutputs,
    plain,
)
from outrider.serve.openai.responses import ResponseWriter, Shown
from outrider.serve.openai.tools import PLAIN, ToolCallReader, ToolFormat, ToolOffer, chosen, offered
from outrider.serve.options import ServeOptions

MaskMaker = Callable[[], GrammarMask]
MAX_COMPILING = 16  # grammars that wait


class Service:
    """An engine behind OpenAI's API."""

    def __init__(self, llm: LLM, engine: Engine, settings: ServeOptions) -> None:
        self.llm, self.engine, self.settings = llm, engine, settings
        self.started = int(time())
        self.trials = Trials(engine)
        self._grammars: Grammars | None = None
        self._compiling, self._first = 0, Lock()  # grammars that wait; for the first of them
        self._compilers = Lanes("outrider-grammar", lambda: compiler(self._known_grammars().info))
        self.encoder = Encoder(llm, engine.decoder.max_length, settings.model_name)

    def decode(self, tokens: abc.Sequence[int]) -> str:
        """The text of token ids; empty without a tokenizer."""
        return "" if self.llm.tokenizer is None else self.llm.tokenizer.decode(list(tokens))

    def check_model(self, name: str | None) -> None:
        """Raise Refused for a model that is not served."""
        if name is not None and name not in (self.settings.model_name, *self.settings.aliases):
            raise Refused(
                f"there is no model {name[:80]!r} here; this server has {self.settings.model_name!r}",
                404,
                param="model",
                code="model_not_found",
            )

    async def accept(
        self, body: CompletionRequest | ChatRequest, request_id: str, client: str, owner: str = ""
    ) -> PendingAnswer:
        """Check a request and queue its texts. client, owner: as in `Request`.

        Raises Refused for what the server cannot answer.
        """
        self.check_model(body.model)
        offer, reader, special = self._tools(body)
        mask = await self._grammar(body, offer if offer and offer.forced else None)
        if isinstance(body, ChatRequest):
            prompts = [await self._chat(body)]
            max_tokens, logprobs = body.max_completion_tokens or body.max_tokens, body.alternatives
            shown = Shown(logprobs, token_ids=bool(body.return_token_ids), details=bool(body.detailed_metrics))
        else:
            given = body.prompts
            if not given:
                raise Refused("prompt is an empty list", param="prompt")
            if len(given) * (body.n or 1) > self.settings.max_choices:
                raise Refused(f"one request may ask for {self.settings.max_choices} texts here", param="n")
            prompts = [await self.encoder.prompt(p) for p in given]
            max_tokens, logprobs = 16 if body.max_tokens is None else body.max_tokens, body.logprobs
            echo, ids, details = bool(body.echo), bool(body.return_token_ids), bool(body.detailed_metrics)
            shown = Shown(logprobs, body.prompt_logprobs, echo, ids, details)
        if (body.n or 1) > self.settings.max_choices:
            raise Refused(f"n is at most {self.settings.max_choices} here, got {body.n}", param="n")
        depth, limit = body.depth, self.settings.max_speculative_tokens
        if depth is not None and depth > limit:
            raise Refused(f"num_speculative_tokens is at most {limit} here", param="num_speculative_tokens")
        try:
            params = body.params(max_tokens or None, logprobs, self.settings).with_(prompt_logprobs=shown.of_prompt)
            params = params.with_(skip_special_tokens=params.skip_special_tokens and not special)
        except ValueError as error:
            raise Refused(str(error), param=getattr(error, "name", None)) from error
        prompts, before = _continued(body, prompts, params.n)
        chat = isinstance(body, ChatRequest)

        def begin() -> tuple[list[Request], ResponseWriter]:
            wishes = {"client": client, "owner": owner, "method": body.method, "num_speculative_tokens": depth}
            wishes["prefill_only"] = max_tokens == 0
            requests = self._requests(prompts, before, params, mask, wishes)
            if self.settings.log_prompts:
                log.info("%s asks %s", request_id, [self.decode(p) for p in prompts])
            return requests, ResponseWriter(
                ("chatcmpl-" if chat else "cmpl-") + request_id,
                int(time()),
                self.settings.model_name,
                chat,
                self.engine.decoder.guarantee,
                self.decode,
                shown,
                [request.prompt for request in requests],
                params.n,
                reader,
            )

        told = sum(map(len, body.bad_words or ())) + len(params.prediction or ())
        size = told + sum(map(len, prompts)) * params.n
        requests, writer = await self.encoder.run(begin, size)
        pending = PendingAnswer(self.engine, writer)
        seconds = min(body.timeout or math.inf, self.settings.request_timeout)
        trial, arm = self.trials.current, None
        if trial is not None and depth is None and body.method is None and (arm := trial.arm()) is not None:
            trial.assign(arm, requests)
            if arm == OFF:
                requests = [replace(request, num_speculative_tokens=0) for request in requests]
        try:
            await self.encoder.run(lambda: pending.submit(requests, seconds), size)
        except Refused:
            if trial is not None and arm is not None:
                trial.drop(requests)
            raise
        return pending

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None if that is not known."""
        return chosen(self.settings.tool_call_parser, getattr(self.llm.tokenizer, "chat_template", None))

    def close(self) -> None:
        """End the engine and the threads."""
        self.engine.close()
        self.encoder.close()
        self._compilers.close()

    def _tools(self, body: CommonRequest) -> tuple[ToolOffer | None, Callable[[], ToolCallReader] | None, bool]:
        """The tools on offer, a maker of readers for their calls, and whether those must see special tokens."""
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
        return offer, lambda: ToolCallReader(form, offer.names, hidden), special

    def _requests(
        self,
        prompts: list[list[int]],
        before: list[list[int]],
        params: SamplingParams,
        mask: MaskMaker | None,
        wishes: dict[str, Any],
    ) -> list[Request]:
        """The engine's requests, params.n for each prompt. before: the tokens that each continues. wishes: fields of all of them.

        Raises ValueError for what the model cannot do.
        """
        made, room = list[Request](), WIDE * self.engine.decoder.max_length
        if isinstance(
            params.prediction, str
        ):  # only drafts are made of it, and what cannot be written is never drafted
            params = params.with_(prediction=params.prediction[:room])
        for prompt in prompts:
            drawn = params if params.seed is not None else params.with_(seed=draw_seed() % 2**53)  # exact in JSON
            made += self.llm.requests({"prompt_token_ids": prompt}, drawn)
            # as token ids they need not be encoded again
            params = params.with_(bad_words=list(made[0].bad_words), prediction=made[0].prediction or None)
        made = [
            replace(r, mask=mask() if mask else None, continued=tuple(tokens), **wishes)
            for r, tokens in zip(made, before, strict=True)
        ]
        for number, request in enumerate(made):  # the engine may hold shorter texts than the LLM
            if request.continued:
                self.engine.decoder.checker(request)
            elif number % params.n == 0:
                self.engine.decoder.check(request)
        return made

    async def _chat(self, body: ChatRequest) -> list[int]:
        tools = None if body.tool_choice == "none" else body.tools
        return await self.encoder.chat(lambda: plain(body.messages), tools, body.chat_template_kwargs)

    async def _grammar(self, body: CommonRequest, forced: ToolOffer | None) -> MaskMaker | None:
        """A maker of masks, one for each text, if the request asks for a grammar or forces a tool call."""
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
                f"this server has no grammars; for the next start: {install('grammar')}",
                param="tool_choice" if forced else "response_format",
            )
        param = "tools" if forced else "structured_outputs" if own else "response_format"
        grammar = await self.encoder.run(lambda: self._asked(form, own, forced), param=param)
        made = self._grammars and self._grammars.known(grammar)
        if made is None:
            if self._compiling >= MAX_COMPILING:
                message = f"{MAX_COMPILING} grammars wait to be compiled, which is all that the server takes"
                raise Refused(message, 429, code="queue_full", retry=int(SECONDS[-1]))
            self._compiling += 1
            try:
                made = await self._compilers.ask(lambda *lane: self._known_grammars().compiled(grammar, *lane))
            except ValueError as error:
                raise Refused(str(error), param=param) from error
            finally:
                self._compiling -= 1
        grammars = self._grammars
        assert grammars is not None
        return lambda: grammars.mask(made)

    def _known_grammars(self) -> Grammars:
        with self._first:
            if self._grammars is None:
                vocab_size = self.engine.decoder.target.vocab_size
                self._grammars = Grammars(self.llm.tokenizer, vocab_size, self.llm.loaded.end_ids)
            return self._grammars

    def _asked(self, form: ResponseFormat | None, own: StructuredOutputs | None, forced: ToolOffer | None) -> Grammar:
        """The grammar of the one of the three that is given. Raises ValueError for one that is not valid."""
        if forced is not None:
            return Grammar.tag(forced.grammar(self.tool_format or PLAIN), [forced.tools[n] for n in forced.names])
        if own is not None:
            if sum([own.json_ is not None, own.regex is not None, own.choice is not None, bool(own.json_object)]) != 1:
                raise ValueError("structured_outputs takes one of json, regex, choice and json_object")
            if own.regex is not None:
                return Grammar.regex(own.regex)
            if own.choice is not None:
                return Grammar.choice(own.choice)
            return Grammar.json() if own.json_ is None else Grammar.schema(own.json_)
        assert form is not None
        given = form.json_schema.schema_ if form.json_schema else None
        if form.type == "json_schema" and given is None:
            raise ValueError(
                'response_format is {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            )
        return Grammar.json() if given is None else Grammar.schema(given)


def _continued(body: CommonRequest, prompts: list[list[int]], n: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts without tokens of answers, and the answer so far of each choice. Raises Refused if they do not fit."""
    given, count = body.continued_tokens, len(prompts) * n
    if given is None:
        return prompts, [[] for _ in range(count)]

    def refuse(message: str) -> Refused:
        return Refused(message, param="continued_tokens")

    if isinstance(given, int):
        ids = isinstance(body, CompletionRequest) and all(isinstance(p, dict) for p in body.prompts)
        if not ids:
            raise refuse(
                "continued_tokens as a number counts token ids at the end of a prompt of token ids; "
                "beside a text or messages, send the ids: continued_tokens=[...]"
            )
        if n > 1:
            raise refuse(f"{n} texts of one prompt have {n} answers; send a list of token ids for each")
        if not 0 <= given < min(map(len, prompts)):
            raise refuse(
                f"the shortest prompt has {min(map(len, prompts))} tokens, so {given} cannot be answer already"
            )
        cut = [len(prompt) - given for prompt in prompts]
        return [p[:at] for p, at in zip(prompts, cut, strict=True)], [
            p[at:] for p, at in zip(prompts, cut, strict=True)
        ]
    lists = [list(x) for x in given if isinstance(x, list)] or [[x for x in given if isinstance(x, int)]]
    if len(lists) != count:
        raise refuse(f"continued_tokens has {len(lists)} lists of token ids, and the request asks for {count} texts")
    return prompts, lists
