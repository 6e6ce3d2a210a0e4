"""The body of Anthropic's Messages API, and the chat that it stands for.

See https://docs.anthropic.com/en/api/messages. What the server cannot do is refused, never left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.serve.errors import Refused, refusing
from outrider.serve.openai.protocol import ChatRequest, CommonRequest, JsonObject, Objects, Texts
from outrider.serve.openai.tools import text_of

# Lines before a system text that tell the bill, not the model; clients change them in each request
_HEADER = re.compile(r"(?:x-[a-z0-9-]+:[^\n]*(?:\n+|$))+", re.IGNORECASE)
_OTHER = "this endpoint calls it {}"


class ThinkingConfig(JsonObject):
    """`thinking`. budget_tokens: not obeyed, because no prompt is read twice; max_tokens bounds thought and text."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(JsonObject):
    """`output_config`: what form the answer has."""

    format: dict[str, Any] | None = None


class MessagesMetadata(JsonObject):
    """`metadata`."""

    user_id: str | None = None


class CountTokensRequest(CommonRequest):
    """POST /v1/messages/count_tokens"""

    missing = CommonRequest.missing | {
        "stop": _OTHER.format("stop_sequences"),
        "n": "a message has one text; ask n times, or use /v1/chat/completions",
        "response_format": _OTHER.format('output_config: {"format": {"type": "json_schema", "schema": {...}}}'),
        "return_fingerprint": "this endpoint shows no fingerprints; ask at /v1/chat/completions",
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
    container: Any = Field(None, description="only null is accepted")
    mcp_servers: Any = Field(None, description="only null is accepted")

    @property
    def thinking_wanted(self) -> bool:
        """Whether the model is to think before it answers."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def chat(self, headers: str, seen: Callable[[], object]) -> ChatRequest:
        """The chat request that this one stands for. headers: keep, move or drop those that begin a system text; seen: is
        called for a system text with them. Raises Refused."""
        system, moved = self._system(headers, seen)
        messages = [*([{"role": "system", "content": system}] if system else []), *_messages(self.messages)]
        if moved and (users := [m for m in messages if m["role"] == "user"]):
            users[-1]["content"] += f"\n\n{moved}"
        tools, choice, many = _tools(_loaded(self.tools, self.messages), self.tool_choice)
        shared: dict[str, Any] = self.shared | {
            "messages": messages,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": many,
            "continue_final_message": messages[-1]["role"] == "assistant" or None,
        }
        if self.metadata is not None and self.metadata.user_id:
            shared.setdefault("user", self.metadata.user_id)
        if self.output_config is not None and self.output_config.format is not None:
            shared["response_format"] = _format(self.output_config.format)
        return ChatRequest.model_validate(shared)

    def _system(self, headers: str, seen: Callable[[], object]) -> tuple[str, str]:
        """The system text, and the headers that go to another place."""
        given = [self.system] if isinstance(self.system, str) else self.system or []
        with refusing("system"):
            texts = [text_of(x if isinstance(x, str) else [x], f"system.{n}") for n, x in enumerate(given)]
        moved = list[str]()
        for number, text in enumerate(texts):
            if found := _HEADER.match(text):
                seen()
                if headers != "keep":
                    moved.append(found[0].strip())
                    texts[number] = text[found.end() :]
        return "\n\n".join(text for text in texts if text), "\n".join(moved) if headers == "move" else ""


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    stop_sequences: Texts | None = None

    def chat(self, headers: str, seen: Callable[[], object]) -> ChatRequest:
        made = super().chat(headers, seen)
        return made.model_copy(update={"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences or None})


def _format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema" or "schema" not in given:
        raise Refused('output_config.format is {"type": "json_schema", "schema": {...}}', param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


def _loaded(tools: Sequence[dict[str, Any]] | None, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that the model may know: one with `defer_loading` waits until a tool result refers to it."""
    blocks = [block for message in messages for block in _dicts(message.get("content"))]
    found = [part.get("tool_name") for block in blocks for part in _dicts(block.get("content"))]
    return [tool for tool in tools or () if not tool.get("defer_loading") or tool.get("name") in found]


def _dicts(given: Any) -> list[dict[str, Any]]:
    return [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []


def _tools(
    given: Sequence[dict[str, Any]] | None, choice: dict[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, Any, bool]:
    """Tools, choice and whether several calls may come, as chat completions have them. Raises Refused."""
    tools = list[dict[str, Any]]()
    for number, tool in enumerate(given or ()):
        if tool.get("type", "custom") != "custom":
            raise Refused(
                f"tools.{number} has type {str(tool.get('type'))[:40]!r}; this server runs no tools of its own, and offers "
                'those of the client: {"name": ..., "description": ..., "input_schema": a JSON schema}',
                param="tools",
            )
        function = {k: tool[k] for k in ("name", "description") if k in tool}
        tools.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema")}})
    kind = "auto" if choice is None else choice.get("type")
    if kind not in ("auto", "any", "none", "tool"):
        raise Refused(
            'tool_choice is {"type": "auto"}, "any", "none", or {"type": "tool", "name": ...}', param="tool_choice"
        )
    many = not (choice or {}).get("disable_parallel_tool_use")
    named = {"type": "function", "function": {"name": (choice or {}).get("name")}}
    wanted = {"auto": "auto" if choice else None, "any": "required", "none": "none", "tool": named}
    return tools or None, wanted[str(kind)], many


def _messages(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat completions have them. Raises Refused."""
    out, names = list[dict[str, Any]](), dict[str, str]()
    for number, message in enumerate(given):
        role, content, where = message.get("role"), message.get("content"), f"messages.{number}"
        if role not in ("user", "assistant", "system"):
            raise Refused(f"{where}.role is user, assistant or system, got {str(role)[:40]!r}", param="messages")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise Refused(f"{where}.content is a text or a list of blocks", param="messages")
        made: dict[str, Any] = {"role": role, "content": ""}
        for place, block in enumerate(content):
            kind, at = block.get("type"), f"{where}.content.{place}"
            if kind in ("text", "document", "image"):
                made["content"] += _text(block, at)
            elif kind == "thinking" and role == "assistant":
                made["reasoning_content"] = made.get("reasoning_content", "") + str(block.get("thinking", ""))
            elif kind == "tool_use" and role == "assistant":
                call_id, name, arguments = block.get("id"), block.get("name"), block.get("input")
                if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, dict)):
                    raise Refused(f"{at} is a tool_use: id and name are texts, input is an object", param="messages")
                names[call_id] = name
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                made.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
            elif kind == "tool_result" and role == "user":
                call_id = block.get("tool_use_id")
                if call_id not in names:
                    raise Refused(
                        f"{at} answers the call {str(call_id)[:40]!r}, which no message before it made",
                        param="messages",
                    )
                if made["content"]:
                    out.append(made)
                    made = {"role": role, "content": ""}
                inner = block.get("content") or ""
                parts = [{"type": "text", "text": inner}] if isinstance(inner, str) else inner
                if not isinstance(parts, list):
                    raise Refused(f"{at}.content is a text or a list of blocks", param="messages")
                text = "".join(_text(part, f"{at}.content.{n}") for n, part in enumerate(parts))
                text = f"Error: {text}" if block.get("is_error") else text
                out.append({"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": text})
            elif kind != "redacted_thinking":  # only its writer can read it
                raise Refused(
                    f"{at} has type {str(kind)[:40]!r}; this server takes text, tool_use of the assistant, and tool_result of "
                    "the user",
                    param="messages",
                )
        if made["content"] or made.get("tool_calls") or not out or out[-1]["role"] != "tool":
            out.append(made)
    return out


def _text(block: Any, where: str) -> str:
    """The text of a block. Raises Refused for images and other blocks that are no text."""
    block = block if isinstance(block, dict) else {}
    kind, source = block.get("type"), block.get("source")
    if kind == "tool_reference":
        block = {"text": f"The tool {block.get('tool_name')} can be called now."}
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        block = {"text": source.get("data")}
    if not isinstance(block.get("text"), str):
        what = f"an {kind}" if kind == "image" else f"a block of type {str(kind)[:40]!r}"
        raise Refused(f"{where} is {what}; this model reads text only", param="messages")
    return block["text"]
