"""The protocols as their owners publish them: fields of requests, forms of answers, and the helpers of the clients.

Every other test asks the same of its answers, see `published.judge`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import published
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import TEMPLATE, Live, builtin, serving

from outrider.serve.options import ServeOptions
from outrider.serve.protocols.anthropic import CountTokensRequest, MessagesRequest
from outrider.serve.protocols.responses import ResponsesRequest
from outrider.serve.requests import HARMLESS, ChatRequest, CommonRequest, CompletionRequest

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "sort a list"}
SCHEMA: Json = {
    "type": "object",
    "properties": {"at": {"enum": ["sky", "sea"]}},
    "required": ["at"],
    "additionalProperties": False,
}
THOUGHT = "<think>[a-f]{3,9} [a-f]{2}</think>\n[g-m]{2,30}"
# A template of a model that thinks; the thought itself comes from a regular expression.
THINKING = "{% if '</think>' in messages[0].content %}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=1024)
    llm.tokenizer.chat_template = THINKING  # type: ignore[union-attr]
    with serving(llm, ServeOptions(model="code")) as live:
        yield live


# ------------------------------------------------------------------------------------------------ fields of requests

REQUESTS: list[tuple[str, str, type[CommonRequest]]] = [
    ("openai", "/chat/completions", ChatRequest),
    ("openai", "/completions", CompletionRequest),
    ("openai", "/responses", ResponsesRequest),
    ("anthropic", "/v1/messages", MessagesRequest),
    ("anthropic", "/v1/messages?beta=true", MessagesRequest),
    ("anthropic", "/v1/messages/count_tokens", CountTokensRequest),
]
# What has no effect here, by name. A field that is new in the documents, and stands nowhere here, fails the test.
WITHOUT_EFFECT = {
    "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "verbosity", "store",
    "max_tool_calls", "context_management", "cache_control", "inference_geo", "diagnostics", "speed", "user_profile_id",
}  # fmt: skip
REFUSED = {
    "web_search_options", "audio", "function_call", "functions", "background", "prompt", "conversation", "container",
    "mcp_servers",
}  # fmt: skip


def properties(vendor: str, schema: Json) -> set[str]:
    if "$ref" in schema:
        return properties(
            vendor, published.document(vendor)["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        )
    parts = [part for word in ("allOf", "anyOf", "oneOf") for part in schema.get(word, ())]
    return set(schema.get("properties", ())).union(*(properties(vendor, part) for part in parts))


@pytest.mark.parametrize(("vendor", "path", "body"), REQUESTS, ids=[path for _, path, _ in REQUESTS])
def test_each_field_that_is_published_is_taken_or_refused(vendor: str, path: str, body: type[CommonRequest]) -> None:
    post = published.document(vendor)["paths"][path]["post"]
    fields = properties(vendor, post["requestBody"]["content"]["application/json"]["schema"])
    assert len(fields) > 5
    refused = fields & set(body.missing)
    ignored = fields - refused - set(body.model_fields)
    assert (ignored - HARMLESS, ignored - WITHOUT_EFFECT, refused - REFUSED) == (set(), set(), set())


# ------------------------------------------------------------------------------------------------ forms of answers

LOOK: Json = {"name": "look", "description": "Look at a place.", "parameters": SCHEMA}
ASKED: dict[str, Json] = {
    "/v1/chat/completions": {
        "messages": [USER],
        "max_tokens": 60,
        "logprobs": True,
        "top_logprobs": 1,
        "tools": [{"type": "function", "function": LOOK}],
        "tool_choice": "required",
    },
    "/v1/completions": {"prompt": "def f(", "max_tokens": 3, "logprobs": 1, "echo": True},
    "/v1/responses": {"input": "sort", "max_output_tokens": 3, "top_logprobs": 1},
    "/v1/messages": {"messages": [USER], "max_tokens": 30, "structured_outputs": {"regex": THOUGHT}},
    "/api/chat": {"model": "code", "messages": [USER], "options": {"num_predict": 3}},
    "/api/generate": {"model": "code", "prompt": "x", "options": {"num_predict": 3}},
}
WHOLE: dict[str, Json | None] = {
    **ASKED,
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/api/show": {"model": "code"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/models": None,
    "/v1/models/code": None,
    "/api/version": None,
}


def sent(live: Live, path: str, body: Json | None, **more: Any) -> httpx.Response:
    if body is None:
        return httpx.get(live.url + path)
    return httpx.post(live.url + path, json={**body, **more})


def judged(path: str, answer: httpx.Response, body: bytes) -> list[str]:
    return list(published.problems(answer.request.method, path, {}, answer.status_code, dict(answer.headers), body))


DROP = object()
BREAKS: list[tuple[str, str, Any]] = [
    ("/v1/chat/completions", "choices.0.logprobs.content.0.top_logprobs.0.bytes", "x"),
    ("/v1/chat/completions", "choices.0.message.tool_calls.0.id", DROP),
    ("/v1/completions", "choices.0.logprobs.token_logprobs.1", None),
    ("/v1/completions", "choices.0.finish_reason", None),
    ("/v1/responses", "incomplete_details.reason", "length"),
    ("/v1/responses", "output.0.content.0.annotations", DROP),
    ("/v1/messages", "content.0.signature", DROP),
    ("/v1/messages", "stop_reason", "stop"),
    ("/v1/messages/count_tokens", "input_tokens", None),
    ("/v1/models", "data.0.created", 1.5),
    ("/v1/models/code", "capabilities", DROP),
    ("/tokenize", "count", DROP),
    ("/detokenize", "prompt", None),
    ("/api/chat", "done_reason", "abort"),
    ("/api/generate", "created_at", "yesterday"),
    ("/api/show", "capabilities", "completion"),
    ("/api/version", "version", "new"),
]


def changed(value: Any, place: list[str], new: Any) -> Any:
    """A value with another one in a place, or without what stood there."""
    [first, *rest] = place
    if isinstance(value, list):
        at = int(first)
        return [*value[:at], changed(value[at], rest, new) if rest else new, *value[at + 1 :]]
    assert first in value or new is None, f"{first} is not in {value}"
    left = {k: v for k, v in value.items() if k != first}
    return {**left, first: changed(value[first], rest, new)} if rest else left if new is DROP else {**left, first: new}


@pytest.mark.parametrize("path", WHOLE)
def test_a_broken_answer_is_seen(live: Live, path: str) -> None:
    more = {"stream": False} if path.startswith("/api/") else {}
    answer = sent(live, path, WHOLE[path], **more)
    assert answer.status_code == 200, answer.text
    assert judged(path, answer, answer.content) == []
    for place, new in [(place, new) for where, place, new in BREAKS if where == path]:
        assert judged(path, answer, json.dumps(changed(answer.json(), place.split("."), new)).encode()), place


@pytest.mark.parametrize("path", ASKED)
def test_a_broken_stream_and_a_broken_error_are_seen(live: Live, path: str) -> None:
    answer = sent(live, path, ASKED[path], stream=True)
    assert judged(path, answer, answer.content) == []
    end = "\n" if path.startswith("/api/") else "\n\n"
    parts = answer.text.removesuffix(end).split(end)
    last = len(parts) - (2 if parts[-1] == "data: [DONE]" else 1)
    for wrong in (parts[:last] + parts[last + 1 :], [parts[last], *parts]):
        assert judged(path, answer, "".join(part + end for part in wrong).encode())
    refused = httpx.post(live.url + path, json={"model": "other"})
    assert refused.status_code >= 400
    for key in refused.json():
        assert judged(path, refused, json.dumps(changed(refused.json(), [key], DROP)).encode())


# ------------------------------------------------------------------------------------------------ helpers of the clients


class Place(pydantic.BaseModel):
    """What `parse` returns."""

    model_config = pydantic.ConfigDict(extra="forbid")
    at: str = pydantic.Field(pattern="^(sky|sea)$")


def test_openais_helpers_read_texts_streams_and_calls(live: Live) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
    told: Any = [{"role": "user", "content": "where?"}]
    usual: Any = {"temperature": 1, "extra_body": {"seed": 1}}
    parsed = client.chat.completions.parse(model="code", messages=told, response_format=Place, **usual)
    assert parsed.choices[0].message.parsed is not None
    assert parsed.choices[0].message.parsed.at in ("sky", "sea")
    made = client.responses.parse(model="code", input="where?", text_format=Place, **usual)
    assert made.output_parsed == parsed.choices[0].message.parsed
    tool = openai.pydantic_function_tool(Place, name="look")
    with client.chat.completions.stream(
        model="code",
        messages=told,
        tools=[tool],
        tool_choice="required",
        seed=1,
        logprobs=True,
        parallel_tool_calls=False,
    ) as stream:
        kinds = {event.type for event in stream}
        called = stream.get_final_completion().choices[0].message.tool_calls
    assert {"chunk", "tool_calls.function.arguments.done", "logprobs.content.delta"} <= kinds
    assert called is not None
    assert isinstance(called[0].function.parsed_arguments, Place)
    with client.responses.stream(model="code", input="where?", text_format=Place, **usual) as events:
        assert "response.output_text.delta" in {event.type for event in events}
        assert events.get_final_response().output_parsed == made.output_parsed
    assert [model.id for model in client.models.list()] == ["code"]
    with pytest.raises(openai.NotFoundError, match="other") as caught:
        client.models.retrieve("other")
    assert (caught.value.type, caught.value.code) == ("not_found_error", "model_not_found")
    assert caught.value.request_id


def test_anthropics_helpers_read_texts_streams_and_calls(live: Live) -> None:
    client = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0)
    asked: Json = {"model": "code", "messages": [USER], "max_tokens": 80, "extra_body": {"seed": 3}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    tool: Any = {"name": "look", "input_schema": SCHEMA}
    with client.messages.stream(**asked, tools=[tool], tool_choice={"type": "any"}) as stream:
        kinds = [event.type for event in stream]
        call = next(block for block in stream.get_final_message().content if block.type == "tool_use")
    assert "input_json" in kinds
    assert (call.type, call.name) == ("tool_use", "look")  # type: ignore[union-attr]
    assert Place.model_validate(call.input)  # type: ignore[union-attr]
    assert client.messages.count_tokens(model="code", messages=[USER]).input_tokens == (  # type: ignore[list-item]
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )
    assert [model.id for model in client.models.list()] == ["code"]
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**asked, "model": "other"})
    assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]


def test_ollamas_client_reads_texts_streams_and_calls(live: Live) -> None:
    client = ollama.Client(live.url)
    options = {"seed": 3, "num_predict": 12}
    whole = client.chat("code", [USER], options=options)
    parts = list(client.chat("code", [USER], options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (parts[-1].done, parts[-1].done_reason, parts[-1].eval_count) == (True, "length", 12)
    text = client.generate("code", "def f(", options=options, raw=True)
    lines = list(client.generate("code", "def f(", options=options, raw=True, stream=True))
    assert "".join(line.response or "" for line in lines) == text.response
    assert [model.model for model in client.list().models] == ["code"]
    assert [model.name for model in client.ps().models] == ["code"]
    assert (client.show("code").capabilities or [""])[0] == "completion"
    with pytest.raises(ollama.ResponseError, match="other"):
        client.chat("other", [USER])


# ------------------------------------------------------------------------------------------------ streams are wholes


def events(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    found = published.events_of(answer.content, answer.headers["content-type"])
    return [event for event in found if event != "[DONE]"]


def same(value: Any) -> Any:
    """A value without what no two answers share: ids, times and figures of speed."""
    if isinstance(value, list):
        return [same(each) for each in value]
    if not isinstance(value, dict):
        return value
    own = ("id", "created", "created_at", "completed_at", "metrics", "call_id", "signature", "item_id")
    return {k: same(v) for k, v in value.items() if k not in own and not k.endswith("_duration")}


def joined(parts: list[Any]) -> Any:
    """Log-probabilities of several chunks as one."""
    parts = [part for part in parts if part is not None]
    names = parts[0] if parts else ()
    return {k: parts[0][k] and [each for part in parts for each in part[k]] for k in names} or None


def of_completion(found: list[Any]) -> Json:
    """The answer of a stream of chat or text completions."""
    choices = dict[int, Json]()
    for chunk in [each for event in found for each in event["choices"]]:
        made = choices.setdefault(chunk["index"], {"index": chunk["index"], "text": "", "calls": [], "scores": []})
        delta = chunk.get("delta", {})
        made["text"] += chunk.get("text") or delta.get("content") or ""
        made["calls"] += [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
        made["scores"].append(chunk["logprobs"])
        if chunk["finish_reason"]:
            made |= {name: chunk[name] for name in ("finish_reason", "stop_reason", "seed")}
    for made in choices.values():
        made["logprobs"] = joined(made.pop("scores"))
    return {"choices": [choices[index] for index in sorted(choices)], "usage": found[-1]["usage"]}


def of_whole(answer: Json) -> Json:
    """The same of a whole answer."""
    found = list[Json]()
    for choice in answer["choices"]:
        message = choice.get("message", {})
        names = ("index", "finish_reason", "stop_reason", "seed", "logprobs")
        text = choice.get("text") or message.get("content") or ""
        found.append({k: choice[k] for k in names} | {"text": text, "calls": message.get("tool_calls", [])})
    return {"choices": found, "usage": answer["usage"]}


def of_message(found: list[Any]) -> Json:
    """The message of a stream."""
    message, parts = dict(found[0]["message"]), dict[int, str]()
    for event in found:
        if event["type"] == "content_block_start":
            message["content"] = [*message["content"], dict(event["content_block"])]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            [(name, more)] = [(k, v) for k, v in delta.items() if k != "type"]
            if name == "partial_json":
                parts[event["index"]] = parts.get(event["index"], "") + more
                message["content"][-1]["input"] = json.loads(parts[event["index"]])
            else:
                message["content"][-1][name] += more
        elif event["type"] == "message_delta":
            message |= event["delta"] | {k: v for k, v in event.items() if k not in ("type", "delta")}
    return message


def of_lines(found: list[Any]) -> Json:
    """The answer of Ollama's lines."""
    end, said = dict(found[-1]), [line.get("message", line) for line in found]
    texts = {name: "".join(part.get(name) or "" for part in said) for name in ("content", "response", "thinking")}
    more = {k: v for k, v in texts.items() if v} | {
        "tool_calls": [c for part in said for c in part.get("tool_calls", ())]
    }
    more = {k: v for k, v in more.items() if v}
    return {**end, "message": end["message"] | more} if "message" in end else end | more


