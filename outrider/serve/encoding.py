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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from outrider.core.child import give_way
from outrider.core.rendering import renderer
from outrider.engine.llm import LLM
from outrider.serve.bodies import check_body
from outrider.serve.errors import Refused
from outrider.serve.lanes import Lanes
from outrider.serve.openai.tools import for_template

T = TypeVar("T")
LONG = 16 << 10  # characters; what has more is long work
WIDE = 32  # characters for each token that fits; text with more is looked at in part first
MAX_TOKENIZE = 256 << 10  # characters of /tokenize, if the model holds less


class Encoder:
    """The tokenizer and the chat template of a model. max_length: tokens that it holds."""

    def __init__(self, llm: LLM, max_length: int, name: str) -> None:
        """name: by which clients call the model. Its own name, which may be a path, is in no answer."""
        self.llm, self.max_length, self.name = llm, max_length, name
        self._short = self._long = ThreadPoolExecutor(1, "outrider-encode")
        if getattr(llm.tokenizer, "is_fast", False):  # others are not safe in two threads at once
            self._long = ThreadPoolExecutor(1, "outrider-encode-long", give_way)
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of its own would not give way
            llm.encode("x")  # the first call may change settings
        usual = llm.tokenizer is not None and _renders_as_usual(llm.tokenizer)
        self._renderers = Lanes("outrider-template", renderer) if usual else None

    def start(self) -> None:
        """Start now what the first chat needs."""
        if self._renderers is not None and self.llm.tokenizer and self.llm.tokenizer.chat_template:
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
        if not isinstance(given, str):
            return await self.run(lambda: self.llm.encode(given), len(given.get("prompt_token_ids", ())), "prompt")

        def act() -> list[int]:
            self._check(given, most)
            return self.llm.encode(given)

        return await self.run(act, len(given), "prompt")

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        variables: dict[str, Any] | None = None,
        most: int | None = None,
        goes_on: bool = False,
    ) -> list[int]:
        """The ids of chat messages. variables: of the template. goes_on: the answer continues the text
        of the last message. Raises Refused."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            return await self.run(lambda: self.llm.encode(for_template(messages)), LONG + 1, "messages")
        template = tokenizer.apply_chat_template
        for name in variables or ():  # they are variables of the template, never arguments of the function
            if name == "messages" or name in inspect.signature(template).parameters:
                message = f"chat_template_kwargs cannot set {name!r}, which the server sets; leave it out"
                raise Refused(message, param="chat_template_kwargs")
        given = {"tools": tools, "add_generation_prompt": not goes_on, **(variables or {})}
        made = await self.run(lambda: for_template(messages, check_body), param="messages")
        if self._renderers is None:  # the tokenizer has code of its own in place of a template

            def apply() -> list[int]:
                with _of_template():
                    ids = template(made, tokenize=True, return_dict=True, continue_final_message=goes_on, **given)
                    return list(ids["input_ids"])

            return await self.run(apply, param="messages")
        mark = f"[{secrets.token_hex(8)}]"
        if goes_on:
            made = [*made[:-1], {**made[-1], "content": made[-1]["content"] + mark}]
        question = {"chat_template": tokenizer.get_chat_template(None, tools), "messages": made}
        question |= {name: _text(value) for name, value in tokenizer.special_tokens_map.items()} | given
        try:
            with _of_template():
                text = await self._renderers.ask(lambda child, seconds: child.ask(question, seconds))
            text = _up_to(text, mark) if goes_on else text
        except ValueError as error:
            raise self._refused(error, "messages") from error

        def act() -> list[int]:
            self._check(text, most)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        return await self.run(act, len(text), "messages")

    @property
    def most_tokenized(self) -> int:
        """Characters that `/tokenize` takes."""
        return max(MAX_TOKENIZE, WIDE * self.max_length)

    def close(self) -> None:
        """End the threads and the children."""
        for pool in (self._short, self._long):
            pool.shutdown(cancel_futures=True)
        if self._renderers is not None:
            self._renderers.close()

    def _refused(self, error: Exception, param: str | None) -> Refused:
        said = str(error).replace(self.llm.loaded.name, self.name)
        return Refused(said or "nested too deeply", param=getattr(error, "name", param))

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        vocab = getattr(self.llm.tokenizer, "get_vocab", None)
        return max(map(len, vocab()), default=1) if vocab is not None else sys.maxsize

    def _check(self, text: str, most: int | None) -> None:
        """Raise ValueError for a text with too many characters, or one that cannot fit. Encodes little of it."""
        if self.llm.tokenizer is None:
            return
        if most is not None:
            if len(text) > most:
                raise ValueError(
                    f"the text has {len(text)} characters, and {most} are encoded at once; send it in parts"
                )
            return
        room = self.max_length
        if len(text) <= room:
            return
        too_long = f"the prompt has {len(text)} characters and the model holds {room} tokens; shorten it"
        if len(text) > room * self._longest:
            raise ValueError(f"{too_long}. No token has more than {self._longest} characters")
        if len(text) > WIDE * room and len(self.llm.encode(text[: WIDE * room // 2])) > 2 * room:
            raise ValueError(f"{too_long}. Its first half alone does not fit")


@contextmanager
def _of_template() -> Iterator[None]:
    """Say of an error that the template raised it: a template is a program and fails in its own ways."""
    try:
        yield
    except ChildProcessError:
        raise
    except Exception as error:
        raise ValueError(f"the model's chat template does not take these messages: {error!s:.500}") from error


def _up_to(text: str, mark: str) -> str:
    """A rendered chat up to a mark that ended its last message. Raises ValueError."""
    kept, found, _ = text.partition(mark)
    if not found:
        raise ValueError("the answer cannot go on from the last message, because the template leaves that message out")
    return kept


def _renders_as_usual(tokenizer: Any) -> bool:
    """False for a tokenizer whose class makes tokens of messages in a way of its own."""
    own = getattr(type(tokenizer), "apply_chat_template", None)
    return getattr(own, "__module__", "") == "transformers.tokenization_utils_base"


def _text(token: Any) -> Any:
    return [str(each) for each in token] if isinstance(token, list) else str(token)
