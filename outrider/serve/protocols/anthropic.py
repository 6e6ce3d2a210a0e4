"""Anthropic's Messages API: its bodies become chat requests, and the parts of an answer become its events.

See https://docs.anthropic.com/en/api/messages and /messages-streaming. What the server cannot do is refused, never left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Header, Request
from pydantic import Field
from starlette.responses import Response

from outrider.models.chat_template import text_of
from outrider.serve.answer import Answer, ChoiceReader, Event, Part, Writer
from outrider.serve.errors import Refused, called, json_response, refusing
from outrider.serve.pool import ModelPool
from outrider.serve.protocols.openai import metrics, usage
from outrider.serve.requests import UNSEEN, ChatRequest, CommonRequest, JsonObject, Objects, Texts
from outrider.serve.service import Service
from outrider.serve.tools import ToolCall, ToolForm, check_own

VERSION = "2023-06-01"
# A line before a system text that tells the bill, not the model. It changes in each request, and no prompt would begin like an
# earlier one.
_BILL = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_OTHER = "this endpoint calls it {}"
# What clients expect beside what is known here; the schemas demand each, and most are null
_OF_END, _CLIENT = ("stop_sequence", "stop_details", "container"), {"type": "direct"}
_NO_COUNTS = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")


class ThinkingConfig(JsonObject):
    """`thinking`. budget_tokens: not obeyed, because no prompt is read twice; max_tokens bounds thought and text."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(JsonObject):
    """`output_config`: what form the answer has, and how much a model thinks for it."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesMetadata(JsonObject):
    """`metadata`."""

    user_id: str | None = None


class MessagesChat(ChatRequest):
    """What the body of a message stands for."""

    renamed = dict.fromkeys(("max_completion_tokens", "max_total_tokens"), "max_tokens") | {
        "prompt": "messages",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }
    tells_thoughts = True
    tool_form = ToolForm(
        '{"name": ..., "input_schema": a JSON schema}',
        "input_schema",
        r"[\w.-]{1,128}",
        "a name has up to 128 letters, digits, _, - and .",
    )


class CountTokensRequest(CommonRequest):
    """POST /v1/messages/count_tokens"""

    missing: ClassVar[dict[str, str]] = {
        **CommonRequest.missing,
        **UNSEEN,
        "stop": _OTHER.format("stop_sequences"),
        "n": "a message has one text; ask n times, or use /v1/chat/completions",
        "response_format": _OTHER.format('output_config: {"format": {"type": "json_schema", "schema": {...}}}'),
        "stream_options": "a stream of this endpoint always has the usage; leave it out",
        "container": "this server runs no code; leave it out",
        "mcp_servers": "this server calls no other servers; offer their tools as tools, and call them where you are",
    }
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    metadata: MessagesMetadata | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(None, description="the older name of output_config.format")

    def chat(self) -> ChatRequest:
        """The chat request that this one stands for. Raises Refused."""
        blocks = [self.system] if isinstance(self.system, str) else self.system or []
        with refusing("system"):
            texts = [text_of(x if isinstance(x, str) else [x], f"system.{n}") for n, x in enumerate(blocks)]
        system = "\n\n".join(filter(None, (_BILL.sub("", text) for text in texts)))
        with refusing("messages"):
            messages = [*([{"role": "system", "content": system}] if system else []), *_messages(self.messages)]
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        if choice is not None and choice.get("type") not in ("auto", "any", "none", "tool"):
            raise Refused(
                'tool_choice is {"type": "auto"}, "any", "none", or {"type": "tool", "name": ...}', param="tool_choice"
            )
        shared: dict[str, Any] = self.shared | {
            "messages": messages,
            "tools": _tools(_loaded(self.tools, self.messages)) or None,
            "tool_choice": choice,
            "parallel_tool_calls": not (choice or {}).get("disable_parallel_tool_use"),
            "continue_final_message": messages[-1]["role"] == "assistant" or None,
            "reasoning_effort": (config.effort or "high") if thinks else "none",
        }
        if self.metadata is not None and self.metadata.user_id:
            shared.setdefault("user", self.metadata.user_id)
        if config.format is not None:
            shared["response_format"] = _format(config.format, "output_config.format")
        elif self.output_format is not None:
            shared["response_format"] = _format(self.output_format, "output_format")
        with called(MessagesChat.renamed):
            return MessagesChat.model_validate(shared)


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    stop_sequences: Texts | None = None

    def chat(self) -> ChatRequest:
        limits = {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences or None}
        return super().chat().model_copy(update=limits)


def _format(given: dict[str, Any], name: str) -> dict[str, Any]:
    if given.get("type") != "json_schema" or "schema" not in given:
        raise Refused(f'{name} is {{"type": "json_schema", "schema": {{...}}}}', param=name)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


def _loaded(tools: Sequence[dict[str, Any]] | None, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that the model may know: one with `defer_loading` waits until a tool result refers to it."""
    blocks = [block for message in messages for block in _dicts(message.get("content"))]
    names = [part.get("tool_name") for block in blocks for part in _dicts(block.get("content"))]
    return [tool for tool in tools or () if not tool.get("defer_loading") or tool.get("name") in names]


