"""What the clients of each protocol look for: words and codes of errors, forms of tools, fields that other servers take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Live, builtin, serving

from outrider.serve.grammar import available
from outrider.serve.protocols.ollama import API_VERSION

LONG = "word " * 400  # tokens that do not fit
HUGE = "word " * 200_000  # not even encoded to its end
USER = [{"role": "user", "content": "sort a list"}]
SCHEMA = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
TEMPLATE = (
    "{% if tools %}<tool_call> {% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}# {{ m.content }}\n{% endfor %}{{ reasoning_effort }}{% if enable_thinking %}think{% endif %}# "
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=256)
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    with serving(llm) as found:
        yield found


def post(live: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(live.url + path, json={"model": "code", **body})


# route, what is sent with a text, the field that has it
OPENAI = [
    ("/v1/completions", lambda text: {"prompt": text}, "prompt"),
    ("/v1/completions", lambda text: {"prompt": ["x", text]}, "prompt"),
    ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}, "messages"),
    ("/v1/responses", lambda text: {"input": text}, "input"),
    ("/v1/responses", lambda text: {"input": "x", "instructions": text}, "input"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [LONG, HUGE], ids=["long", "huge"])
@pytest.mark.parametrize(("path", "body", "field"), OPENAI)
def test_a_prompt_that_does_not_fit_has_openais_code(
    path: str, body: Any, field: str, text: str, stream: bool, live: Live
) -> None:
    response = post(live, path, **body(text), stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error["param"] == field
    assert error["message"].startswith("This model's maximum context length is 256 tokens. However, ")
    assert f"reduce the length of the {field}" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 256}, "max_tokens"),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 256}, "max_tokens"),
        ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": 10**30}, "max_completion_tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 256}, "max_output_tokens"),
    ],
)
def test_a_text_that_does_not_fit_has_it_too(path: str, body: dict, field: str, live: Live) -> None:
    error = post(live, path, **body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert f"use {field}=" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [LONG, HUGE], ids=["long", "huge"])
def test_anthropics_and_ollamas_clients_read_their_words(text: str, stream: bool, live: Live) -> None:
    messages = [{"role": "user", "content": text}]
    response = post(live, "/v1/messages", messages=messages, max_tokens=5, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long: ")
    had, _, most = error["message"].removeprefix("prompt is too long: ").partition(" tokens > ")
    assert int(had) > int(most.removesuffix(" maximum")) == 256
    for path, body in (("/api/chat", {"messages": messages}), ("/api/generate", {"prompt": text})):
        response = post(live, path, **body, stream=stream)
        assert response.status_code == 400
        assert "maximum context length is 256 tokens" in response.json()["error"]


NAME = "mcp__some_long_connector_name_of_a_platform_2__hyperdrive_config_edit"


def flat(name: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA}


def function(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "body", "tool", "longest", "shown"),
    [
        ("/v1/messages", {"messages": USER, "max_tokens": 2}, flat, 128, "input_schema"),
        ("/v1/messages/count_tokens", {"messages": USER}, flat, None, ""),
        ("/api/chat", {"messages": USER, "options": {"num_predict": 2}}, function, None, "parameters"),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 2}, function, 64, '"function": {'),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": 2},
            lambda n: {"type": "function", "name": n},
            64,
            '"name": ...',
        ),
    ],
)
def test_the_names_of_tools_are_bounded_as_their_protocol_has_it(
    path: str, body: dict, tool: Any, longest: int | None, shown: str, live: Live
) -> None:
    body = body | {"stream": False}
    for length in (64, 65, 70, 128, 129, 300):
        response = post(live, path, **body, tools=[tool((NAME * 9)[:length])])
        fits = longest is None or length <= longest
        assert response.status_code == (200 if fits else 400), response.text
        if not fits:
            assert shown in response.text.replace('\\"', '"')
            assert str(longest) in response.text


CALLS = {"messages": USER, "max_tokens": 60, "temperature": 0}
TWO = [function("read"), function("write")]
CHOICES: list[tuple[Any, set[str]]] = [
    ("required", {"read", "write"}),
    ("any", {"read", "write"}),
    ({"type": "any"}, {"read", "write"}),
    ({"type": "function", "function": {"name": "write"}}, {"write"}),
    ({"type": "function", "name": "write"}, {"write"}),
    ({"type": "tool", "name": "write"}, {"write"}),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("write")]}}, {"write"}),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "write"}]}, {"write"}),
    ({"type": "auto"}, set()),
    ({"type": "none"}, set()),
    (None, set()),
]


@pytest.mark.skipif(not available(), reason="needs the extra 'grammar'")
@pytest.mark.parametrize(("choice", "names"), CHOICES)
def test_a_tool_choice_has_the_form_of_any_protocol(choice: Any, names: set[str], live: Live) -> None:
    response = post(live, "/v1/chat/completions", **CALLS, tools=TWO, tool_choice=choice, parallel_tool_calls=False)
    assert response.status_code == 200, response.text
    called = re.findall(r"name\W+(read|write)\b", response.text)  # a call may be cut off, then it is text
    assert len(called) == bool(names)
    assert {*called} <= names


@pytest.mark.parametrize(
    "choice", [5, "some", {}, {"type": "allowed_tools"}, {"type": "function"}, {"type": "tool", "name": 3}]
)
def test_any_other_tool_choice_is_refused(choice: Any, live: Live) -> None:
    error = post(live, "/v1/chat/completions", **CALLS, tools=TWO, tool_choice=choice).json()["error"]
    assert error["param"].startswith("tool_choice")


def prompt_of(live: Live, path: str = "/v1/chat/completions", **body: Any) -> str:
    """The prompt that a body becomes."""
    limit = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}.get(path, "max_completion_tokens")
    sequences, accept = [], live.service.accept

    async def watched(*given: Any) -> Any:
        pending = await accept(*given)
        sequences.append(pending.sequences[0])
        return pending

    live.service.accept = watched  # type: ignore[method-assign]
    try:
        assert (response := post(live, path, **{limit: 1}, stream=False, **body)).status_code == 200, response.text
    finally:
        live.service.accept = accept  # type: ignore[method-assign]
    return live.service.tokens.decode(sequences[0].prompt)


def test_flat_tools_are_those_of_chat_completions(live: Live) -> None:
    nested = prompt_of(live, messages=USER, tools=TWO)
    assert "read write" in nested
    assert nested == prompt_of(live, messages=USER, tools=[{"type": "function", **tool["function"]} for tool in TWO])


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        ("/v1/chat/completions", {"messages": USER, "reasoning_effort": "low"}, "lowthink"),
        ("/v1/chat/completions", {"messages": USER, "reasoning_effort": "none"}, ""),
        ("/v1/chat/completions", {"messages": USER}, ""),
        ("/v1/responses", {"input": "x", "reasoning": {"effort": "low", "summary": "auto"}}, "lowthink"),
        (
            "/v1/messages",
            {"messages": USER, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
            "lowthink",
        ),
        ("/v1/messages", {"messages": USER}, ""),
        ("/api/chat", {"messages": USER, "think": "low"}, "lowthink"),
        ("/api/chat", {"messages": USER, "think": True}, "highthink"),
        ("/api/chat", {"messages": USER, "think": False}, ""),
    ],
)
def test_the_wish_to_think_reaches_the_template(path: str, body: dict, shown: str, live: Live) -> None:
    assert prompt_of(live, path, **body).rstrip("# ").rpartition("\n")[2] == shown


SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x = ", "max_tokens": 16}, {"max_tokens": None}),
    ("/v1/completions", {"prompt": "x = ", "stop": None}, {"stop": []}),
    ("/v1/completions", {"prompt": "x = ", "logit_bias": None}, {"logit_bias": {}}),
    ("/v1/completions", {"prompt": "x = ", "temperature": 0}, {"temperature": 1.0, "top_p": 0}),
    ("/v1/completions", {"prompt": "x = ", "temperature": 0}, {"temperature": 0, "top_p": 0}),
    ("/v1/completions", {"prompt": "x = ", "top_k": -1}, {"top_k": 0}),
    ("/v1/completions", {"prompt": "x = ", "seed": -5}, {"seed": 2**64 - 5}),
    ("/v1/completions", {"prompt": "x = ", "n": 1}, {"n": "1", "best_of": 1}),
    (
        "/v1/chat/completions",
        {"messages": USER, "modalities": None},
        {"modalities": ["text"], "store": True, "metadata": {}},
    ),
    ("/api/generate", {"prompt": "x = ", "raw": True, "options": {"temperature": 0}}, {"options": {"top_p": 0}}),
]


@pytest.mark.parametrize(("path", "body", "other"), SAME)
def test_two_ways_to_say_the_same(path: str, body: dict, other: dict, live: Live) -> None:
    usual = {"seed": 3, "temperature": 0.9} if not path.startswith("/api/") else {}
    texts = []
    for given in (body, {**body, **other}):
        limit = {"max_tokens": 16} if "chat" in path else {}
        answer = post(live, path, **{**usual, **limit, "stream": False, **given})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        texts.append(
            found["response"]
            if "response" in found
            else json.dumps(found["choices"][0].get("message", found["choices"][0].get("text")))
        )
    assert texts[0] == texts[1]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "x", "stop": ""}, "stop"),
    ("/v1/completions", {"prompt": "x", "seed": 2**64}, "seed"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "repetition_penalty": 1e-40}, "repetition_penalty"),
    (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs",
    ),
    ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format"),
    ("/v1/chat/completions", {"messages": USER, "modalities": ["text", "audio"]}, "modalities"),
    ("/v1/chat/completions", {"messages": USER, "audio": {"voice": "x"}}, "audio"),
    ("/v1/chat/completions", {"messages": USER, "web_search_options": {}}, "web_search_options"),
    ("/v1/chat/completions", {"messages": USER, "functions": [{"name": "f"}]}, "functions"),
    ("/v1/chat/completions", {"messages": USER, "function_call": "auto"}, "function_call"),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 30}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    ("/v1/responses", {"input": "x", "truncation": "auto"}, "truncation"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    ("/v1/responses", {"input": "x", "max_tokens": 5}, "max_tokens"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": ""}]}, "tools"),
    ("/v1/messages", {"messages": USER}, "max_tokens"),
    ("/v1/messages", {"messages": USER, "max_tokens": 5, "stop_sequences": [""]}, "stop_sequences"),
    ("/v1/messages", {"messages": USER, "max_tokens": 5, "output_format": {"type": "json"}}, "output_format"),
    ("/v1/messages", {"messages": USER, "max_tokens": 5, "tool_choice": {"type": "any"}}, "tool_choice"),
    ("/v1/messages", {"messages": USER, "max_tokens": 5, "top_p": 7}, "top_p"),
    ("/api/generate", {"prompt": "x", "options": {"presence_penalty": 9}}, "options.presence_penalty"),
    ("/api/generate", {"prompt": "x", "options": {"repeat_penalty": 1e9}}, "options.repeat_penalty"),
    ("/api/generate", {"prompt": "x", "options": {"seed": 2**70}}, "options.seed"),
    ("/api/generate", {"prompt": "x", "options": {"num_predict": -7}}, "num_predict"),
    ("/api/chat", {"messages": USER, "format": {"type": "nothing"}}, "format"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED)
def test_an_error_names_the_field_that_was_sent(path: str, body: dict, field: str, live: Live) -> None:
    response = post(live, path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    named = error if isinstance(error, str) else error.get("param", error["message"])
    assert named is not None
    assert named.startswith(field) if "param" in error else field in named, response.text


def test_a_schema_beside_the_type_counts(live: Live) -> None:
    form = {"type": "json_object", "schema": SCHEMA | {"additionalProperties": False}}
    answer = post(live, "/v1/chat/completions", messages=USER, max_tokens=60, temperature=0, response_format=form)
    assert json.loads(answer.json()["choices"][0]["message"]["content"])["path"] in ("a", "b")


def test_editors_find_an_ollama_that_is_new_enough(live: Live) -> None:
    found = httpx.get(live.url + "/api/version").json()
    assert found["version"] == API_VERSION
    assert tuple(map(int, API_VERSION.split("."))) >= (0, 6, 4)
    assert found["outrider"] == httpx.get(live.url + "/version").json()["version"]
    shown = post(live, "/api/show").json()
    assert {"completion", "tools"} <= set(shown["capabilities"])
    about = shown["model_info"]
    assert about["general.basename"] == "code"
    assert about[f"{about['general.architecture']}.context_length"] == 256
