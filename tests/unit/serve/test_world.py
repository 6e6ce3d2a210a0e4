"""What the world reported of other servers: the smallest request of each report, and what is right.

A report is named by its repository and number. Where several servers had the fault, the first one stands here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from serving import Live, builtin, serving

from outrider.serve.options import ServeOptions

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "x"}
Right = Callable[[Any], bool]


class Report(NamedTuple):
    """right: of the body of an answer, or the field that an error names."""

    source: str
    path: str
    body: dict[str, Any]
    right: Right | str | None = None


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(4, max_model_len=256), ServeOptions(model="code")) as live:
        yield live


def ask(live: Live, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
    usual: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
    if path == RESPONSES:
        usual = {"temperature": 0, "max_output_tokens": 4}
    elif path.startswith("/api/"):
        usual = {"stream": False}
    return httpx.post(live.url + path, json={"model": "code", **usual, **body}, **more)


def history(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HI, *messages, *HI]}


def results(content: Any, **more: Any) -> dict[str, Any]:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}
    return {"messages": [*HI, use, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": content, **more}]}]}  # fmt: skip


def wrote(count: int) -> Right:
    return lambda answer: answer["usage"]["completion_tokens"] == count


TAKEN = [
    Report("ggml-org/llama.cpp#25515", CHAT, {"messages": HI, "temperature": None, "top_p": None, "stop": None, "seed": None}),
    Report("vllm-project/vllm#13978", CHAT, history({"role": "assistant", "content": "a", "tool_calls": None, "audio": None})),
    Report("vllm-project/vllm#12937", CHAT, history({"role": "assistant", "content": "a", "tool_calls": []})),
    Report("ggml-org/llama.cpp#14353", CHAT, {"continue_final_message": True, "messages": [
        *HI, {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}]}),
    Report("tmc/langchaingo#667", CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    Report("a tool message of no text", CHAT, history({"role": "assistant", "content": None, "tool_calls": [CALL]}, {
        **RESULT, "content": None})),
    Report("arguments of a call that are no JSON", CHAT, history({"role": "assistant", "content": "", "tool_calls": [
        {**CALL, "function": {"name": "f", "arguments": ""}}]}, RESULT)),
    Report("numbers of Gson, Lua and R", CHAT, {"messages": HI, "max_tokens": 3.0, "seed": 1.0, "top_k": 5.0}, wrote(3)),
    Report("numbers of Gson, Lua and R", TEXT, {"prompt": "x", "max_tokens": "3", "temperature": "0.7"}, wrote(3)),
    Report("numbers of Gson, Lua and R", "/api/generate", {"prompt": "x", "options": {"num_predict": 3.0}},
           lambda answer: answer["eval_count"] == 3),
    Report("max_tokens beside its newer name", CHAT, {"messages": HI, "max_completion_tokens": 2}, wrote(2)),
    Report("vllm-project/vllm#4795", CHAT, {"messages": HI, "logprobs": True},
           lambda answer: answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []),
    Report("EleutherAI/lm-evaluation-harness#1411", TEXT, {"prompt": "x = 1", "max_tokens": 0, "echo": True, "logprobs": 1},
           lambda answer: answer["choices"][0]["text"] == "x = 1"),
    Report("an empty list of tools", CHAT, {"messages": HI, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}),
    Report("0xPlaygrounds/rig: a tool without parameters", CHAT, {"messages": HI, "tools": [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]}),
    Report("Claude Code asks for more than a model holds", MESSAGES, {
        "messages": HI, "max_tokens": 32000, "stop_sequences": ["\n"]}),
    Report("system blocks with cache_control", MESSAGES + "?beta=true", {"messages": HI, "system": [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
    Report("anthropics/anthropic-sdk-typescript#792", MESSAGES, history({"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "a"}]})),
    *(Report("forms of a tool_result", MESSAGES, results(given))
      for given in ("x", "", None, [], [{"type": "text", "text": "x"}])),
    Report("forms of a tool_result", MESSAGES, results("x", is_error=True, cache_control={"type": "ephemeral"})),
    Report("theopenco/llmgateway#2134", RESPONSES, {"store": False, "include": ["reasoning.encrypted_content"], "input": [
        {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "id": None, "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}]}),
    Report("openai/codex: text with a verbosity alone", RESPONSES, {"input": "hi", "text": {"verbosity": "low"}}),
    Report("ggml-org/llama.cpp#22659", RESPONSES, {"input": "hi"}, lambda answer: {
        "input_tokens_details", "output_tokens_details"} < set(answer["usage"])),
    Report("langchain-ai/langchain#12892", "/api/generate", {"prompt": "x", "options": {
        "num_predict": 2, "stop": None, "num_ctx": None, "top_k": None, "repeat_penalty": None, "num_thread": None}}),
    *(Report("forms of keep_alive", "/api/generate", {"keep_alive": given}, lambda answer: answer["done_reason"] == "load")
      for given in (-1, "5m", "1h30m", "-1", "300", None)),
    Report("the load of a model by /api/chat", "/api/chat", {"messages": []}, lambda answer: answer["done_reason"] == "load"),
]  # fmt: skip

REFUSED = [
    *(Report("vllm-project/vllm#55974", RESPONSES, {"input": [*HI, item]}, "input")
      for item in ({"type": "item_reference", "id": "x"}, {"type": "mcp_call"}, {"type": "bogus"}, {})),
    *(Report("ids outside of a vocabulary", TEXT, {"prompt": ids}) for ids in ([10**9], [2**63], [[]], [1, "a"], [True])),
    Report("ids outside of a vocabulary", TEXT, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    Report("a word that is empty", TEXT, {"prompt": "x", "bad_words": [""]}, "bad_words"),
    Report("a fraction of a token", CHAT, {"messages": HI, "max_tokens": 2.5}, "max_tokens"),
    Report("a fraction of a token", CHAT, {"messages": HI, "max_tokens": True}, "max_tokens"),
    Report("a call that no tool takes", CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    Report("a picture", MESSAGES, results([{"type": "image", "source": {"type": "base64", "data": "aa"}}])),
    Report("a picture", "/api/chat", {"messages": [{**HI[0], "images": ["aGk="]}]}),
]  # fmt: skip


@pytest.mark.parametrize("report", TAKEN, ids=lambda report: report.source)
def test_requests_that_clients_send_are_answered(live: Live, report: Report) -> None:
    answer = ask(live, report.path, report.body)
    assert answer.status_code == 200, answer.text
    assert report.right is None or report.right(answer.json()), answer.text


@pytest.mark.parametrize("report", REFUSED, ids=lambda report: report.source)
def test_requests_that_mean_nothing_are_refused_with_the_field(live: Live, report: Report) -> None:
    answer = ask(live, report.path, report.body)
    assert answer.status_code == 400, answer.text
    assert report.right is None or answer.json()["error"]["param"] == report.right, answer.text


BODIES = {
    "half of a pair": b'{"messages":[{"role":"user","content":"a\\ud83d"}]}',
    "a raw control": b'{"messages":[{"role":"user","content":"a\x00"}]}',
    "no number": b'{"temperature":NaN,"messages":[{"role":"user","content":"x"}]}',
    "no number that is finite": b'{"temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
    "deep": b'{"a":' * 2000,
    "cut": b'{"messages":[',
    "a comma": b'{"messages":[{"role":"user","content":"x"}],}',
    "UTF-16": b'{"messages":[{"role":"user","content":"a\\ud83d"}]}'.decode().encode("utf-16"),
    **{name: name.encode() for name in ("", "[]", "null", "5", '"x"')},
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/api/chat"])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_cannot_be_read_is_a_fault_of_the_client(live: Live, path: str, name: str) -> None:
    answer = httpx.post(live.url + path, content=BODIES[name], headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]


def test_a_body_that_is_compressed_is_refused_with_its_coding(live: Live) -> None:
    head = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(json.dumps({"messages": HI}).encode())
    answer = httpx.post(live.url + CHAT, content=body, headers=head)
    assert (answer.status_code, "gzip" in answer.text) == (415, True)


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/version", "/v1/models", "/api/tags", "/api/version"])
def test_clients_ask_with_head_whether_a_server_is_there(live: Live, path: str) -> None:
    answer = httpx.head(live.url + path)
    assert (answer.status_code, answer.content) == (200, b"")