def _dicts(given: Any) -> list[dict[str, Any]]:
    return [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []


def _tools(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chat completions have them. Raises Refused."""
    with refusing():
        check_own(given, "custom", MessagesChat.tool_form)
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    functions = ({ours: tool[name] for name, ours in names.items() if name in tool} for tool in given)
    return [{"type": "function", "function": function} for function in functions]


def _messages(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat completions have them. Raises ValueError."""
    out, names = list[dict[str, Any]](), dict[str, str]()
    for number, message in enumerate(given):
        role, content, where = message.get("role"), message.get("content"), f"messages.{number}"
        if role not in ("user", "assistant", "system"):
            raise ValueError(f"{where}.role is user, assistant or system, got {str(role)[:40]!r}")
        turn: dict[str, Any] = {"role": role, "content": ""}
        for place, block in enumerate(_blocks(content, where)):
            kind, at = block.get("type"), f"{where}.content.{place}"
            if kind in ("text", "document", "image"):
                turn["content"] += _text(block, at)
            elif kind == "thinking" and role == "assistant":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + str(block.get("thinking", ""))
            elif kind == "tool_use" and role == "assistant":
                call_id, name, arguments = block.get("id"), block.get("name"), block.get("input")
                if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, dict)):
                    raise ValueError(f"{at} is a tool_use: id and name are texts, input is an object")
                names[call_id] = name
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
            elif kind == "tool_result" and role == "user":
                call_id = block.get("tool_use_id")
                if not isinstance(call_id, str) or call_id not in names:
                    raise ValueError(f"{at} answers the call {str(call_id)[:40]!r}, which no message before it made")
                if turn["content"]:
                    out.append(turn)
                    turn = {"role": role, "content": ""}
                parts = _blocks(block.get("content") or "", at)
                text = "".join(_text(part, f"{at}.content.{n}") for n, part in enumerate(parts))
                text = f"Error: {text}" if block.get("is_error") else text
                out.append({"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": text})
            elif kind != "redacted_thinking":  # only its writer can read it
                raise ValueError(
                    f"{at} has type {str(kind)[:40]!r}; this server takes text, tool_use of the assistant, and tool_result of "
                    "the user"
                )
        if turn["content"] or turn.get("tool_calls") or not out or out[-1]["role"] != "tool":
            out.append(turn)
    return out


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """The blocks of a content. Raises ValueError."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ValueError(f"{where}.content is a text or a list of blocks")
    return content


def _text(block: dict[str, Any], where: str) -> str:
    """The text of a block. Raises ValueError for images and other blocks that are no text."""
    kind, source = block.get("type"), block.get("source")
    if kind == "tool_reference":
        block = {"text": f"The tool {block.get('tool_name')} can be called now."}
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        block = {"text": source.get("data")}
    if not isinstance(block.get("text"), str):
        what = f"an {kind}" if kind == "image" else f"a block of type {str(kind)[:40]!r}"
        raise ValueError(f"{where} is {what}; this model reads text only")
    return block["text"]


class MessagesWriter(Writer):
    """Writes one message. max_tokens: that were asked for."""

    def __init__(self, answer: Answer, service: Service, max_tokens: int) -> None:
        super().__init__(answer)
        self._max_tokens = max_tokens
        self._open: dict[str, Any] | None = None  # the block that text goes to
        self.result = {
            "id": f"msg_{answer.name}",
            "type": "message",
            "role": "assistant",
            "model": service.settings.model_name,
            "content": [],
            **dict.fromkeys(("stop_reason", *_OF_END)),
            **dict.fromkeys(("context_management", "diagnostics")),  # of the beta
            "usage": _usage(len(answer.sequences[0].prompt), 0, 0),
        }
        start = {"type": "message_start", "message": {**self.result, "content": []}}
        self.begin = [self.encoded(start) + self.encoded({"type": "ping"})]

    async def part(self, choice: ChoiceReader, part: Part) -> list[Event]:
        events = self._grow("thinking", part.thought) + self._grow("text", part.text)
        if part.call is not None:
            events += self._call(part.call)
        if (ending := part.ending) is None:
            return events
        ending.check_whole()
        named = ending.reason if ending.finish == "stop" and isinstance(ending.reason, str) else None
        stop = "end_turn" if named is None else "stop_sequence"
        self.result["stop_reason"] = {"tool_calls": "tool_use", "stop": stop}.get(ending.finish, ending.finish)
        self.result |= {"stop_sequence": named, "seed": choice.sequence.seed, "guarantee": self.answer.guarantee}
        if ending.note is not None:
            self.result["note"] = ending.note
        return [*events, *self._close()]

    def failed(self, refused: Refused) -> list[Event]:
        return [refused.messages_body(self.answer.name)]

    def totals(self) -> list[Event]:
        used = usage(self.answer)
        written, cached = used["completion_tokens"], used["prompt_tokens_details"]["cached_tokens"]
        if self.result["stop_reason"] == "length":
            full = written < self._max_tokens
            self.result["stop_reason"] = "model_context_window_exceeded" if full else "max_tokens"
        self.result["usage"] = _usage(used["prompt_tokens"], cached, written)
        self.result["metrics"] = metrics(self.answer)
        delta = {name: self.result[name] for name in ("stop_reason", *_OF_END)}
        ours = {name: self.result[name] for name in ("seed", "guarantee", "note", "metrics") if name in self.result}
        end = {"type": "message_delta", "delta": delta, "usage": self.result["usage"], **ours}
        return [end, {"type": "message_stop"}]

    def _grow(self, kind: str, text: str) -> list[Event]:
        """More text of a kind, in the block that is open or in a new one."""
        if not text:
            return []
        events = list[Event]()
        if self._open is None or self._open["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {"citations": None}
            events = [*self._close(), *self._begin({"type": kind, kind: "", **more})]
        assert self._open is not None
        self._open[kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ToolCall) -> list[Event]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}, "caller": _CLIENT}
        events = [*self._close(), *self._begin(block)]
        block["input"] = json.loads(call.arguments)
        events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return [*events, *self._close()]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        self._open = block
        self.result["content"].append(block)
        return [{"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _close(self) -> list[Event]:
        """End the block that is open, if one is. A thought has a signature: its message."""
        if self._open is None:
            return []
        events = list[Event]()
        if self._open["type"] == "thinking":
            self._open["signature"] = self.result["id"]
            events.append(self._delta({"type": "signature_delta", "signature": self.result["id"]}))
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.result["content"]) - 1


def _usage(prompt: int, cached: int, written: int) -> dict[str, int | None]:
    """Anthropic's counts: what the cache had is no input. Nothing is paid for what the cache keeps, so that is zero."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
        **dict.fromkeys(_NO_COUNTS),
    }


