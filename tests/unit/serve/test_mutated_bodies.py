"""Bodies changed at random, on each route that takes one and in batches: no server error, and each error in its form."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fuzz import json_changed

from outrider.core.infill import Infilling
from outrider.serve.batch.answer import BatchAnswerer
from outrider.serve.batch.lines import ENDPOINTS, BatchRequest
from outrider.serve.options import BatchOptions, ServeOptions
from tests.support.serving import Live, builtin, serving

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}, "required": ["path"]}
TEXT = {"type": "text", "text": "read a", "cache_control": {"type": "ephemeral"}}
MESSAGES: dict[str, Any] = {
    "model": "code",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: a\nBe brief."}],
    "messages": [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I read."},
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a", "n": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [TEXT], "is_error": False},
                {"type": "text", "text": "go on"},
            ],
        },
    ],
    "tools": [{"name": "read", "description": "reads", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["\n\n"],
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "stream": False,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "disabled"},
}
OPTIONS = {
    "num_predict": 3,
    "num_ctx": 256,
    "seed": 1,
    "stop": ["\n\n"],
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.1,
}
OLLAMA: dict[str, Any] = {"model": "code", "options": OPTIONS, "stream": False, "keep_alive": "5m", "think": False}
CHAT = OLLAMA | {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "read a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "read", "arguments": {"path": "a"}}}],
        },
        {"role": "tool", "content": "b", "tool_name": "read"},
    ],
    "tools": [{"type": "function", "function": {"name": "read", "description": "reads", "parameters": SCHEMA}}],
    "format": "",
}
GENERATE = OLLAMA | {"prompt": "def f(", "suffix": "return x", "system": "Be brief.", "format": SCHEMA, "raw": False}
COMPLETION: dict[str, Any] = {
    "model": "code",
    "prompt": ["def f(", "x ="],
    "suffix": "return x",
    "max_tokens": 3,
    "n": 1,
    "stop": ["\n\n"],
    "temperature": 0.5,
    "logprobs": 2,
    "seed": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": -1.0},
}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "reads", "parameters": SCHEMA}}]
SAMPLED: dict[str, Any] = {"model": "code", "temperature": 0.5, "top_p": 0.9, "seed": 1, "stream": False, "user": "u"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
CHAT_COMPLETION = SAMPLED | {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "read a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "call_1"},
    ],
    "max_completion_tokens": 3,
    "tools": TOOLS,
    "tool_choice": "auto",
    "logprobs": True,
    "top_logprobs": 2,
    "prediction": {"type": "content", "content": "return x"},
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False},
}
RESPONSE = SAMPLED | {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "read a"}]},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": '{"path": "a"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "b"},
    ],
    "instructions": "Be brief.",
    "max_output_tokens": 3,
    "tools": [{"type": "function", "name": "read", "description": "reads", "parameters": SCHEMA, "strict": False}],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "read", "schema": SCHEMA}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "store": False,
    "metadata": {"a": "b"},
}
BODIES = {
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {k: MESSAGES[k] for k in ("model", "system", "messages", "tools", "tool_choice")},
    "/api/chat": CHAT,
    "/api/generate": GENERATE,
    "/api/show": {"model": "code", "name": "code", "verbose": False},
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT_COMPLETION,
    "/v1/responses": RESPONSE,
    "/tokenize": {"model": "code", "messages": CHAT_COMPLETION["messages"], "return_token_strs": True},
    "/detokenize": {"model": "code", "tokens": [1, 2, 3]},
}
WINDOW = 128  # tokens: a body that lost its limit is answered soon
COUNTS = [150, pytest.param(1500, marks=pytest.mark.long)]  # bodies of a route


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(max_model_len=WINDOW), ServeOptions(model="code", request_timeout=20)) as found:
        yield found


def has_form(path: str, told: Any) -> bool:
    """Whether an error has the form of its protocol."""
    if path.startswith("/api/"):
        return list(told) == ["error"] and isinstance(told["error"], str)
    error = told["error"]
    if path.startswith("/v1/messages"):
        return set(told) == {"type", "error", "request_id"} and set(error) == {"type", "message"}
    return set(told) == {"error"} and set(error) == {"message", "type", "param", "code"}


def changed(path: str, seed: int) -> Any:
    return json_changed(copy.deepcopy(BODIES[path]), random.Random(f"{path} {seed}"))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("path", BODIES)
def test_a_changed_body_is_answered_or_refused_in_its_form(
    path: str, count: int, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Infilling(live.service.prompts.tokenizer, (), (5, 6, 7), (5, 6, 7))
    monkeypatch.setattr(live.service, "infilling", form)
    answered, bad = 0, list[str]()
    with httpx.Client(base_url=live.url, headers={"anthropic-version": "2023-06-01"}) as client:
        for seed in range(count):
            body = changed(path, seed)
            response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            answered += response.status_code == 200
            good = response.status_code == 200 or (
                response.status_code < 500 and has_form(path, json.loads(response.content))
            )
            if not good:
                bad.append(f"seed {seed}: {response.status_code} {response.text[:200]} for {json.dumps(body)[:600]}")
    assert not bad, "\n".join(bad)
    assert 0 < answered < count


@pytest.mark.parametrize("count", COUNTS)
def test_a_changed_line_of_a_batch_is_answered_or_refused_in_its_form(count: int) -> None:
    lines = [
        BatchRequest(f"{path} {seed}", str(seed), path, body)
        for seed in range(count)
        for path in ENDPOINTS
        if isinstance(body := changed(path, seed), dict)
    ]
    bad, answered = list[str](), 0
    with BatchAnswerer(BatchOptions(model="builtin:code", served_model_name="code", max_model_len=WINDOW)) as answerer:
        for line, row in answerer.answers(lines):
            found = row["response"]
            answered += found["status_code"] == 200
            if found["status_code"] != 200 and (found["status_code"] >= 500 or not has_form(line.url, found["body"])):
                bad.append(f"{line.key}: {found} for {json.dumps(line.body)[:600]}")
    assert not bad, "\n".join(bad)
    assert 0 < answered < len(lines)
