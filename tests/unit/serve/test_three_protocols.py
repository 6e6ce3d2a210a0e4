"""The same meaning in three protocols: the same prompt, the same parameters, the same tokens and the same fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Live, builtin, serving

from outrider.engine.fingerprint import Fingerprints
from outrider.engine.request import Sequence
from outrider.serve.options import ServeOptions

TEMPLATE = (
    "{% if tools %}{{ tools|tojson }}\n{% endif %}{% for m in messages %}# {{ m.role }} {{ m.tool_call_id }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.id }} {{ c.function.name }} {{ c.function.arguments|tojson }}{% endfor %}"
    "\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"at": {"enum": ["sky", "sea"]}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = {"name": "look", "description": "Look at a place.", "parameters": SCHEMA}
USER, SYSTEM = {"role": "user", "content": "sort a list"}, {"role": "system", "content": "Be brief."}
SAMPLING = {
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 30,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
}
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": 0}
TURNS = [USER, {"role": "assistant", "content": "sorted(xs)"}, {"role": "user", "content": "reverse it"}]
CALLED = [USER, {"role": "assistant", "content": "I look.", "calls": True}, {"role": "tool", "content": "blue"}]
CASES: dict[str, dict[str, Any]] = {
    "sampling": {"messages": [USER], "sampling": {**SAMPLING, "repetition_penalty": 1.1}},
    "a system message and turns": {"messages": [SYSTEM, *TURNS], "sampling": SAMPLING},
    "stop sequences": {"messages": [USER], "sampling": GREEDY, "stop": ["\n", "return"]},
    "an answer that goes on": {"messages": TURNS[:2], "sampling": SAMPLING},
    "tools": {"messages": [SYSTEM, USER], "sampling": SAMPLING, "tools": [LOOK]},
    "a tool's result": {"messages": [SYSTEM, *CALLED], "sampling": SAMPLING, "tools": [LOOK]},
    "a schema": {"messages": [USER], "sampling": GREEDY, "schema": SCHEMA},
}


def with_calls(messages: list[Any], call: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages of a case, as chat completions and Ollama have them."""
    more = [
        {"tool_calls": [call]} if "calls" in m else {"tool_call_id": "c1"} if m["role"] == "tool" else {}
        for m in messages
    ]
    return [{k: v for k, v in m.items() if k != "calls"} | extra for m, extra in zip(messages, more, strict=True)]


def openai(messages: list[Any], sampling: dict[str, Any], stop: Any, tools: Any, schema: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": '{"at": "sky"}'}
    turns = with_calls(messages, {"id": "c1", "type": "function", "function": function})
    body = {"messages": turns, **sampling, "top_k": sampling["top_k"] or -1, "max_tokens": 20, "seed": 3}
    body |= {"stop": stop} if stop else {}
    body |= {"tools": [{"type": "function", "function": tool} for tool in tools]} if tools else {}
    body |= {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {}
    return body | (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}} if schema else {}
    )


def anthropic(messages: list[Any], sampling: dict[str, Any], stop: Any, tools: Any, schema: Any) -> dict[str, Any]:
    turns = list[dict[str, Any]]()
    for message in messages:
        if message["role"] == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [{"type": "text", "text": message["content"]}],
            }
            turns.append({"role": "user", "content": [result]})
        elif message["role"] != "system":
            use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "sky"}}
            text = {"type": "text", "text": message["content"]}
            turns.append({"role": message["role"], "content": [text, *([use] if "calls" in message else [])]})
    body: dict[str, Any] = {
        "messages": turns,
        **sampling,
        "top_k": sampling["top_k"] or -1,
        "max_tokens": 20,
        "seed": 3,
    }
    body |= {"system": SYSTEM["content"]} if messages[0] is SYSTEM else {}
    body |= {"stop_sequences": stop} if stop else {}
    named = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools]
    return (
        body
        | ({"tools": named} if tools else {})
        | ({"output_config": {"format": {"type": "json_schema", "schema": schema}}} if schema else {})
    )


def ollama(messages: list[Any], sampling: dict[str, Any], stop: Any, tools: Any, schema: Any) -> dict[str, Any]:
    options = {("repeat_penalty" if k == "repetition_penalty" else k): v for k, v in sampling.items()}
    turns = with_calls(messages, {"id": "c1", "function": {"name": "look", "arguments": {"at": "sky"}}})
    body = {
        "messages": turns,
        "options": {**options, "num_predict": 20, "seed": 3, **({"stop": stop} if stop else {})},
        "stream": False,
    }
    body |= {"tools": [{"type": "function", "function": tool} for tool in tools]} if tools else {}
    return body | ({"format": schema} if schema else {})


WAYS = {"/v1/chat/completions": openai, "/v1/messages": anthropic, "/api/chat": ollama}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=512)
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    with serving(llm, ServeOptions(model="code")) as live:
        yield live


def text(path: str, answer: dict[str, Any]) -> str:
    """The text of an answer."""
    if path == "/v1/messages":
        return "".join(block.get("text", "") for block in answer["content"])
    return (answer["choices"][0] if "choices" in answer else answer)["message"]["content"]


@pytest.mark.parametrize("case", CASES)
def test_the_same_meaning_has_the_same_tokens(live: Live, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    if case == "a schema":
        pytest.importorskip("llguidance")
    engine, made = live.service.engine, list[Sequence]()
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda requests: (made.extend(new := submit(requests)), new)[1])
    texts = list[str]()
    for path, way in WAYS.items():
        response = httpx.post(
            live.url + path,
            json={"model": "code", **way(**{"stop": None, "tools": (), "schema": None, **CASES[case]})},
        )
        assert response.status_code == 200, response.text
        texts.append(text(path, response.json()))
    assert texts == [texts[0]] * 3
    asked = [(s.request.prompt, s.request.params.with_(max_tokens=None)) for s in made]
    assert asked == [asked[0]] * 3
    assert [s.output for s in made] == [made[0].output] * 3
    assert made[0].output
    if case != "a schema":  # a grammar has no fingerprint
        prints = Fingerprints(live.service.runtime, "code")
        digests = {prints.of(s.request, s.output, s.finish and s.finish.finish).digest for s in made}
        assert len(digests) == 1
    else:
        assert json.loads(texts[0] if made[0].finish and made[0].finish.finish == "stop" else '{"at": "sky"}')[
            "at"
        ] in ("sky", "sea")
