"""All fields of all routes, crossed pairwise: an answer is 2xx, or 4xx with the field named, and no stream has an error.

Then the same bodies, changed at random, alone and as the lines of a batch: no server error, and each error in its form.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fuzz import json_changed
from serving import Live, builtin, serving

from outrider.core.infill import Infilling
from outrider.serve.batch import BODIES, BatchAnswerer, BatchRequest
from outrider.serve.options import BatchOptions, ServeOptions
from tests.support.crossed import pairs

NOT = object()  # the field is not sent
SCHEMA = {
    "type": "object",
    "properties": {"path": {"enum": ["a", "é"]}},
    "required": ["path"],
    "additionalProperties": False,
}
PARAMETERS = {"name": "read", "description": "", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": PARAMETERS}]
USER = [{"role": "user", "content": "sort 🙂"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
CALLED = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "b", "tool_call_id": "c1"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "read a"}]},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "b"},
]
TEXT = {"type": "text", "text": "read a", "cache_control": {"type": "ephemeral"}}
BLOCKS = [
    {"role": "user", "content": [TEXT]},
    {"role": "assistant", "content": [TEXT, {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [TEXT], "is_error": False}, TEXT],
    },
]
LOOKED = [
    *USER,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "read", "arguments": {"path": "a"}}}]},
    {"role": "tool", "content": "b", "tool_name": "read"},
]
# values that are valid alone
SAMPLING: dict[str, list[Any]] = {
    "temperature": [NOT, None, 0, 1e-9, 1.5, 1e6],
    "top_p": [NOT, None, 0, 0.5, 1],
    "top_k": [NOT, None, -1, 0, 1, 2**40],
    "min_p": [NOT, 0, 1],
}
SHARED: dict[str, list[Any]] = SAMPLING | {
    "presence_penalty": [NOT, None, -2, 2],
    "frequency_penalty": [NOT, -2, 2],
    "repetition_penalty": [NOT, 1e-6, 1.0, 1e6],
    "logit_bias": [NOT, None, {}, {"5": -100, "0": 100}, {str(n): -100 for n in range(900)}],
    "seed": [NOT, None, 0, -(2**63), 2**64 - 1],
    "stop_token_ids": [NOT, [], [5, 6]],
    "include_stop_str_in_output": [NOT, True],
    "bad_words": [NOT, None, [], ["é", " return"]],
    "allowed_token_ids": [NOT, None, [5], list(range(300))],
    "min_tokens": [NOT, None, 0, 3],
    "ignore_eos": [NOT, True],
    "skip_special_tokens": [NOT, None, False],
    "structured_outputs": [NOT, None, {"choice": ["yes", "🙂"]}, {"regex": "[a-z]{2}"}, {"json_object": True}],
    "prediction": [NOT, None, {"type": "content", "content": ""}, {"type": "content", "content": "return 🙂"}],
    "num_speculative_tokens": [NOT, 0, 3],
    "method": [NOT, "none", "prediction"],
    "detailed_metrics": [NOT, True],
    "user": [NOT, None, "", "é"],
    "stream": [NOT, None, True],
}
MORE = {
    "n": [NOT, None, 1, 2],
    "return_token_ids": [NOT, True],
    "return_pieces": [NOT, True],
    "stream_options": [NOT, None, {"include_usage": True, "continuous_usage_stats": True}],
}
FORMS = [
    NOT,
    None,
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
]
STOPS = [NOT, None, [], "\n", ["e", "🙂", "r" * 200]]
CHOICES = [NOT, None, "auto", "none", "required", {"type": "function", "function": {"name": "read"}}]
AXES: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": SHARED
    | MORE
    | {
        "prompt": ["x = ", ["def f(", "🙂"], [5, 6, 7], [[5], [6, 7]]],
        "max_tokens": [None, 0, 1, 4],
        "logprobs": [NOT, None, 0, 20],
        "prompt_logprobs": [NOT, 0, 3],
        "echo": [NOT, True],
        "stop": STOPS,
        "response_format": FORMS,
    },
    "/v1/chat/completions": SHARED
    | MORE
    | {
        "messages": [USER, CALLED],
        "max_tokens": [NOT, 4],
        "max_completion_tokens": [4, 1],
        "logprobs": [NOT, None, True],
        "top_logprobs": [NOT, None, 0, 20],
        "tools": [NOT, None, [], TOOLS],
        "tool_choice": CHOICES,
        "parallel_tool_calls": [NOT, False],
        "stop": STOPS,
        "response_format": FORMS,
    },
    "/v1/responses": SHARED
    | {
        "input": ["sort 🙂", USER, ITEMS],
        "max_output_tokens": [1, 4],
        "instructions": [NOT, None, "", "é"],
        "include": [NOT, [], ["message.output_text.logprobs"]],
        "top_logprobs": [NOT, 0, 20],
        "tools": [NOT, None, [], [{"type": "function", **PARAMETERS}]],
        "tool_choice": [*CHOICES[:-1], {"type": "function", "name": "read"}],
        "text": [NOT, {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}],
        "store": [NOT, False],
    },
    "/v1/messages": SHARED
    | {
        "messages": [USER, BLOCKS],
        "max_tokens": [1, 4],
        "system": [NOT, None, "", "é", [{"type": "text", "text": "é"}]],
        "stop_sequences": [NOT, None, [], ["\n", "🙂"]],
        "tools": [NOT, None, [], [{"name": "read", "input_schema": SCHEMA}]],
        "tool_choice": [
            NOT,
            None,
            *({"type": kind} for kind in ("auto", "any", "none")),
            {"type": "tool", "name": "read"},
        ],
        "thinking": [NOT, None, {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}],
        "output_config": [NOT, None, {"format": {"type": "json_schema", "schema": SCHEMA}}, {"effort": "low"}],
    },
}
OPTIONS: dict[str, list[Any]] = {
    **SAMPLING,
    "num_predict": [1, 4],
    "num_ctx": [NOT, 40, 4096],
    "seed": [NOT, None, -1, 0, 2**31],
    "stop": STOPS,
    "repeat_penalty": [NOT, 1e-6, 1.0, 2],
    "presence_penalty": [NOT, -2, 2],
    "frequency_penalty": [NOT, -2, 2],
    "stream": [NOT, False],
    "format": [NOT, None, "", "json", SCHEMA],
    "think": [NOT, None, False, True, "low"],
    "keep_alive": [NOT, None, "5m", -1, 0.5],
}
OPTIONS["top_k"] = [NOT, None, 0, 1, 2**40]
AXES["/api/generate"] = OPTIONS | {"prompt": ["x = 🙂"], "raw": [NOT, True], "system": [NOT, None, "", "é"]}
AXES["/api/chat"] = OPTIONS | {"messages": [USER, LOOKED], "tools": [NOT, None, [], TOOLS]}
TOP = {"stream", "format", "think", "keep_alive", "prompt", "raw", "system", "messages", "tools"}  # of Ollama's fields


def body_of(path: str, case: dict[str, Any]) -> dict[str, Any]:
    """The body of a case."""
    given = {"model": "code"} | {name: value for name, value in case.items() if value is not NOT}
    if not path.startswith("/api/"):
        return given
    options = {name: given.pop(name) for name in [*given] if name in OPTIONS and name not in TOP}
    return given | {"options": options | given.get("options", {})}


def fault(path: str, body: dict[str, Any], status: int, text: str) -> str | None:
    """What is wrong with an answer; None for nothing."""
    if status == 200:
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
        failed = [
            e
            for e in map(json.loads, events)
            if (e.get("error") and "type" not in e) or e.get("type") in ("error", "response.failed")
        ]
        return f"the stream has {failed}" if failed else None
    if not 400 <= status < 500:
        return f"{status}: {text}"
    error = json.loads(text)["error"]
    named = error if isinstance(error, str) else str(error.get("param", error["message"]))
    options = body.get("options")
    known = [*body, *(options if isinstance(options, dict) else ())]
    known.append("prompt is too long")  # Anthropic's words name no field
    return None if any(name in named for name in known) else f"no field is named: {text}"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(max_model_len=300), ServeOptions(model="code", request_timeout=60)) as found:
        yield found


def answers(live: Live, path: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to bodies, some at once."""

    async def ask() -> list[httpx.Response]:
        slots = asyncio.Semaphore(4)
        async with httpx.AsyncClient(base_url=live.url) as client:

            async def one(body: dict[str, Any]) -> httpx.Response:
                async with slots:
                    content = json.dumps(body)
                    return await client.post(path, content=content, headers={"content-type": "application/json"})

            return await asyncio.gather(*map(one, bodies))

    return asyncio.run(ask())


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("path", AXES)
def test_fields_that_meet_are_answered_or_refused_by_name(path: str, seed: int, live: Live) -> None:
    bodies = [body_of(path, case) for case in pairs(AXES[path], seed)]
    found = answers(live, path, bodies)
    bad = [
        f"{why[:300]} for {json.dumps(body)[:700]}"
        for body, answer in zip(bodies, found, strict=True)
        if (why := fault(path, body, answer.status_code, answer.text)) is not None
    ]
    assert not bad, f"{len(bad)} of {len(bodies)}:\n" + "\n".join(bad[:12])
    assert sum(answer.status_code == 200 for answer in found) > len(bodies) / 10


