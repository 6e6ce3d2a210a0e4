"""OpenAI's Responses API: its body becomes a chat request, and the parts of the answer become one object or typed events.

The responses that are kept to go on from are in memory, bounded. See https://platform.openai.com/docs/api-reference/responses.
What the server cannot do is refused, never left out.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import FastAPI, Request
from pydantic import BeforeValidator, Field, field_validator, model_validator
from starlette.responses import Response

from outrider.models.chat_template import check_role, text_of
from outrider.serve.answer import Answer, ChoiceReader, Event, Part, Writer
from outrider.serve.errors import Refused, answered, called, dumps, json_response, refusing
from outrider.serve.pool import ModelPool
from outrider.serve.protocols.openai import TokenTeller, metrics, usage
from outrider.serve.requests import UNSEEN, ChatRequest, CommonRequest, JsonObject, JsonSchema, Objects, Texts, few
from outrider.serve.service import Service
from outrider.serve.tools import ToolCall, ToolForm, check_own

_LOGPROBS = "message.output_text.logprobs"


class TextFormat(JsonSchema):
    """`text.format`: a `response_format` whose schema is not nested."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError('it is {"type": "json_schema", "name": ..., "schema": {...}}, and schema is missing')
        return self


class TextConfig(JsonObject):
    """`text`: what form the answer has."""

    format: TextFormat | None = None


class Reasoning(JsonObject):
    """`reasoning`."""

    effort: str | None = Field(None, description="for templates that take it; none keeps a model from thinking")


class ResponsesChat(ChatRequest):
    """What the body of a response stands for."""

    renamed = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens") | {
        "prompt": "input",
        "messages": "input",
        "response_format": "text.format",
    }
    tool_form = ToolForm('{"type": "function", "name": ..., "parameters": a JSON schema}', "parameters")


_KEPT = "this server keeps no such objects; send input, and previous_response_id to go on"