ASSEMBLED: Json = {
    "/v1/chat/completions": of_completion,
    "/v1/completions": of_completion,
    "/v1/responses": lambda found: found[-1]["response"],
    "/v1/messages": of_message,
    "/api/chat": of_lines,
    "/api/generate": of_lines,
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Json]:
    """A valid request of any protocol."""
    path = draw(st.sampled_from(list(ASSEMBLED)))
    limit, seed = draw(st.integers(1, 40)), draw(st.integers(0, 99))
    temperature = draw(st.sampled_from([0, 0.9]))
    stops = draw(st.sampled_from([None, ["\n"], ["e", "return"]]))
    tools = draw(st.sampled_from([None, None, "auto", "required"]))
    form = draw(st.sampled_from([None, None, THOUGHT, "(ab|é|🦜){2,9}"])) if tools is None else None
    if path.startswith("/api/"):
        options = {"num_predict": limit, "seed": seed, "temperature": temperature, "stop": stops or []}
        body: Json = {"model": "code", "options": options}
        if path == "/api/generate":
            return path, body | {"prompt": "sort", "raw": draw(st.booleans())}
        return path, body | {"messages": [USER]} | (
            {"tools": [{"type": "function", "function": LOOK}]} if tools else {}
        )
    body = {"temperature": temperature, "seed": seed}
    body |= {"structured_outputs": {"regex": form}} if form else {}
    if path == "/v1/messages":
        body |= {"messages": [USER], "max_tokens": limit} | ({"stop_sequences": stops} if stops else {})
        tool = {"name": "look", "input_schema": SCHEMA}
        choice = {"type": "auto" if tools == "auto" else "any"}
        return path, body | ({"tools": [tool], "tool_choice": choice} if tools else {})
    body |= {"stop": stops} if stops else {}
    scores = draw(st.sampled_from([None, 0, 2]))
    if path == "/v1/completions":
        body |= {"prompt": draw(st.sampled_from(["def f(", "🦜🦜", ["x =", "y ="]])), "echo": draw(st.booleans())}
        body |= {"max_tokens": limit, "n": draw(st.integers(1, 2)), "stream_options": {"include_usage": True}}
        return path, body | ({} if scores is None else {"logprobs": scores})
    if path == "/v1/responses":
        body |= {"input": "sort", "max_output_tokens": limit} | ({} if scores is None else {"top_logprobs": scores})
        return path, body | ({"tools": [{"type": "function", **LOOK}], "tool_choice": tools} if tools else {})
    body |= {"messages": [USER], "max_tokens": limit, "n": draw(st.integers(1, 2))}
    body |= {"stream_options": {"include_usage": True}}
    body |= {} if scores is None else {"logprobs": True, "top_logprobs": scores}
    return path, body | ({"tools": [{"type": "function", "function": LOOK}], "tool_choice": tools} if tools else {})


def check_whole(live: Live, path: str, body: Json) -> None:
    answer = sent(live, path, body, stream=False)
    assert answer.status_code == 200, answer.text
    whole, stream = answer.json(), ASSEMBLED[path](events(sent(live, path, body, stream=True)))
    whole = of_whole(whole) if "choices" in whole else whole
    for each in (whole, stream):  # the second request finds the prompt in the cache
        used = each.get("usage", {})
        used.pop("prompt_tokens_details", None), used.pop("input_tokens_details", None)
        if "cache_read_input_tokens" in used:
            used["input_tokens"] += used.pop("cache_read_input_tokens")
    assert json.dumps(same(stream), sort_keys=True) == json.dumps(same(whole), sort_keys=True), json.dumps(body)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests())
def test_a_stream_adds_up_to_the_whole_answer(live: Live, request: tuple[str, Json]) -> None:
    check_whole(live, *request)


@pytest.mark.long
@settings(max_examples=1500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests())
def test_a_stream_adds_up_to_the_whole_answer_often(live: Live, request: tuple[str, Json]) -> None:
    check_whole(live, *request)