# ------------------------------------------------------------------------------------------------ bodies changed at random

COUNTS = [40, pytest.param(1500, marks=pytest.mark.long)]  # bodies of a route
OTHERS: dict[str, Any] = {
    "/v1/messages/count_tokens": {
        "model": "code",
        "messages": BLOCKS,
        "system": [TEXT],
        "tool_choice": {"type": "auto"},
    },
    "/api/show": {"model": "code", "name": "code", "verbose": False},
    "/tokenize": {"model": "code", "messages": CALLED, "return_token_strs": True},
    "/detokenize": {"model": "code", "tokens": [1, 2, 3]},
}


def has_form(path: str, told: Any) -> bool:
    """Whether an error has the form of its protocol."""
    if path.startswith("/api/"):
        return list(told) == ["error"] and isinstance(told["error"], str)
    error = told["error"]
    if path.startswith("/v1/messages"):
        return set(told) == {"type", "error", "request_id"} and set(error) == {"type", "message"}
    return set(told) == {"error"} and set(error) == {"message", "type", "param", "code"}


def changed(path: str, count: int) -> list[Any]:
    """Bodies of a route, each with a change. The first ones have their longest conversation."""
    cases = [body_of(path, case) for case in pairs(AXES[path])] if path in AXES else [OTHERS[path]]
    return [json_changed(copy.deepcopy(cases[n % len(cases)]), random.Random(f"{path} {n}")) for n in range(count)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("path", [*AXES, *OTHERS])
def test_a_changed_body_is_answered_or_refused_in_its_form(
    path: str, count: int, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Infilling(live.service.prompts.tokenizer, (), (5, 6, 7), (5, 6, 7))  # type: ignore[arg-type]
    monkeypatch.setattr(live.service, "infilling", form)
    bodies = changed(path, count)
    found = answers(live, path, bodies)
    bad = [
        f"{answer.status_code} {answer.text[:200]} for {json.dumps(body)[:600]}"
        for body, answer in zip(bodies, found, strict=True)
        if answer.status_code != 200 and (answer.status_code >= 500 or not has_form(path, answer.json()))
    ]
    assert not bad, "\n".join(bad)
    assert 0 < sum(answer.status_code == 200 for answer in found) < count


@pytest.mark.parametrize("count", COUNTS)
def test_a_changed_line_of_a_batch_is_answered_or_refused_in_its_form(count: int) -> None:
    lines = [
        BatchRequest(f"{path} {n}", str(n), path, body)
        for path in BODIES
        for n, body in enumerate(changed(path, count))
        if isinstance(body, dict)
    ]
    statuses, bad = list[int](), list[str]()
    with BatchAnswerer(BatchOptions(model="builtin:code", served_model_name="code", max_model_len=300)) as answerer:
        for line, row in answerer.answers(lines):
            status, body = row["response"]["status_code"], row["response"]["body"]
            statuses.append(status)
            if status != 200 and (status >= 500 or not has_form(line.url, body)):
                bad.append(f"{line.key}: {body} for {json.dumps(line.body)[:600]}")
    assert not bad, "\n".join(bad)
    assert 0 < statuses.count(200) < len(lines)