class ResponsesRequest(CommonRequest):
    """POST /v1/responses"""

    missing: ClassVar[dict[str, str]] = {
        **CommonRequest.missing,
        **UNSEEN,
        "background": "this server does not answer in the background; leave it out, or run `outrider batch`",
        **dict.fromkeys(("conversation", "prompt"), _KEPT),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "this endpoint calls it max_output_tokens"),
        "reasoning_effort": 'this endpoint calls it reasoning: {"effort": ...}',
        "response_format": 'this endpoint calls it text: {"format": {"type": "json_schema", "name": ..., "schema": ...}}',
    }
    input: str | Objects
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="false: the answer cannot be continued by its id")
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: Texts | None = None
    top_logprobs: int | None = Field(None, ge=0)
    truncation: Literal["disabled"] | None = Field(None, description="no part of a conversation is left out")
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(few)] = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("n")
    @classmethod
    def _one(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("a response has one text; ask n times, or use /v1/chat/completions")
        return value

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def chat(self, before: Sequence[dict[str, Any]]) -> ChatRequest:
        """The chat request that this one stands for. before: items of the earlier conversation. Raises Refused."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        with refusing("input"):
            messages = [*system, *_messages([*before, *self.items], len(before))]
        if not messages:
            raise Refused("input is an empty list", param="input")
        with refusing():
            check_own(self.tools, "function", ResponsesChat.tool_form)
        shared = self.shared | {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": self.tools or None,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.top_logprobs is not None or _LOGPROBS in (self.include or ()):
            shared |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.text is not None and self.text.format is not None:
            shared["response_format"] = self.text.format.model_dump(by_alias=True, exclude_none=True)
        with called(ResponsesChat.renamed):
            return ResponsesChat.model_validate(shared)


def _messages(items: Sequence[Any], before: int) -> list[dict[str, Any]]:
    """Chat messages of items. before: how many of them are of an earlier request. Raises ValueError."""
    messages, names, thought = list[dict[str, Any]](), dict[str, str](), ""
    for place, item in enumerate(items):
        where = f"input.{place - before}"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            check_role(item.get("role"), where)
            content = text_of(item.get("content"), f"{where}.content", "input_text")
            message: dict[str, Any] = {"role": item["role"], "content": content}
        elif kind == "function_call":
            call_id, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments")
            if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
                raise ValueError(f"{where} is a function_call: call_id, name and arguments are texts")
            names[call_id] = name
            more = messages and messages[-1]["role"] == "assistant"
            message = messages.pop() if more else {"role": "assistant", "content": ""}
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = item.get("call_id")
            if not isinstance(call_id, str) or call_id not in names:
                raise ValueError(
                    f"{where} answers the call {str(call_id)[:40]!r}, which no item before it made; send its function_call, "
                    "or the previous_response_id of the answer that made it"
                )
            output = text_of(item.get("output"), f"{where}.output", "input_text")
            message = {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": output}
        elif kind == "reasoning":  # encrypted ones only their writer can read
            parts = item.get("content") or item.get("summary") or []
            thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            continue
        else:
            raise ValueError(
                f"{where} has type {str(kind)[:40]!r}; this server takes message, function_call, function_call_output and "
                "reasoning"
            )
        if thought and message["role"] == "assistant" and "reasoning_content" not in message:
            message["reasoning_content"], thought = thought, ""
        messages.append(message)
    return messages


class ResponsesWriter(Writer):
    """Writes one response.

    Args:
        answer: to the chat that the body stands for.
        service: wrote it.
        name: the id, from `resp_` on.
        body: the request.
        keep: takes the response before its last event, so that the client can go on from it.
    """

    def __init__(
        self,
        answer: Answer,
        service: Service,
        name: str,
        body: ResponsesRequest,
        keep: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        super().__init__(answer)
        chat = answer.body
        self._teller = TokenTeller(answer.sequences[0], chat, service.tokens, 0)
        self._name, self._number, self._keep = name.removeprefix("resp_"), 0, keep
        self._message: dict[str, Any] | None = None  # the item that text goes to
        text_format = None if body.text is None else body.text.format
        form = {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True, exclude_none=True)
        if form["type"] == "json_schema":
            form.setdefault("name", "output")
        self.result = {
            "id": name,
            "object": "response",
            "created_at": int(time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": service.settings.model_name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if chat.temperature is None else chat.temperature,
            "text": {"format": form},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if chat.top_p is None else chat.top_p,
            "truncation": "disabled",
            **({} if body.user is None else {"user": body.user}),
        }
        started = [self._event(f"response.{kind}", response=self._shown()) for kind in ("created", "in_progress")]
        self.begin = [b"".join(map(self.encoded, started))]

    async def part(self, choice: ChoiceReader, part: Part) -> list[Event]:
        told = {} if part.delta is None else self._teller.of(part.delta, part.text)
        logprobs, events = told.get("logprobs", {}).get("content", []), list[Event]()
        if part.text or logprobs:
            events += self._text(part.text, logprobs)
        if part.call is not None:
            events += self._call(part.call)
        if (ending := part.ending) is not None:
            self.result |= {"seed": choice.sequence.seed, "guarantee": self.answer.guarantee}
            if ending.note is not None:
                self.result["note"] = ending.note
            if not self.result["output"]:
                events += self._text("", [])
            events += self._close("incomplete" if ending.finish == "length" else "completed")
            if ending.cut_by is not None:
                self.result |= {"status": "failed", "error": {"code": "server_error", "message": ending.cut_by}}
            elif ending.finish == "length":
                self.result |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            else:
                self.result["status"] = "completed"
        return events

    def failed(self, refused: Refused) -> list[Event]:
        events = self._close("incomplete")
        self.result |= {"status": "failed", "error": {"code": "server_error", "message": refused.message}}
        return [*events, self._event("response.failed", response=self._shown())]

    def totals(self) -> list[Event]:
        used = usage(self.answer)
        self.result |= {
            "completed_at": int(time()) if self.result["status"] == "completed" else None,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": used["completion_tokens_details"],
                "total_tokens": used["total_tokens"],
            },
            "metrics": metrics(self.answer),
        }
        if self.result["store"] and self.result["status"] != "failed":
            self._keep(self.result)
        return [self._event(f"response.{self.result['status']}", response=self._shown())]

    def _text(self, text: str, logprobs: list[Any]) -> list[Event]:
        events = list[Event]()
        if self._message is None:
            number = len(self.result["output"])
            self._message = {"id": f"msg_{self._name}_{number}", "type": "message", "role": "assistant"}
            self._message |= {"status": "in_progress", "content": []}
            events.append(self._event("response.output_item.added", item=dict(self._message), output_index=number))
            self._message["content"] = [_part("", [])]
            self.result["output"].append(self._message)
            events.append(self._event("response.content_part.added", **self._place(), part=_part("", [])))
        part = self._message["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            events.append(self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs))
        return events

    def _call(self, call: ToolCall) -> list[Event]:
        events = self._close("completed")
        place = len(self.result["output"])
        item = {
            "id": f"fc_{self._name}_{place}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        events.append(self._event("response.output_item.added", item=item, output_index=place))
        done = {**item, "arguments": call.arguments, "status": "completed"}
        self.result["output"].append(done)
        where, kind = {"item_id": item["id"], "output_index": place}, "response.function_call_arguments"
        return [
            *events,
            self._event(f"{kind}.delta", **where, delta=call.arguments),
            self._event(f"{kind}.done", **where, arguments=call.arguments, name=call.name),
            self._event("response.output_item.done", item=done, output_index=place),
        ]

    def _close(self, status: str) -> list[Event]:
        """End the message that is open, if one is."""
        if self._message is None:
            return []
        message, place = self._message, self._place()
        message["status"], part = status, message["content"][0]
        self._message = None
        return [
            self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", item=message, output_index=place["output_index"]),
        ]

    def _place(self) -> dict[str, Any]:
        assert self._message is not None
        return {"item_id": self._message["id"], "output_index": len(self.result["output"]) - 1, "content_index": 0}

    def _shown(self) -> dict[str, Any]:
        return {**self.result, "output": list(self.result["output"])}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(frozen=True)
class StoredResponse:
    """response: as it was sent. items: of the whole conversation, without instructions. size: bytes."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    size: int


class ResponseStore:
    """The responses that were used last. limit: how many. limit_bytes: of all, as JSON; one that is larger is not kept."""

    def __init__(self, limit: int = 256, limit_bytes: int = 32 << 20) -> None:
        self.limit, self.limit_bytes, self.bytes = limit, limit_bytes, 0
        self._kept = OrderedDict[str, StoredResponse]()

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response, and let go of the oldest ones."""
        size = len(dumps(response)) + len(dumps(items))
        self._kept[response["id"]] = StoredResponse(response, items, size)
        self.bytes += size
        while self._kept and (len(self._kept) > self.limit or self.bytes > self.limit_bytes):
            _, old = self._kept.popitem(last=False)
            self.bytes -= old.size

    def get(self, name: str, status: int = 404, param: str | None = None) -> StoredResponse:
        """A response. Raises Refused, with this status and param, if it is not here."""
        if name not in self._kept:
            raise Refused(
                f"there is no response {name[:80]!r} here: the server keeps the last {self.limit} in memory, of up to "
                f"{self.limit_bytes >> 20} MiB, and none with store=false; send the whole conversation as input",
                status,
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        self._kept.move_to_end(name)
        return self._kept[name]

    def drop(self, name: str) -> None:
        """Let go of a response. Raises Refused if it is not here."""
        self.bytes -= self.get(name).size
        del self._kept[name]


def install(app: FastAPI, pool: ModelPool, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. documented: what is answered."""
    store = ResponseStore()

    @app.post("/v1/responses", responses=documented)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input, or go on from an earlier response. Needs a model with a chat template."""
        service = await pool.lend(body.model, request)
        earlier = body.previous_response_id
        before = [] if earlier is None else store.get(earlier, 400, "previous_response_id").items

        def keep(response: dict[str, Any]) -> None:
            store.put(response, [*before, *body.items, *response["output"]])

        home = pool.settings.replica_name  # keeps the response, so a request about it can be sent there
        name = f"resp_{secrets.token_hex(16)}" + (f"_{home}" if home else "")
        make = partial(ResponsesWriter, name=name, body=body, keep=keep)
        return await service.respond(body.chat(before), request, make)

    @app.get("/v1/responses/{name}", responses=answered("The response"))
    async def read_response(name: str) -> Response:
        """A response that the server still keeps."""
        return json_response(store.get(name).response)

    @app.delete("/v1/responses/{name}", responses=answered("The response"))
    async def delete_response(name: str) -> Response:
        """Forget a response."""
        store.drop(name)
        return json_response({"id": name, "object": "response", "deleted": True})
