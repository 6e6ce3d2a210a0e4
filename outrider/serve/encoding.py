"""From prompts to token ids, beside the event loop and within limits.

Short work has a thread of its own, so that it never waits for a long prompt.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from outrider.core.params import ContextOverflow
from outrider.engine.prompts import PromptEncoder
from outrider.models.chat_template import chat_prompt
from outrider.serve.errors import Refused
from outrider.serve.requests import ChatRequest, check_body

T = TypeVar("T")
LONG = 16 << 10  # characters; what has more is long work
# Variables of a template that a request cannot set: it says them in fields of its own, or they are arguments of `chat_prompt`.
RESERVED = frozenset(
    ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "tokenizer", "continued", "check"]
)
WIDE = 32  # characters for each token that fits; text with more is looked at in part first


class Encoder:
    """The tokenizer and the chat template of a model. max_length: tokens that it holds."""

    def __init__(self, prompts: PromptEncoder, max_length: int, name: str) -> None:
        """name: by which clients call the model. Its own name, which may be a path, is in no answer."""
        self.prompts, self.max_length, self.name, self.tokenizer = prompts, max_length, name, prompts.tokenizer
        self._short = self._long = ThreadPoolExecutor(1, "outrider-encode")
        if getattr(self.tokenizer, "is_fast", False):  # others are not safe in two threads at once
            self._long = ThreadPoolExecutor(1, "outrider-encode-long", give_way)
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of its own would not give way
            prompts.encode("x")  # the first call may change settings

    async def run(self, act: Callable[[], T], size: int = 0, param: str | None = None) -> T:
        """Run in a thread. size: characters, or tokens, that it works on. A ValueError becomes Refused, for a parameter."""
        pool = self._long if size > LONG else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, act)
        except (ValueError, RecursionError) as error:
            raise self._refused(error, param) from error

    async def prompt(self, text: str, most: int | None = None, special: bool = True) -> list[int]:
        """The ids of a text. most: its characters; None: what the model can hold. special: with those that the model's prompts
        begin with. Raises Refused."""
        return await self.run(partial(self._ids, text, most, special), len(text), "prompt")

    async def chat(self, body: ChatRequest, most: int | None = None, special: bool = False) -> list[int]:
        """The ids of a chat. most, special: as of `prompt`. Raises Refused."""
        goes_on, tokenizer = bool(body.continue_final_message), self.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            return await self.run(lambda: self.prompts.encode(body.messages), param="messages")  # says what is missing
        variables = _thinking(body.reasoning_effort, str(tokenizer.chat_template)) | (body.chat_template_kwargs or {})
        if name := next((name for name in variables if name in RESERVED), None):
            message = f"chat_template_kwargs cannot set {name!r}, which the server sets; leave it out"
            raise Refused(message, param="chat_template_kwargs")
        prompted = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
        variables["add_generation_prompt"] = prompted
        tools = None if body.tool_choice == "none" else body.tools
        make = partial(chat_prompt, tools=tools, continued=goes_on, check=check_body, **variables)
        prompt = await self.run(lambda: make(tokenizer, body.messages), _size(body.messages), "messages")
        return await self.run(partial(self._ids, prompt, most, special), len(prompt), "messages")

    def close(self) -> None:
        """End the threads."""
        for pool in (self._short, self._long):
            pool.shutdown(cancel_futures=True)

    def _refused(self, error: Exception, param: str | None) -> Refused:
        refused = Refused.of(error, param)
        message = refused.message.replace(self.prompts.loaded.name, self.name)
        return replace(refused, message=message or "nested too deeply")

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
            return self.prompts.encode(text)
        if most is not None and len(text) > most:
            raise ValueError(f"the text has {len(text)} characters, and {most} are encoded at once; send it in parts")
        if most is None and len(text) > room:
            if len(text) > room * self._longest:
                raise ContextOverflow(-(-len(text) // self._longest), room)
            if len(text) > WIDE * room and len(self.prompts.encode(text[: WIDE * room // 2])) > 2 * room:
                raise ContextOverflow(2 * room, room)
        return self.prompts.encode(text) if special else list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _thinking(effort: str | None, template: str) -> dict[str, Any]:
    """The variables with which a template lets its model think, or keeps it from it. None leaves it to the template."""
    variables: dict[str, Any] = {} if effort is None else {"enable_thinking": effort != "none"}
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    return {name: value for name, value in variables.items() if name in template}


def give_way() -> None:
    """Let this thread, and processes that it starts, have a quarter of a core that others need. Only Linux has it."""
    with suppress(AttributeError, OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 5)


def _size(messages: abc.Sequence[abc.Mapping[str, Any]]) -> int:
    """Characters of messages, and some for each message and each part: a template works on each."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return 32 * len(parts) + sum(len(text) for text in texts if isinstance(text, str))
