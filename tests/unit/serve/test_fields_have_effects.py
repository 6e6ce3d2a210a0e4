"""Each declared field of each body changes what is answered, or is refused. One that did nothing would be a promise not kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from serving import Live, builtin, serving

from outrider.serve.protocols.anthropic import CountTokensRequest, MessagesRequest
from outrider.serve.protocols.responses import ResponsesRequest
from outrider.serve.requests import ChatRequest, CommonRequest, CompletionRequest

TEMPLATE = (
    "{% if tools %}<tool_call> {% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{{ reasoning_effort }}{{ note }}"
    "{% if enable_thinking %}think{% endif %}{% if add_generation_prompt %}# assistant:{% endif %}"
)
USER = [{"role": "user", "content": "sort a list"}]
SCHEMA = {
    "type": "object",
    "properties": {"path": {"enum": ["a", "b"]}},
    "required": ["path"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
CLAUDE = [{"name": "read", "input_schema": SCHEMA}]
LETTERS = [" ", "\n", "e", "(", "s", "t", "_", "i"]
END = "END"  # stands for the model's end token
ENDS = {"logit_bias": {END: 100}}
# field: what is sent without it, and its value. A field that is missing here is one that nothing shows.
Effects = dict[str, tuple[dict[str, Any], Any]]
COMMON: Effects = {
    "model": ({}, "other"),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "n": ({}, 2),
    "temperature": ({}, 0.0),
    "top_p": ({}, 0.01),
    "top_k": ({}, 1),
    "min_p": ({}, 1),
    "presence_penalty": ({"top_k": 1}, -2),
    "frequency_penalty": ({"top_k": 1}, -2),
    "repetition_penalty": ({"top_k": 1}, 1e5),
    "logit_bias": ({}, {"5": 100}),
    "seed": ({}, 4),
    "stop": ({}, LETTERS),
    "stop_token_ids": ({}, list(range(1000))),
    "include_stop_str_in_output": ({"stop": LETTERS}, True),
    "bad_words": ({"allowed_token_ids": [5, 6]}, [""]),
    "allowed_token_ids": ({}, [5]),
    "min_tokens": (ENDS, 3),
    "max_total_tokens": ({}, 4),
    "ignore_eos": (ENDS, True),
    "skip_special_tokens": (ENDS | {"ignore_eos": True}, False),
    "response_format": ({}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    "structured_outputs": ({}, {"choice": ["yes"]}),
    "prediction": ({}, {"type": "content", "content": "return"}),
    "disable_spec_decode": ({}, True),
    "num_speculative_tokens": ({}, 0),
    "method": ({}, "none"),
    "timeout": ({}, 1e-9),
    "detailed_metrics": ({}, True),
    "return_token_ids": ({}, True),
    "return_pieces": ({"stream": True}, True),
    "return_fingerprint": ({}, True),
    "continued_tokens": ({}, [5, 6]),
    "best_of": ({}, 3),
    "use_beam_search": ({}, True),
}
ASKED = {"tools": TOOLS, "tool_choice": "required"}
BODIES: dict[str, tuple[type, dict[str, Any], Effects]] = {
    "/v1/completions": (
        CompletionRequest,
        {"prompt": "x = ", "max_tokens": 8},
        {
            "prompt": ({}, "def f("),
            "logprobs": ({}, 0),
            "prompt_logprobs": ({}, 0),
            "echo": ({}, True),
            "max_tokens": ({}, 2),
            "suffix": ({}, "x"),
        },
    ),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": USER, "max_tokens": 8},
        {
            "messages": ({}, [*USER, *USER]),
            "max_tokens": ({}, 2),
            "max_completion_tokens": ({}, 2),
            "logprobs": ({}, True),
            "top_logprobs": ({"logprobs": True}, 2),
            "tools": ({}, TOOLS),
            "tool_choice": ({"tools": TOOLS}, "required"),
            "modalities": ({}, ["audio"]),
            "reasoning_effort": ({}, "low"),
            "chat_template_kwargs": ({}, {"note": "be brief"}),
            "add_generation_prompt": ({}, False),
            "continue_final_message": ({"messages": [*USER, {"role": "assistant", "content": "def"}]}, True),
        },
    ),
    "/v1/responses": (
        ResponsesRequest,
        {"input": "sort", "max_output_tokens": 8},
        {
            "input": ({}, "reverse"),
            "instructions": ({}, "Be brief."),
            "max_output_tokens": ({}, 2),
            "previous_response_id": ({}, "resp_1"),
            "store": ({}, False),
            "tools": ({}, [{"type": "function", "name": "read", "parameters": SCHEMA}]),
            "tool_choice": ({"tools": [{"type": "function", "name": "read", "parameters": SCHEMA}]}, "required"),
            "text": ({}, {"format": FORM}),
            "include": ({}, ["message.output_text.logprobs"]),
            "top_logprobs": ({}, 2),
            "truncation": ({}, "auto"),
            "reasoning": ({}, {"effort": "low"}),
            "metadata": ({}, {"a": "b"}),
            "chat_template_kwargs": ({}, {"note": "be brief"}),
        },
    ),
    "/v1/messages": (
        MessagesRequest,
        {"messages": USER, "max_tokens": 8},
        {
            "messages": ({}, [{"role": "user", "content": "reverse"}]),
            "max_tokens": ({}, 2),
            "system": ({}, "Be brief."),
            "stop_sequences": ({}, LETTERS),
            "tools": ({}, CLAUDE),
            "tool_choice": ({"tools": CLAUDE}, {"type": "any"}),
            "thinking": ({}, {"type": "enabled", "budget_tokens": 1024}),
            "output_config": ({}, {"format": {"type": "json_schema", "schema": SCHEMA}}),
            "output_format": ({}, {"type": "json_schema", "schema": SCHEMA}),
        },
    ),
}
# what no answer shows; the last tests do
ELSEWHERE = {"user", "metadata", "parallel_tool_calls"}
# fields of an answer that are not the same twice
VOLATILE = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "prompt_tokens_details",
    "input_tokens_details",
    "call_id",
}
VOLATILE |= {"cache_read_input_tokens", "input_tokens", "message_id", "total_duration", "load_duration"}
VOLATILE |= {"prompt_eval_duration", "eval_duration"}


def still(value: Any) -> Any:
    """An answer without what is not the same twice."""
    if isinstance(value, list):
        return [still(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if k not in VOLATILE}
    if isinstance(metrics := kept.get("metrics"), dict):
        kept["metrics"] = metrics["speculative_decoding"]
    return {k: still(v) for k, v in kept.items()}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=256)
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    with serving(llm) as found:
        yield found


@pytest.fixture(scope="module")
def usually(live: Live) -> Callable[[str, dict[str, Any]], Any]:
    """What a client sees without the field. It is asked for twice, and is the same twice."""
    known = dict[str, Any]()

    def ask(path: str, body: dict[str, Any]) -> Any:
        if (key := json.dumps([path, body])) not in known:
            known[key] = seen(live, path, body)
            assert known[key] == seen(live, path, body)
        return known[key]

    return ask


def seen(live: Live, path: str, body: dict[str, Any]) -> Any:
    """What a client sees of an answer."""
    content = json.dumps(body).replace(END, str(live.service.runtime.loaded.end_ids[0]))
    answer = httpx.post(live.url + path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return answer.status_code, [still(json.loads(line)) for line in lines if line.startswith("{")]


CASES = [
    (path, field)
    for path, (_, _, own) in BODIES.items()
    for field in (COMMON | own)
    if not (field in COMMON and field in own)
]


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_field_changes_the_answer_or_is_refused(path: str, field: str, live: Live, usually: Any) -> None:
    _, usual, own = BODIES[path]
    more, value = (COMMON | own)[field]
    base = {"seed": 3, "temperature": 0.9, **usual, **more}
    base = {"stop_sequences" if path == "/v1/messages" and k == "stop" else k: v for k, v in base.items()}
    before = usually(path, base)
    if path == "/v1/responses" and field == "stream_options":
        return  # its streams have the usage with or without it
    assert before[0] == 200
    assert before != seen(live, path, base | {field: value})


def declared(body: type) -> set[str]:
    """The fields of a body."""
    return {field.alias or name for name, field in body.model_fields.items()}


@pytest.mark.parametrize("path", BODIES)
def test_each_declared_field_is_tried(path: str) -> None:
    body, _, own = BODIES[path]
    assert declared(body) - set(COMMON | own) <= ELSEWHERE
    assert declared(CountTokensRequest) <= declared(MessagesRequest)
    assert set(COMMON) <= declared(CommonRequest)


@pytest.mark.parametrize("path", BODIES)
def test_the_client_of_a_text_is_its_user(path: str, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    clients, submit = list[str](), live.service.engine.submit

    def watched(requests: Any) -> Any:
        clients.extend(request.client for request in requests)
        return submit(requests)

    monkeypatch.setattr(live.service.engine, "submit", watched)
    given = {"metadata": {"user_id": "me"}} if path == "/v1/messages" else {"user": "me"}
    for more in ({}, given):
        seen(live, path, BODIES[path][1] | more)
    assert clients[0] != "me" == clients[1]
