"""The body of OpenAI's Responses API, and the chat that it stands for.

See https://platform.openai.com/docs/api-reference/responses/create. What the server cannot do is refused, never left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from outrider.serve.errors import Refused, refusing
from outrider.serve.openai.protocol import (
    ChatRequest,
    CommonRequest,
    JsonObject,
    JsonSchema,
    Objects,
    Texts,
    few,
)
from outrider.serve.openai.tools import text_of

_LOGPROBS = "message.output_text.logprobs"


class TextFormat(JsonSchema):
    """`text.format`: a `response_format` whose schema is not nested."""

    type: Literal["text", "json_object", "json_schema"]


class TextConfig(JsonObject):
    """`text`: what form the answer has."""

    format: TextFormat | None = None


_KEPT = "this server keeps no such objects; send input, and previous_response_id to go on"


class ResponsesRequest(CommonRequest):
    """POST /v1/responses"""

    missing = CommonRequest.missing | {
        "background": "this server does not answer in the background; leave it out, or run `outrider batch`",
        "conversation": _KEPT,
        "prompt": _KEPT,
        "return_fingerprint": "this endpoint shows no fingerprints; ask at /v1/chat/completions",
        "max_tokens": "this endpoint calls it max_output_tokens",
        "response_format": (
            'this endpoint calls it text: {"format": {"type": "json_schema", "name": ..., "schema": ...}}'
        ),
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
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(few)] = None
    background: bool | None = Field(None, description="only false is accepted")
    conversation: Any = Field(None, description="only null is accepted")
    prompt: Any = Field(None, description="only null is accepted")
    max_tokens: Any = Field(None, description="only null is accepted")
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
        messages = [*system, *_messages([*before, *self.items], len(before))]
        if not messages:
            raise Refused("input is an empty list", param="input")
        tools, choice = _tools(self.tools, self.tool_choice)
        shared = self.shared | {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.top_logprobs is not None or _LOGPROBS in (self.include or ()):
            shared |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.text is not None and self.text.format is not None:
            shared["response_format"] = _format(self.text.format)
        return ChatRequest.model_validate(shared)


def _format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise Refused(
            'text.format is {"type": "json_schema", "name": ..., "schema": {...}}, and schema is missing', param="text"
        )
    return {"type": given.type, given.type: given.model_dump(by_alias=True, exclude={"type"})}


def _tools(given: list[dict[str, Any]] | None, choice: Any) -> tuple[list[dict[str, Any]] | None, Any]:
    """Tools and choice as chat completions have them. Raises Refused for tools that the server would have to run."""
    tools = list[dict[str, Any]]()
    for number, tool in enumerate(given or ()):
        if tool.get("type") != "function":
            raise Refused(
                f"tools.{number} has type {str(tool.get('type'))[:40]!r}; this server runs no tools of its own, and offers "
                'functions: {"type": "function", "name": ..., "parameters": a JSON schema}',
                param="tools",
            )
        tools.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        names = {t.get("name") for t in allowed if isinstance(t, dict)} if isinstance(allowed, list) else set()
        tools, choice = [t for t in tools if t["function"].get("name") in names], choice.get("mode")
    return tools or None, choice


def _messages(items: Sequence[Any], before: int) -> list[dict[str, Any]]:
    """Chat messages of items. before: how many of them are of an earlier request. Raises Refused."""
    messages, names = list[dict[str, Any]](), dict[str, str]()
    for place, item in enumerate(items):
        where = f"input.{place - before}"
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            if not isinstance(item.get("role"), str):
                raise Refused(f"{where} has no role", param="input")
            messages.append({"role": item["role"], "content": _content(item.get("content"), f"{where}.content")})
        elif kind == "function_call":
            call_id, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments")
            if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
                raise Refused(f"{where} is a function_call: call_id, name and arguments are texts", param="input")
            names[call_id] = name
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = item.get("call_id")
            if call_id not in names:
                raise Refused(
                    f"{where} answers the call {str(call_id)[:40]!r}, which no item before it made; send its function_call, "
                    "or the previous_response_id of the answer that made it",
                    param="input",
                )
            output = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": output})
        elif kind != "reasoning":  # this model has none, so it cannot have come from here
            raise Refused(
                f"{where} has type {str(kind)[:40]!r}; this server takes message, function_call and function_call_output",
                param="input",
            )
    return messages


def _content(given: Any, where: str) -> str:
    """The text of a content. Raises Refused for images and other parts that are no text."""
    if isinstance(given, list):
        refusals = [isinstance(part, dict) and part.get("type") == "refusal" for part in given]
        given = [{"text": p.get("refusal")} if refusal else p for p, refusal in zip(given, refusals, strict=True)]
    with refusing("input"):
        return text_of(given, where, "input_text")
