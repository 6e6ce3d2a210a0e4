"""What the protocols refuse: the reason and the field in the form of each, for whole answers and for streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from serving import TEMPLATE, Live, builtin, serving

from outrider.serve.options import ServeOptions

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}, "required": ["at"]}
LOOK = {"name": "look", "description": "Look at a place.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": LOOK}
USER = {"role": "user", "content": "sort a list"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=512)
    llm.tokenizer.chat_template = "{# <tool_call> #}" + TEMPLATE  # type: ignore[union-attr]
    with serving(llm, ServeOptions(model="code")) as live:
        yield live


def post(live: Live, path: str, body: Json, **more: Any) -> httpx.Response:
    return httpx.post(live.url + path, json={"model": "code", **body, **more})


LONG, HUGE = "word " * 600, "word " * 200_000  # tokens that do not fit; not even encoded to its end
USUAL: dict[str, Json] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/api/chat": {"messages": [USER]},
    "/api/generate": {"prompt": "x"},
}
C, H, R, M, A, G = USUAL
GONE = object()  # the field is not sent
OTHER_FORM = {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}


def by(role: str, content: Any) -> Json:
    return {"messages": [{"role": role, "content": content}]}


# path, what stands beside the usual fields or in place of them, words of the message, the field that is named
REFUSED: list[tuple[str, Json, str, str | None]] = [
    (C, {"temperature": "warm"}, "a valid number, got 'warm'", "temperature"),
    (C, {"temperature": -1}, "from 0 (greedy) to a million", "temperature"),
    (C, {"temperature": 1e300}, "to a million", "temperature"),
    (C, {"max_tokens": 0}, "add echo or prompt_logprobs", "max_tokens"),
    (C, {"max_tokens": 0, "echo": True, "min_tokens": 2}, "raise max_tokens", "max_tokens"),
    (C, {"max_tokens": 10**6}, "use max_tokens=", "max_tokens"),
    (C, {"prompt": ""}, "the prompt is empty", "prompt"),
    (C, {"prompt": []}, "empty list", "prompt"),
    (C, {"prompt": GONE, "messages": []}, "prompt", "prompt"),
    (C, {"prompt": [99999999]}, "outside the vocabulary", "prompt"),
    (C, {"prompt": [-1], "echo": True}, "outside the vocabulary", "prompt"),
    (C, {"prompt": [2**64], "echo": True}, "outside the vocabulary", "prompt"),
    (C, {"prompt": "\ud800"}, "surrogate", None),
    (C, {"n": 17}, "takes 16", "n"),
    (C, {"best_of": 3}, "best_of=1", "best_of"),
    (C, {"best_of": 3, "n": 2}, "best_of=2", "best_of"),
    (C, {"use_beam_search": True}, "temperature=0", "use_beam_search"),
    (C, {"suffix": "\n    return xs"}, "fill in the middle", "suffix"),
    (C, {"stop": ["a"] * 17}, "17 stop strings", "stop"),
    (C, {"stop": "a" * 300}, "300 characters", "stop"),
    (C, {"stop": ""}, "stop", "stop"),
    (C, {"logprobs": 21}, "21 logprobs", "logprobs"),
    (C, {"prompt_logprobs": 21}, "21 prompt_logprobs", "prompt_logprobs"),
    (C, {"logit_bias": {"x": 1}}, "token ids", "logit_bias"),
    (C, {"logit_bias": {"99999999": 1}}, "outside the vocabulary", "logit_bias"),
    (C, {"repetition_penalty": 1e-40}, "repetition_penalty", "repetition_penalty"),
    (C, {"temprature": 1}, "did you mean 'temperature'", "temprature"),
    (C, {"num_speculative_tokens": 17}, "takes 16", "num_speculative_tokens"),
    (C, {"method": "magic"}, "no drafter 'magic'", "method"),
    (C, {"seed": 2**70}, "64 bits", "seed"),
    (C, {"other": float("inf")}, "the number Infinity", None),
    (C, {"response_format": {"type": "json_schema"}}, "json_schema", "response_format"),
    (C, {"response_format": OTHER_FORM}, "foo", "response_format"),
    (C, {"structured_outputs": {"regex": "(a"}}, "unclosed group", "structured_outputs"),
    (C, {"structured_outputs": {}}, "takes one of", "structured_outputs"),
    (C, {"structured_outputs": {"json": {"enum": ["x" * 1_100_000]}}}, "bytes", "structured_outputs"),
    (C, {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "Extra inputs", "structured_outputs"),
    (C, {"guided_json": {"type": "object"}}, 'send structured_outputs: {"json"', "guided_json"),
    (C, {"grammar": "root ::= a"}, 'send structured_outputs: {"regex"', "grammar"),
    (C, {"functions": [{"name": "f"}]}, "send tools", "functions"),
    (H, {"function_call": "auto"}, "send tool_choice", "function_call"),
    (H, {"modalities": ["text", "audio"]}, "text", "modalities"),
    (H, {"audio": {"voice": "x"}}, "writes text only", "audio"),
    (H, {"web_search_options": {}}, "searches nothing", "web_search_options"),
    (H, {"top_logprobs": 3}, "send logprobs", "top_logprobs"),
    (H, {"logprobs": True, "top_logprobs": 30}, "30 logprobs", "top_logprobs"),
    (H, by("user", [{"type": "image_url", "image_url": {}}]), "reads text only", "messages"),
    *((H, by(role, "x"), "messages.0.role is", "messages") for role in ("bogus", None)),
    (H, {"max_tokens": 512}, "use max_tokens=", "max_tokens"),
    (H, {"max_completion_tokens": 10**30}, "use max_completion_tokens=", "max_completion_tokens"),
    (H, {"tools": [{}]}, "tools.0 is", "tools"),
    (H, {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format",
     "tool_choice"),
    (H, {"tools": [{"function": {"name": "a", "parameters": {"type": "object", "properties": {"x": {"type": "foo"}}}}}],
         "tool_choice": "required"}, "foo", "tools"),
    *((H, {"tools": [TOOL], "tool_choice": choice}, "tool_choice", "tool_choice")
      for choice in (5, "some", {}, {"type": "allowed_tools"}, {"type": "function"}, {"type": "tool", "name": 3})),
    (R, {"input": []}, "empty list", "input"),
    (R, {"input": GONE}, "Field required", "input"),
    (R, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only", "input"),
    (R, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0 has type 'item_reference'", "input"),
    (R, {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "send its function_call", "input"),
    (R, {"input": [{"type": "function_call", "call_id": "c"}]}, "name and arguments are texts", "input"),
    (R, {"input": [{"type": "message", "content": "x"}]}, "input.0.role is one of", "input"),
    (R, {"tools": [{"type": "web_search"}]}, "runs no tools of its own", "tools"),
    (R, {"tools": [{"type": "function", "name": ""}]}, '"name": ...', "tools"),
    (R, {"background": True}, "outrider batch", "background"),
    (R, {"conversation": "conv_1"}, "previous_response_id", "conversation"),
    (R, {"max_tokens": 5}, "max_output_tokens", "max_tokens"),
    (R, {"max_output_tokens": 512}, "use max_output_tokens=", "max_output_tokens"),
    (R, {"n": 2}, "one text", "n"),
    (R, {"response_format": {"type": "json_object"}}, "calls it text", "response_format"),
    (R, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "schema is missing", "text"),
    (R, {"instrutions": "y"}, "did you mean 'instructions'", "instrutions"),
    (R, {"truncation": "auto"}, "disabled", "truncation"),
    (R, {"previous_response_id": "resp_1"}, "the last 256 in memory", "previous_response_id"),
    (M, {"messages": []}, "messages", None),
    (M, {"max_tokens": None}, "max_tokens", None),
    (M, by("robot", "x"), "messages.0.role is user, assistant or system", None),
    (M, by("user", [{"type": "image", "source": {}}]), "content.0 is an image", None),
    (M, by("user", [{"type": "search_result"}]), "has type 'search_result'", None),
    (M, by("user", 5), "a text or a list of blocks", None),
    (M, by("user", [{"type": "tool_result", "tool_use_id": "t"}]), "no message before it", None),
    (M, by("user", [{"type": "tool_result", "tool_use_id": []}]), "answers the call '[]'", None),
    (M, by("assistant", [{"type": "tool_use", "id": "t"}]), "input is an object", None),
    (M, {"system": [{"type": "image"}]}, "system.0", None),
    (M, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools of its own", None),
    (M, {"tool_choice": {"type": "some"}}, "tool_choice is", None),
    (M, {"tool_choice": {"type": "tool", "name": "x"}}, "no tools", None),
    (M, {"stop": "x"}, "stop_sequences", None),
    (M, {"stop_sequences": [""]}, "stop_sequences", None),
    (M, {"n": 2}, "one text", None),
    (M, {"mcp_servers": [{}]}, "offer their tools", None),
    (M, {"output_config": {"format": {"type": "xml"}}}, "output_config.format is", None),
    (M, {"output_format": {"type": "json"}}, "output_format is", None),
    (M, {"systm": "x", "temprature": 1}, "did you mean", None),
    (M, {"top_p": 7}, "top_p", None),
    (A, {"messages": [{**USER, "images": ["aa"]}]}, "messages.0 has images", None),
    (A, by("bogus", "x"), "messages.0.role is", None),
    (A, {"options": {"mirostat": 2}}, "no mirostat", None),
    (A, {"options": {"tempe": 2}}, "no option 'tempe'", None),
    (A, {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n=-1", None),
    (A, {"options": {"num_predict": 0}}, "num_predict", None),
    (A, {"options": {"num_ctx": 5}}, "maximum context length is 5 tokens", None),
    (A, {"options": {"presence_penalty": 9}}, "options.presence_penalty must be in [-2, 2]", None),
    (A, {"options": {"repeat_penalty": 1e9}}, "options.repeat_penalty", None),
    (A, {"options": {"seed": 2**70}}, "options.seed", None),
    (A, {"format": "xml"}, "JSON schema", None),
    (A, {"format": {"type": "nothing"}}, "format", None),
    (A, {"logprobs": True}, "/v1/chat/completions", None),
    (A, {"keep_alive": "soon"}, "such as", None),
    (G, {"images": ["aa"]}, "images", None),
    (G, {"template": "{{ .Prompt }}"}, "raw=true", None),
    (G, {"context": [1]}, "/api/chat", None),
    (G, {"raw": True, "system": "y"}, "system", None),
    (G, {"suffix": "return x"}, "fill in the middle", None),
    ("/api/embed", {"input": "x"}, "embeddings", None),
    ("/api/pull", {"model": "x"}, "outrider pull NAME", None),
    # a prompt that does not fit has the words and the code that clients look for
    *((path, body, "This model's maximum context length is 512 tokens. However, ", field) for text in (LONG, HUGE)
      for path, body, field in ((C, {"prompt": text}, "prompt"), (C, {"prompt": ["x", text]}, "prompt"),
                                (H, by("user", text), "messages"), (R, {"input": text}, "input"),
                                (R, {"instructions": text}, "input"))),
    *((M, by("user", text), "prompt is too long: ", None) for text in (LONG, HUGE)),
    *((A, by("user", text), "maximum context length is 512 tokens", None) for text in (LONG, HUGE)),
    (G, {"prompt": LONG}, "maximum context length is 512 tokens", None),
]  # fmt: skip


CASES = [(*case, n % 2 == 1) for n, case in enumerate(REFUSED)]  # whole answers and streams in turn


@pytest.mark.parametrize(
    ("path", "change", "words", "field", "stream"), CASES, ids=[f"{n} {p}" for n, (p, *_) in enumerate(CASES)]
)
def test_what_cannot_be_answered_is_refused_in_the_form_of_the_protocol(
    live: Live, path: str, change: Json, words: str, field: str | None, stream: bool
) -> None:
    body = {
        k: v for k, v in {"model": "code", **USUAL.get(path, {}), "stream": stream, **change}.items() if v is not GONE
    }
    content, kind = json.dumps(body).encode(), {"content-type": "application/json"}
    response = httpx.post(live.url + path, content=content, headers=kind)
    assert response.status_code == 400, response.text
    answer = response.json()
    if path == M:
        assert set(answer) == {"type", "error", "request_id"}
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    message = answer["error"] if path.startswith("/api/") else answer["error"]["message"]
    assert words in message
    assert not any(secret in message for secret in ("/work", ".py", ".cc", "Traceback"))
    if path not in (M, A, G) and not path.startswith("/api/"):
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        param = answer["error"]["param"]
        assert (answer["error"]["type"], param and param.partition(".")[0]) == ("invalid_request_error", field)
        over = "maximum context length" in words or "use max" in words
        assert (answer["error"]["code"] == "context_length_exceeded") == over
        assert not words.endswith("However, ") or f"reduce the length of the {field}" in message
    if words == "prompt is too long: ":
        had, _, most = message.removeprefix(words).partition(" tokens > ")
        assert int(had) > int(most.removesuffix(" maximum")) == 512


NAMED: list[tuple[str, Json, Callable[[str], Json], int | None]] = [
    ("/v1/messages", {"max_tokens": 2}, lambda name: {"name": name, "input_schema": SCHEMA}, 128),
    ("/api/chat", {"options": {"num_predict": 2}}, lambda name: {"type": "function", "function": {"name": name}}, None),
    ("/v1/chat/completions", {"max_tokens": 2}, lambda name: {"type": "function", "function": {"name": name}}, 64),
    ("/v1/responses", {"max_output_tokens": 2}, lambda name: {"type": "function", "name": name}, 64),
]


@pytest.mark.parametrize(("path", "body", "tool", "longest"), NAMED)
def test_the_names_of_tools_are_bounded_as_their_protocol_has_it(
    live: Live, path: str, body: Json, tool: Callable[[str], Json], longest: int | None
) -> None:
    for length in (64, 65, 128, 129, 300):
        response = post(live, path, {**USUAL[path], **body, "stream": False, "tools": [tool("n" * length)]})
        fits = longest is None or length <= longest
        assert response.status_code == (200 if fits else 400), response.text
        assert fits or str(longest) in response.text


BOTH = [{"type": "function", "function": {**LOOK, "name": name}} for name in ("look", "find")]
CHOICES: list[tuple[Any, set[str]]] = [
    ("required", {"look", "find"}),
    ("any", {"look", "find"}),
    ({"type": "any"}, {"look", "find"}),
    ({"type": "function", "function": {"name": "find"}}, {"find"}),
    ({"type": "function", "name": "find"}, {"find"}),
    ({"type": "tool", "name": "find"}, {"find"}),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [BOTH[1]]}}, {"find"}),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "find"}]}, {"find"}),
    ({"type": "auto"}, set()),
    ({"type": "none"}, set()),
    (None, set()),
]


@pytest.mark.parametrize(("choice", "names"), CHOICES)
def test_a_tool_choice_has_the_form_of_any_protocol(live: Live, choice: Any, names: set[str]) -> None:
    pytest.importorskip("llguidance")
    body = {"messages": [USER], "max_tokens": 60, "temperature": 0, "tools": BOTH, "parallel_tool_calls": False}
    answer = post(live, "/v1/chat/completions", body, tool_choice=choice)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    called = [call["function"]["name"] for call in message.get("tool_calls", ())]
    assert len(called) == bool(names)
    assert {*called} <= names


def test_errors_before_the_route_have_its_form_and_a_key_may_come_in_its_header() -> None:
    with serving(builtin(1), ServeOptions(model="code", api_key=["s3cret"], max_body=1)) as live:
        url, body = live.url + "/v1/messages", {"model": "code", "max_tokens": 2, "messages": [USER]}
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer no", "x-api-key": "s3cret"}):
            wrong = httpx.post(url, json=body, headers=headers)
            assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
        key = {"x-api-key": "s3cret"}
        assert httpx.post(url, json=body, headers=key).status_code == 200
        large = httpx.post(url, json={**body, "system": "x" * 2000}, headers=key)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        other = httpx.post(url, json={**body, "model": "claude"}, headers=key)
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
        old = httpx.post(url, json=body, headers={**key, "anthropic-version": "2023-01-01"})
        assert (old.status_code, old.json()["type"]) == (400, "error")
        assert httpx.post(url + "/x", headers=key).json()["error"]["type"] == "not_found_error"
        assert httpx.get(url, headers=key).json()["type"] == "error"
        broken = httpx.post(url, content=b"{", headers={**key, "content-type": "application/json"})
        assert (broken.status_code, broken.json()["type"]) == (400, "error")
        models = httpx.get(live.url + "/v1/models", headers=key).json()
        assert (models["has_more"], models["first_id"], models["data"][0]["type"]) == (False, "code", "model")
        assert models["data"][0]["max_input_tokens"] == models["data"][0]["max_tokens"] == 2048
