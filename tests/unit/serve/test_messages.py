"""Anthropic's Messages API: its shapes, its events in their order, and the texts of chat completions."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as quick
from hypothesis import strategies as st
from serving import TEMPLATE, Live, builtin, serving

from outrider.serve.options import ServeOptions
from outrider.serve.protocols.anthropic import MessagesRequest
from outrider.serve.thoughts import ThinkingReader

HELLO = [{"role": "user", "content": "sort a list"}]
LOOK = {
    "name": "look",
    "description": "Look at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"at": {"enum": ["sky", "sea"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
MORE = (
    "{% for m in messages %}{{ m.reasoning_content }}{% for c in m.tool_calls or [] %}# calls {{ c.function.name }}\n"
)
MORE += "{% endfor %}{% endfor %}{% if enable_thinking %}# </think>\n{% endif %}"
BILLED = "x-anthropic-billing-header: cc_version=2.1; cch={};\nBe brief."


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=512)
    llm.tokenizer.chat_template = MORE + TEMPLATE  # type: ignore[union-attr]
    with serving(llm, ServeOptions(model="code"), prefix_bytes=1 << 24) as live:
        yield live


def ask(live: Live, path: str = "/v1/messages", **body: Any) -> dict[str, Any]:
    response = httpx.post(live.url + path, json={"max_tokens": 24, "messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chat(live: Live, **body: Any) -> dict[str, Any]:
    return ask(live, "/v1/chat/completions", **body)["choices"][0]


def chat_of(messages: list[Any], system: Any = None) -> MessagesRequest:
    return MessagesRequest.model_validate({"messages": messages, "system": system, "max_tokens": 1})


def said(answer: dict[str, Any]) -> str:
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def events(live: Live, **body: Any) -> list[dict[str, Any]]:
    sent = {"max_tokens": 24, "messages": HELLO, **body, "stream": True}
    response = httpx.post(live.url + "/v1/messages", json=sent)
    assert response.status_code == 200, response.text
    pairs = [part.split("\n") for part in response.text.removesuffix("\n\n").split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [event["type"] for event in found]
    return found


def kinds(found: list[dict[str, Any]]) -> list[str]:
    """The types of events, without `content_block_` and repetitions."""
    names = [event["type"].removeprefix("content_block_") for event in found]
    return [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]


def test_a_message_has_the_text_of_a_chat_and_every_parameter_counts(live: Live) -> None:
    usual = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "seed": 3, "repetition_penalty": 1.1}
    expected = chat(live, **usual)
    made = ask(live, model="code", **usual)
    assert said(made) == expected["message"]["content"]
    assert (made["type"], made["role"], made["model"], made["seed"]) == ("message", "assistant", "code", 3)
    assert made["id"].startswith("msg_")
    parts = [
        {"type": "text", "text": "sort "},
        {"type": "text", "text": "a list", "cache_control": {"type": "ephemeral"}},
    ]
    assert said(ask(live, messages=[{"role": "user", "content": parts}], **usual)) == said(made)
    for name in usual:
        body = {"temperature": 1.0, "seed": 4, name: usual[name]}
        assert said(ask(live, **body)) == chat(live, **body)["message"]["content"]
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        told = [{"role": "system", "content": "Be brief."}, *HELLO]
        assert said(ask(live, system=system, seed=1)) == chat(live, messages=told, seed=1)["message"]["content"]
    assert (
        said(ask(live, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "x"}], seed=1))
        == (chat(live, messages=[{"role": "system", "content": "Be\n\nx"}, *HELLO], seed=1)["message"]["content"])
    )


def test_an_answer_goes_on_from_the_text_of_the_assistant(live: Live) -> None:
    text = said(ask(live, temperature=0))
    begun = [*HELLO, {"role": "assistant", "content": text[:9]}]
    on = ask(live, messages=begun, temperature=0, max_tokens=24)
    prompt = f"# user: sort a list\n# assistant: {text[:9]}"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 24}
    expected = httpx.post(live.url + "/v1/completions", json=body).json()
    assert said(on) == expected["choices"][0]["text"]
    assert on["usage"]["input_tokens"] + on["usage"]["cache_read_input_tokens"] == expected["usage"]["prompt_tokens"]


def test_the_events_of_a_stream_add_up_to_the_message(live: Live) -> None:
    body = {"temperature": 0.8, "seed": 5, "max_tokens": 30, "system": "Answer in a few words, and say why. " * 4}
    found, whole = events(live, **body), ask(live, **body)
    assert kinds(found) == ["message_start", "ping", "start", "delta", "stop", "message_delta", "message_stop"]
    first, end = found[0]["message"], found[-2]
    assert (first["content"], first["stop_reason"], first["usage"]["output_tokens"]) == ([], None, 0)
    assert first["usage"]["input_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    block = next(event for event in found if event["type"] == "content_block_start")
    assert (block["index"], block["content_block"]) == (0, {"type": "text", "text": "", "citations": None})
    deltas = [event for event in found if event["type"] == "content_block_delta"]
    assert {(event["index"], event["delta"]["type"]) for event in deltas} == {(0, "text_delta")}
    assert len(deltas) > 3
    assert "".join(event["delta"]["text"] for event in deltas) == said(whole)
    assert end["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert whole["usage"]["cache_read_input_tokens"] > 0  # the stream had read the prompt


def test_the_stop_reason_says_why_a_text_ended(live: Live) -> None:
    cut = ask(live, max_tokens=3, ignore_eos=True)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 3)
    text = said(ask(live, temperature=0))
    stop = ask(live, temperature=0, stop_sequences=[text[4:8]])
    assert (stop["stop_reason"], stop["stop_sequence"]) == ("stop_sequence", text[4:8])
    assert said(stop) == text[: text.index(text[4:8])]
    full = ask(live, max_tokens=4000, ignore_eos=True, temperature=0)
    assert full["stop_reason"] == "model_context_window_exceeded"
    empty = ask(live, temperature=0, stop_sequences=[text[0]])
    assert (empty["content"], empty["stop_reason"]) == ([], "stop_sequence")
    late = events(live, max_tokens=400, ignore_eos=True, timeout=0.05)[-1]
    assert (late["type"], late["error"]["type"]) == ("error", "timeout_error")
    ended = ask(live, allowed_token_ids=[live.service.runtime.loaded.end_ids[0]])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


def test_tools_are_called_and_their_results_are_read(live: Live) -> None:
    pytest.importorskip("llguidance")
    body: dict[str, Any] = {"tools": [LOOK, {**LOOK, "name": "other"}], "max_tokens": 60, "seed": 1}
    choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    made = ask(live, **body, tool_choice=choice)
    [call] = made["content"]
    assert (call["type"], call["name"], made["stop_reason"]) == ("tool_use", "look", "tool_use")
    assert call["input"]["at"] in ("sky", "sea")
    found = events(live, **body, tool_choice=choice)
    assert kinds(found) == ["message_start", "ping", "start", "delta", "stop", "message_delta", "message_stop"]
    assert found[2]["content_block"]["input"] == {}
    assert json.loads(found[3]["delta"]["partial_json"]) == call["input"]
    assert ask(live, **body, tool_choice={**choice, "type": "any"})["stop_reason"] == "tool_use"
    assert ask(live, **body, tool_choice={"type": "none"})["content"][0]["type"] == "text"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "blue"}]}
    turns = [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": "look", "arguments": json.dumps(call["input"])}}
    ]
    told = [
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call["id"], "content": "blue"},
        {"role": "user", "content": "so?"},
    ]
    expected = chat(live, messages=[*HELLO, *told], seed=2)["message"]["content"]
    assert said(ask(live, messages=[*HELLO, *turns], seed=2)) == expected
    turns[1]["content"][0]["is_error"] = True  # type: ignore[index]
    read = chat_of([*HELLO, *turns]).chat("keep", lambda: None).messages
    assert read[2] == {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": "Error: blue"}


def test_tokens_are_counted_as_the_model_reads_them(live: Live) -> None:
    for body in (
        {},
        {"system": "Be brief."},
        {"tools": [LOOK]},
        {"thinking": {"type": "enabled", "budget_tokens": 99}},
    ):
        usage = ask(live, "/v1/messages", max_tokens=1, **body)["usage"]
        counted = httpx.post(live.url + "/v1/messages/count_tokens", json={"messages": HELLO, **body})
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_thought_is_a_block_of_its_own(live: Live) -> None:
    pytest.importorskip("llguidance")
    body: dict[str, Any] = {"structured_outputs": {"regex": "<think>hm, ha</think>\nyes"}, "temperature": 0}
    made = ask(live, **body)
    thought = {"type": "thinking", "thinking": "hm, ha", "signature": made["id"]}
    assert made["content"] == [thought, {"type": "text", "text": "yes", "citations": None}]
    found = events(live, **body)
    assert kinds(found) == [
        "message_start", "ping", "start", "delta", "stop", "start", "delta", "stop", "message_delta", "message_stop"
    ]  # fmt: skip
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm, ha"
    last = [delta["type"] for delta in deltas if delta["type"] != "text_delta"][-1]
    assert last == "signature_delta"
    turns = [*HELLO, {"role": "assistant", "content": made["content"]}, {"role": "user", "content": "so?"}]
    read = chat_of(turns).chat("keep", lambda: None).messages
    assert read[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm, ha"}


@quick(max_examples=200)
@given(
    st.sampled_from(
        [
            "",
            "a",
            " <think>\n x </thi y\n</think>\n\nb <think> c",
            "<thin",
            "<think>",
            "  ",
            "x </think> y",
            "<think> a \n </think>",
        ]
    ),
    st.booleans(),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_how_a_text_is_cut_does_not_change_its_thought(text: str, inside: bool, cuts: list[int]) -> None:
    def read(pieces: list[str]) -> tuple[str, str]:
        reader = ThinkingReader("x <think>\n" if inside else "x")
        parts = [reader.feed(piece) for piece in pieces] + [reader.feed("", last=True)]
        return "".join(a for a, _ in parts), "".join(b for _, b in parts)

    at = [0, *sorted(cuts), len(text)]
    assert read([text[a:b] for a, b in pairwise(at)]) == read([text])
    if text.startswith(" <think>") and not inside:
        assert read([text]) == ("x </thi y", "b <think> c")


def test_header_lines_break_no_prefix_where_the_operator_says_so(
    live: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(how: str, cch: int) -> list[dict[str, Any]]:
        system = [{"type": "text", "text": BILLED.format(cch)}]
        return chat_of(HELLO, system).chat(how, lambda: None).messages

    brief = {"role": "system", "content": "Be brief."}
    assert read("keep", 1)[0]["content"] == BILLED.format(1)
    assert read("drop", 1) == read("drop", 2) == [brief, *HELLO]
    moved = read("move", 1)
    assert moved[0] == brief
    assert moved[1]["content"] == "sort a list\n\nx-anthropic-billing-header: cc_version=2.1; cch=1;"
    assert read("drop", 0)[0] == chat_of(HELLO, "Be brief.").chat("keep", lambda: None).messages[0]
    with caplog.at_level(logging.WARNING, "outrider"):
        monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
        for cch in range(2):
            ask(live, system=BILLED.format(cch), max_tokens=1)
    told = {id(record): record for record in caplog.records if "--client-headers drop" in record.getMessage()}
    assert len(told) == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role is user, assistant or system"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content.0 is an image"),
    ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "has type 'search_result'"),
    ({"messages": [{"role": "user", "content": 5}]}, "a text or a list of blocks"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
        "no message before it",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": []}]}]},
        "answers the call '[]'",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]}, "input is an object"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools of its own"),
    ({"tool_choice": {"type": "some"}}, "tool_choice is"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "no tools"),
    ({"stop": "x"}, "stop_sequences"),
    ({"mcp_servers": [{}]}, "offer their tools"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format is"),
    ({"systm": "x", "temprature": 1}, "did you mean"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_message_cannot_be_is_refused_in_the_form_of_its_errors(live: Live, body: dict, words: str) -> None:
    response = httpx.post(live.url + "/v1/messages", json={"max_tokens": 5, "messages": HELLO, **body})
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]
    assert set(error) == {"type", "error", "request_id"}


def test_errors_before_the_route_have_its_form_and_a_key_may_come_in_its_header() -> None:
    with serving(builtin(1), ServeOptions(model="code", api_key=["s3cret"], max_body=1)) as live:
        url, body = live.url + "/v1/messages", {"model": "code", "max_tokens": 2, "messages": HELLO}
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
