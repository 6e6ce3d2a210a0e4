"""From prompts to token ids, beside the event loop and within limits.

Short work has a thread of its own, so that it never waits for a long prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import sys
from collections import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from outrider.core.child import give_way
from outrider.core.params import ContextOverflow
from outrider.core.rendering import renderer
from outrider.engine.llm import LLM
from outrider.serve.bodies import check_body
from outrider.serve.errors import Refused
from outrider.serve.lanes import Lanes
from outrider.serve.openai.protocol import ChatRequest
from outrider.serve.openai.tools import for_template

T = TypeVar("T")
LONG = 16 << 10  # characters; what has more is long work
WIDE = 32  # characters for each token that fits; text with more is looked at in part first


class Encoder:
    """The tokenizer and the chat template of a model. max_length: tokens that it holds."""

    def __init__(self, llm: LLM, max_length: int, name: str) -> None:
        """name: by which clients call the model. Its own name, which may be a path, is in no answer."""
        self.llm, self.max_length, self.name, self.tokenizer = llm, max_length, name, llm.tokenizer
        self._short = self._long = ThreadPoolExecutor(1, "outrider-encode")
        if getattr(self.tokenizer, "is_fast", False):  # others are not safe in two threads at once
            self._long = ThreadPoolExecutor(1, "outrider-encode-long", give_way)
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of its own would not give way
            llm.encode("x")  # the first call may change settings
        usual = self.tokenizer is not None and _renders_as_usual(self.tokenizer)
        self._renderers = Lanes("outrider-template", renderer) if usual else None

    def start(self) -> None:
        """Start now what the first chat needs."""
        if self._renderers is not None and self.tokenizer is not None and self.tokenizer.chat_template:
            self._renderers.start()

    async def run(self, act: Callable[[], T], size: int = 0, param: str | None = None) -> T:
        """Run in a thread. size: characters, or tokens, that it works on. A ValueError becomes Refused, for a parameter."""
        pool = self._long if size > LONG else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, act)
        except (ValueError, RecursionError) as error:
            raise self._refused(error, param) from error

    async def prompt(self, given: str | abc.Mapping[str, Any], most: int | None = None) -> list[int]:
        """The ids of a text or of {"prompt_token_ids": ...}. most: characters of a text; None: what the model can hold.

        Raises Refused.
        """
        if isinstance(given, str):
            return await self.run(partial(self._ids, given, most), len(given), "prompt")
        return await self.run(lambda: self.llm.encode(given), len(given.get("prompt_token_ids", ())), "prompt")

    async def chat(self, body: ChatRequest, most: int | None = None) -> list[int]:
        """The ids of a chat. most: as of `prompt`. Raises Refused."""
        messages, goes_on, tokenizer = body.messages, bool(body.continue_final_message), self.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            return await self.run(lambda: self.llm.encode(for_template(messages)), LONG + 1, "messages")
        template = tokenizer.apply_chat_template
        thought = _thinking(body.reasoning_effort, str(tokenizer.chat_template))
        variables = thought | (body.chat_template_kwargs or {})
        for name in variables:  # they are variables of the template, never arguments of the function
            if name == "messages" or name in inspect.signature(template).parameters:
                message = f"chat_template_kwargs cannot set {name!r}, which the server sets; leave it out"
                raise Refused(message, param="chat_template_kwargs")
        prompted = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
        given = {"tools": body.tools_shown, "add_generation_prompt": prompted, **variables}
        made = await self.run(lambda: for_template(messages, check_body), param="messages")
        mark = f"[{secrets.token_hex(8)}]"  # ends the last message, so that what the template writes after it can go
        try:
            if self._renderers is None:  # the tokenizer has code of its own in place of a template
                apply = partial(
                    template, made, tokenize=True, return_dict=True, continue_final_message=goes_on, **given
                )
                ids = await asyncio.get_running_loop().run_in_executor(self._short, apply)
                return list(ids["input_ids"])
            if goes_on:
                made = [*made[:-1], {**made[-1], "content": made[-1]["content"] + mark}]
            question = {"chat_template": tokenizer.get_chat_template(None, body.tools_shown), "messages": made}
            question |= self._special_tokens | given
            text = await self._renderers.ask(lambda child, seconds: child.ask(question, seconds))
        except ChildProcessError:
            raise
        except Exception as error:  # a template is a program and fails in its own ways
            why = ValueError(f"the model's chat template does not take these messages: {error!s:.500}")
            raise self._refused(why, "messages") from error
        if goes_on:
            text, found, _ = text.partition(mark)
            if not found:
                why = "the answer cannot go on from the last message, because the template leaves that message out"
                raise Refused(why, param="messages")
        return await self.run(partial(self._ids, text, most, False), len(text), "messages")

    def close(self) -> None:
        """End the threads and the children."""
        for pool in (self._short, self._long):
            pool.shutdown(cancel_futures=True)
        if self._renderers is not None:
            self._renderers.close()

    def _refused(self, error: Exception, param: str | None) -> Refused:
        refused = Refused.of(error, param)
        refused.message = refused.message.replace(self.llm.loaded.name, self.name) or "nested too deeply"
        return refused

    @cached_property
    def _special_tokens(self) -> dict[str, Any]:
        """As variables of templates."""
        named = (self.tokenizer and self.tokenizer.special_tokens_map) or {}
        return {k: [str(each) for each in v] if isinstance(v, list) else str(v) for k, v in named.items()}

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        vocab = getattr(self.tokenizer, "get_vocab", None)
        return max(map(len, vocab()), default=1) if vocab is not None else sys.maxsize

    def _ids(self, text: str, most: int | None, special: bool = True) -> list[int]:
        """The ids of a text. special: with those that the model's prompts begin with. Raises ValueError for a text with too many
        characters, or one that cannot fit, and encodes little of it."""
        room, tokenizer = self.max_length, self.tokenizer
        if tokenizer is None:
            return self.llm.encode(text)
        if most is not None and len(text) > most:
            raise ValueError(f"the text has {len(text)} characters, and {most} are encoded at once; send it in parts")
        if most is None and len(text) > room:
            if len(text) > room * self._longest:
                raise ContextOverflow(-(-len(text) // self._longest), room)
            if len(text) > WIDE * room and len(self.llm.encode(text[: WIDE * room // 2])) > 2 * room:
                raise ContextOverflow(2 * room, room)
        return self.llm.encode(text) if special else list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _thinking(effort: str | None, template: str) -> dict[str, Any]:
    """The variables with which a template lets its model think, or keeps it from it. None leaves it to the template."""
    known: dict[str, Any] = {} if effort is None else {"enable_thinking": effort != "none"}
    if effort not in (None, "none"):
        known["reasoning_effort"] = effort
    return {name: value for name, value in known.items() if name in template}


def _renders_as_usual(tokenizer: Any) -> bool:
    """False for a tokenizer whose class makes tokens of messages in a way of its own."""
    own = getattr(type(tokenizer), "apply_chat_template", None)
    return getattr(own, "__module__", "") == "transformers.tokenization_utils_base"