def install(app: FastAPI, pool: ModelPool, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. documented: what is answered."""

    async def chat_of(body: CountTokensRequest, version: str, request: Request) -> tuple[Service, ChatRequest]:
        if version < VERSION:  # dates; streams before this one had another form
            raise Refused(f"anthropic-version {version[:40]!r} is older than this server knows; send {VERSION}")
        service, chat = await pool.lend(body.model, request), body.chat()
        room = chat.max_total_tokens or service.encoder.max_length  # clients ask for more than many models hold
        return service, chat.model_copy(update={"max_total_tokens": room})

    @app.post("/v1/messages", responses=documented)
    async def messages(
        body: MessagesRequest, request: Request, anthropic_version: Annotated[str, Header()] = VERSION
    ) -> Response:
        """Answer messages. Needs a model with a chat template."""
        service, chat = await chat_of(body, anthropic_version, request)
        return await service.respond(chat, request, partial(MessagesWriter, max_tokens=body.max_tokens))

    @app.post("/v1/messages/count_tokens", responses=documented)
    async def count_tokens(
        body: CountTokensRequest, request: Request, anthropic_version: Annotated[str, Header()] = VERSION
    ) -> Response:
        """The tokens of messages, as the model would read them."""
        service, chat = await chat_of(body, anthropic_version, request)
        with called(chat.renamed):
            return json_response({"input_tokens": len(await service.encoder.chat(chat))})
