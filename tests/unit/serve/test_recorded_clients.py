"""Requests as clients send them, and what these clients read of the answers.

Claude Code 2.1.331 was recorded; its texts are shortened. Those of Open WebUI 0.12.4 and of Continue's editor extension are what
their code makes: `open_webui/utils/payload.py` and `core/llm/llms/Ollama.ts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Live, builtin, serving

from outrider.core.infill import Infilling
from outrider.serve.options import ServeOptions
from outrider.serve.protocols.anthropic import MessagesRequest
from outrider.serve.protocols.ollama import OllamaChatRequest

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "sort a list"}]
CALL = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": {"at": "sky"}}}
TOOL = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
LOOKED = [
    *ASKED,
    {"role": "assistant", "tool_calls": [CALL], "content": ""},
    {"role": "tool", "content": "blue", "tool_call_id": "call_1"},
]
# Open WebUI's switches under "Advanced Params", with the values it shows
OPTIONS = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "seed": 0, "stop": ["\n\n"], "num_predict": 8, "num_ctx": 2048,
    "num_keep": 24, "num_batch": 512, "num_gpu": 0, "num_thread": 2, "use_mmap": True, "use_mlock": False, "mirostat": 0,
    "mirostat_eta": 0.1, "mirostat_tau": 5.0, "repeat_last_n": -1, "repeat_penalty": 1.1,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
LOOK = [{"type": "function", "function": TOOL}]
GAP = "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>"
STOPS = ["<|endoftext|>", "/src/", "```"]
# path, body, what the client reads of the last line: Open WebUI, then Continue
REQUESTS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/api/chat", {"messages": ASKED, "options": OPTIONS, "keep_alive": "5m"}, ["message", "eval_count"]),
    ("/api/chat", {"messages": ASKED, "stream": False, "options": {"num_predict": 8}, "think": False}, ["message"]),
    ("/api/chat", {"messages": LOOKED, "options": {"num_predict": 4}, "tools": LOOK}, ["message", "prompt_eval_count"]),
    ("/api/generate", {"prompt": "", "keep_alive": 0}, ["response", "done"]),
    ("/api/show", {}, ["details", "model_info", "capabilities"]),
    ("/v1/chat/completions", {
        "messages": ASKED, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4,
        "reasoning_effort": "low"}, ["choices", "usage"]),
    ("/api/chat", {
        "messages": ASKED, "options": {"num_predict": 8, "num_ctx": 8192}, "keep_alive": 1800, "tools": LOOK}, ["message"]),
    ("/api/generate", {"prompt": GAP, "raw": True, "keep_alive": 1800, "options": {
        "temperature": 0.01, "num_predict": 8, "stop": STOPS, "num_ctx": 8192}}, ["response"]),
]  # fmt: skip
BILL = "x-anthropic-billing-header: cc_version=2.1.331.{}; cc_entrypoint=sdk-cli;"
DEFERRED = {
    "name": "Fetch",
    "description": "Fetch a page.",
    "input_schema": {"type": "object", "properties": {}},
    "defer_loading": True,
}


def claude(bill: str = "32c", **more: Any) -> dict[str, Any]:
    """A request of Claude Code."""
    kept = {"cache_control": {"type": "ephemeral"}}
    user = [
        {"type": "text", "text": "<system-reminder>\nAttribution.\n</system-reminder>\n"},
        {"type": "text", "text": "Say hello."},
    ]
    system = [BILL.format(bill), "You are an agent.", "\nYou work with files."]
    return {
        "model": "code",
        "max_tokens": 8,
        "stream": True,
        "system": [{"type": "text", "text": text} | (kept if n else {}) for n, text in enumerate(system)],
        "messages": [
            {"role": "user", "content": user},
            {"role": "system", "content": [{"type": "text", "text": "# Environment\nlinux", **kept}]},
        ],
        "tools": [
            {"name": "ToolSearch", "description": "Find a tool.", "input_schema": {"type": "object", "properties": {}}},
            DEFERRED,
        ],
        "metadata": {"user_id": '{"device_id":"b7","account_uuid":"","session_id":"54"}'},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    } | more


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(2, max_model_len=512), ServeOptions(model="code"), prefix_bytes=1 << 24) as live:
        yield live


@pytest.mark.parametrize(("path", "body", "read"), REQUESTS)
def test_a_recorded_request_is_answered_with_what_its_client_reads(
    live: Live, path: str, body: dict[str, Any], read: list[str]
) -> None:
    response = httpx.post(live.url + path, json={"model": "code", **body}, headers={"authorization": "Bearer x"})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line and line != "data: [DONE]"]
    last = json.loads(lines[-1])
    assert all(name in last for name in read), last
    if path == "/api/chat":
        assert last["message"]["role"] == "assistant"


def test_a_result_keeps_the_id_of_its_call() -> None:
    made = OllamaChatRequest.model_validate({"model": "code", "messages": LOOKED}).request(512, True)
    assert made.messages[-1] == {"role": "tool", "content": "blue", "tool_call_id": "call_1"}


def test_claude_code_is_answered_and_its_bill_breaks_no_prefix(live: Live) -> None:
    headers = {
        "x-api-key": "none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,effort-2025-11-24",
    }
    ends = list[dict[str, Any]]()
    for bill in ("32c", "9f1"):
        response = httpx.post(live.url + "/v1/messages?beta=true", json=claude(bill), headers=headers)
        assert response.status_code == 200, response.text
        assert response.headers["request-id"]
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        assert events[0]["message"]["id"].startswith("msg_")
        ends.append(events[-2]["usage"])
    assert ends[1]["cache_read_input_tokens"] >= ends[0]["input_tokens"] - 16 > 0
    counted = {k: v for k, v in claude().items() if k not in ("max_tokens", "stream")}
    assert (
        httpx.post(live.url + "/v1/messages/count_tokens?beta=true", json=counted).json()["input_tokens"]
        == ends[0]["input_tokens"]
    )


def test_a_deferred_tool_is_offered_when_a_result_refers_to_it() -> None:
    def offered(**more: Any) -> tuple[list[str], list[dict[str, Any]]]:
        made = MessagesRequest.model_validate(claude(**more)).chat()
        return [tool["function"]["name"] for tool in made.tools or ()], made.messages

    assert offered()[0] == ["ToolSearch"]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Fetch"}]}
    turns = [
        *claude()["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    names, messages = offered(messages=turns)
    assert names == ["ToolSearch", "Fetch"]
    assert messages[-1]["content"] == "The tool Fetch can be called now."


def test_the_digest_changes_with_a_start_and_editors_see_that_a_model_fills_gaps(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> tuple[str, str]:
        [model] = httpx.get(live.url + "/api/tags").json()["models"]
        return model["digest"], httpx.post(live.url + "/api/show", json={"name": "code"}).json()["template"]

    before, template = read()
    assert len(before) == 64
    assert (before, template) == read()
    assert ".Suffix" not in template
    form = Infilling(live.service.prompts.tokenizer, (), (5, 6, 7), (5, 6, 7))  # type: ignore[arg-type]
    monkeypatch.setattr(live.pool.loaded[0], "infilling", form)  # a request before unloaded the first one
    monkeypatch.setattr(live.pool, "started", live.pool.started + 1)
    after, template = read()
    assert after != before
    assert ".Suffix" in template
