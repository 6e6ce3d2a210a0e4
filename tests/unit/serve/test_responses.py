"""OpenAI's Responses API, asked by OpenAI's own client: the texts are those of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import TEMPLATE, Live, builtin, serving

from outrider.serve.errors import Refused
from outrider.serve.options import ServeOptions
from outrider.serve.protocols.responses import ResponseStore

HELLO = [{"role": "user", "content": "sort a list"}]
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look at a place.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["sky", "sea"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    # a tool's answer must be seen by the model, and a call of its own
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}# calls {{ c.function.name }}\n{% endfor %}{% endfor %}"
    llm = builtin(2)
    llm.tokenizer.chat_template = calls + TEMPLATE  # type: ignore[union-attr]
    with serving(llm, ServeOptions(model="code")) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)


def events(live: Live, **body: Any) -> list[dict[str, Any]]:
    lines = live.post("/v1/responses", **body, stream=True).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_logprobs_come_where_they_are_asked_for(live: Live, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"input": "sort", "max_output_tokens": 6, "temperature": 0, "top_logprobs": 2}
    made = client.responses.create(model="code", include=["message.output_text.logprobs"], **body)
    told = made.output[0].content[0].logprobs  # type: ignore[union-attr]
    asked = {"messages": [{"role": "user", "content": "sort"}], "max_tokens": 6, "temperature": 0}
    expected = live.ask("/v1/chat/completions", **asked, logprobs=True, top_logprobs=2)
    assert [x.model_dump() for x in told] == expected["choices"][0]["logprobs"]["content"]
    found = events(live, **body)
    streamed = [x for event in found if event["type"] == "response.output_text.delta" for x in event["logprobs"]]
    assert streamed == expected["choices"][0]["logprobs"]["content"] == found[-4]["logprobs"]
    bare = client.responses.create(model="code", input="sort", max_output_tokens=2)
    assert bare.output[0].content[0].logprobs == []  # type: ignore[union-attr]


def test_a_conversation_goes_on_from_a_response_and_instructions_do_not(live: Live, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "code", "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(input="sort a list", instructions="Be brief.", **options)
    second = client.responses.create(input="reverse it", previous_response_id=first.id, **options)
    told = [*HELLO, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "reverse it"}]
    assert (
        second.output_text
        == live.ask("/v1/chat/completions", messages=told, max_tokens=12, temperature=0)["choices"][0]["message"][
            "content"
        ]
    )
    assert second.previous_response_id == first.id
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (
        first.output_text
        == live.ask("/v1/chat/completions", messages=system, max_tokens=12, temperature=0)["choices"][0]["message"][
            "content"
        ]
    )
    streamed = events(live, input="again", previous_response_id=second.id, max_output_tokens=4)[-1]["response"]
    third = client.responses.create(input="more", previous_response_id=streamed["id"], **options)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens  # type: ignore[union-attr]
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    unkept = client.responses.create(input="x", store=False, **options)
    for name in (second.id, unkept.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(name)
        with pytest.raises(openai.BadRequestError, match="send the whole conversation as input") as refused:
            client.responses.create(input="x", previous_response_id=name, **options)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    by_hand = client.responses.create(
        input=[*HELLO, *first.output, {"role": "user", "content": "reverse it"}], **options
    )  # type: ignore[list-item]
    assert by_hand.output_text == second.output_text


def test_a_result_answers_the_call_of_an_earlier_response(live: Live, client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    body: dict[str, Any] = {"input": "look at the sky", "tools": [LOOK], "parallel_tool_calls": False}
    made = client.responses.create(model="code", max_output_tokens=60, tool_choice="required", **body)
    [call] = made.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
    usual: dict[str, Any] = {"model": "code", "max_output_tokens": 8, "temperature": 0}
    last = client.responses.create(input=[result], previous_response_id=made.id, **usual)
    function = {"name": call.name, "arguments": call.arguments}
    told = [
        {"role": "user", "content": body["input"]},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "blue"},
    ]
    expected = live.ask("/v1/chat/completions", messages=told, max_tokens=8, temperature=0)["choices"][0]["message"][
        "content"
    ]
    assert last.output_text == expected


def test_a_wrong_method_is_told_all_methods_of_the_path(live: Live) -> None:
    response = httpx.patch(live.url + "/v1/responses/resp_1")
    assert (response.status_code, response.headers["allow"]) == (405, "DELETE, GET")
    assert httpx.get(live.url + "/v1/completions").headers["allow"] == "POST"


def kept(store: ResponseStore, names: list[str]) -> list[str]:
    """Which of the responses the store still has."""

    def has(name: str) -> bool:
        try:
            return store.get(name) is not None
        except Refused:
            return False

    return list(filter(has, names))


def test_the_store_is_bounded_in_number_and_bytes() -> None:
    store, names = ResponseStore(3, 4000), [*map(str, range(5))]
    for name in names:
        store.put({"id": name, "text": "x" * 100}, [])
    assert kept(store, names) == ["2", "3", "4"]
    store.get("3")
    store.get("4")
    store.get("2")  # it was used last, so another one goes
    store.put({"id": "5"}, [])
    with pytest.raises(Refused, match="the last 3 in memory"):
        store.get("3")
    assert store.get("2").response["id"] == "2"
    store.put({"id": "large"}, [{"x": "y" * 3900}])
    assert store.bytes <= 4000
    store.put({"id": "too large"}, [{"x": "y" * 5000}])
    assert (kept(store, [*names, "5", "large", "too large"]), store.bytes) == ([], 0)
    store.put({"id": "a"}, [])
    store.drop("a")
    assert store.bytes == 0
    none = ResponseStore(0, 4000)
    none.put({"id": "a"}, [])
    assert kept(none, ["a"]) == []
