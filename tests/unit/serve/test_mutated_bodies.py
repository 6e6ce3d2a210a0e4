"""Bodies changed at random, on the routes of other protocols: no server error, and each error in its form."""

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
from outrider.serve.options import ServeOptions
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
BODIES = {
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {k: MESSAGES[k] for k in ("model", "system", "messages", "tools", "tool_choice")},
    "/api/chat": CHAT,
    "/api/generate": GENERATE,
    "/v1/completions": COMPLETION,
}

COUNT = 150  # bodies of a route


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(), ServeOptions(model="code", request_timeout=20)) as found:
        yield found


def has_form(path: str, told: Any) -> bool:
    """Whether an error has the form of its protocol."""
    if path.startswith("/api/"):
        return list(told) == ["error"] and isinstance(told["error"], str)
    error = told["error"]
    if path.startswith("/v1/messages"):
        return set(told) == {"type", "error"} and told["type"] == "error" and set(error) == {"type", "message"}
    return set(told) == {"error"} and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", BODIES)
def test_a_changed_body_is_answered_or_refused_in_its_form(
    path: str, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Infilling(live.service.llm.tokenizer, (), (5, 6, 7), (5, 6, 7))
    monkeypatch.setattr(live.service, "infilling", form)
    answered, bad = 0, list[str]()
    with httpx.Client(base_url=live.url, timeout=60, headers={"anthropic-version": "2023-06-01"}) as client:
        for seed in range(COUNT):
            body = json_changed(copy.deepcopy(BODIES[path]), random.Random(f"{path} {seed}"))
            response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            answered += response.status_code == 200
            good = response.status_code == 200 or (
                response.status_code < 500 and has_form(path, json.loads(response.content))
            )
            if not good:
                bad.append(f"seed {seed}: {response.status_code} {response.text[:200]} for {json.dumps(body)[:600]}")
    assert not bad, "\n".join(bad)
    assert 0 < answered < COUNT
