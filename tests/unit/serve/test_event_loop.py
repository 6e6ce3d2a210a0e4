"""Nothing on the event loop grows with a request: bodies are bounded before they are read, long work has threads of its own."""

from __future__ import annotations

import asyncio
import difflib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from pydantic import BaseModel, ValidationError
from serving import Live, builtin, serving

from outrider.core.outputs import Delta
from outrider.engine.prompts import PromptEncoder
from outrider.serve import requests as protocol
from outrider.serve.app import MAX_TOKENIZE
from outrider.serve.encoding import LONG, WIDE
from outrider.serve.protocols.responses import ResponsesRequest
from outrider.serve.requests import (
    MAX_PARTS,
    MAX_UNKNOWN,
    MAX_VALUES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    check_body,
)

MANY = 100_000


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(2, max_model_len=512)) as live:
        yield live


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ([1] * MAX_VALUES, True),
        ([1] * (MAX_VALUES + 2), False),
        ([[]] * (MAX_PARTS - 3), True),
        ([[]] * (MAX_PARTS - 2), False),
        ({str(i): 1 for i in range(MAX_PARTS)}, False),
        (",[{:" * MAX_VALUES, True),  # of a text they do not count
        ('\\",' * MAX_VALUES, True),
        (["\\", *[1] * (MAX_VALUES + 2), "\\"], False),
        (['\\"', *[1] * (MAX_VALUES + 2)], False),
    ],
    ids=["ids", "too many ids", "lists", "too many lists", "names", "text", "escapes", "backslashes", "quotes"],
)
def test_values_are_counted_without_reading_them(value: Any, fits: bool) -> None:
    body = json.dumps({"prompt": value}).encode()
    if fits:
        check_body(body)
    else:
        with pytest.raises(ValueError, match="send fewer"):
            check_body(body)


@pytest.mark.parametrize(
    ("body", "finite"),
    [
        (b'{"a": 1e308, "b": 12.5e-400, "c": "NaN, 1e999 \\" Infinity"}', True),
        (b'{"a": [-Infinity]}', False),
        (b'{"a": NaN}', False),
        (b'{"a": 1e309}', False),
        (b'{"a": 0.1E+400}', False),
        (b'{"a": ' + b"1" * 400 + b".5}", False),
    ],
)
def test_a_number_is_finite(body: bytes, finite: bool) -> None:
    if finite:
        check_body(body)
    else:
        with pytest.raises(ValueError, match="is finite"):
            check_body(body)


def test_digits_are_read_once() -> None:
    """A search that began anew at each digit would take minutes."""
    check_body(b'{"a": "' + b"1" * 2_000_000 + b'"}')
    check_body(b'{"a": [' + b"1" * 300 + (b"," + b"1" * 300) * 3000 + b"]}")


def test_a_body_with_too_many_values_is_not_read(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda body, **more: read.append(len(body)) or loads(body, **more))
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        answer = httpx.post(live.url + path, json={"prompt": [1] * (2 * MAX_VALUES)})
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
        assert "more than 250000 values" in answer.text
    assert max(read, default=0) < MANY


@pytest.mark.parametrize(
    ("cls", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": [["x"]] * MANY}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "x", "bad_words": [1] * MANY}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * MANY}),
        (CompletionRequest, {"prompt": "x", "continued_tokens": ["x"] * MANY}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(MANY)}}),
        (CompletionRequest, {"prompt": "x", "structured_outputs": {"choice": [1] * MANY}}),
        (CompletionRequest, {"prompt": "x", "prediction": {"type": "content", "content": [1] * MANY}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{}], "tools": [1] * MANY}),
        (ResponsesRequest, {"input": [1] * MANY}),
        (ResponsesRequest, {"input": "x", "include": [1] * MANY}),
        (ResponsesRequest, {"input": "x", "metadata": {str(i): 1 for i in range(MANY)}}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)
def test_validation_stops_at_the_first_wrong_item(cls: type[BaseModel], body: dict) -> None:
    with pytest.raises(ValidationError) as wrong:
        cls.model_validate(body)
    assert wrong.value.error_count() < 8


def test_a_field_that_only_the_library_has_is_ignored(live: Live) -> None:
    assert live.post("/v1/completions", prompt="x", max_tokens=1, stops=["x"]).status_code == 200


def test_many_unknown_fields_are_refused_and_few_are_compared(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    close = difflib.get_close_matches
    monkeypatch.setattr(
        protocol.difflib, "get_close_matches", lambda key, *a, **b: compared.append(key) or close(key, *a, **b)
    )
    answer = live.post("/v1/completions", prompt="x", **{f"field{i}": 1 for i in range(MAX_UNKNOWN + 1)})
    assert (answer.status_code, compared) == (400, [])
    assert "101 fields that do not exist" in answer.text
    few = {f"field{i}": 1 for i in range(3)}
    assert live.post("/v1/completions", prompt="x", max_tokens=1, **few, **{"k" * 5000: 1}).status_code == 200
    assert compared == list(few)


@pytest.fixture
def encoded(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each text that is encoded."""
    found, kind = list[int](), type(live.service.prompts.tokenizer)
    encode = kind.__call__

    def note(self: Any, text: str, *args: Any, **more: Any) -> Any:
        found.append(len(text))
        return encode(self, text, *args, **more)

    monkeypatch.setattr(kind, "__call__", note)
    return found


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(live: Live, encoded: list[int]) -> None:
    room = live.service.encoder.max_length
    longest = max(map(len, live.service.prompts.tokenizer.get_vocab()))  # type: ignore[union-attr]
    over, dense = "def " * (room * longest), "0" * (room * WIDE + 1)
    for text, most in ((over, 0), (dense, room * WIDE // 2)):
        chat = [{"role": "user", "content": text}]
        for path, body, param in (
            ("/v1/completions", {"prompt": text}, "prompt"),
            ("/v1/completions", {"prompt": [text, "x"]}, "prompt"),
            ("/v1/chat/completions", {"messages": chat}, "messages"),
            ("/v1/responses", {"input": text}, "input"),
        ):
            encoded.clear()
            answer = live.post(path, **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert "reduce the length" in answer.text
            assert max(encoded, default=0) <= most
    fits = "x" * MAX_TOKENIZE
    assert live.post("/tokenize", prompt=fits).json()["count"] > room
    for body in ({"prompt": fits + "x"}, {"messages": [{"role": "user", "content": fits + "x"}]}):
        encoded.clear()
        assert "send it in parts" in live.post("/tokenize", **body).text
        assert encoded == []


def test_what_only_serves_drafts_is_encoded_once_and_not_beyond_the_models_length(
    live: Live, encoded: list[int]
) -> None:
    told = {"type": "content", "content": "return x\n" * 50_000}
    answer = live.post("/v1/completions", prompt=["a", "b", "c"], max_tokens=2, prediction=told, bad_words=["if"])
    assert answer.status_code == 200
    assert sorted(encoded) == [1, 1, 1, 2, 3, WIDE * live.service.encoder.max_length]


def test_a_short_prompt_does_not_wait_for_a_long_one(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    held, free, encode = threading.Event(), threading.Event(), PromptEncoder.encode

    def slow(self: PromptEncoder, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and len(prompt) > LONG:
            held.set()
            assert free.wait(PATIENCE)
        return encode(self, prompt)

    monkeypatch.setattr(PromptEncoder, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(live.post, "/tokenize", prompt="x" * (LONG + 1))
        assert held.wait(PATIENCE)
        assert live.post("/v1/completions", prompt="def f():", max_tokens=2).status_code == 200
        assert live.post("/tokenize", prompt="def f():").status_code == 200
        free.set()
        assert long.result().status_code == 200


def test_texts_of_many_tokens_are_made_beside_the_loop(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, shows, loop = set[str](), live.service.tokens.shows, set[str]()
    monkeypatch.setattr(
        live.service.tokens, "shows", lambda *of: threads.add(threading.current_thread().name) or shows(*of)
    )
    find = live.pool.find
    monkeypatch.setattr(live.pool, "find", lambda name: loop.add(threading.current_thread().name) or find(name))
    told = live.post("/tokenize", prompt="x = [1, 2]\n", return_token_strs=True).json()
    assert "".join(told["token_strs"]) == "x = [1, 2]\n"
    assert live.post("/detokenize", tokens=told["tokens"]).json()["prompt"] == "x = [1, 2]\n"
    asked = live.post("/v1/completions", prompt="x", max_tokens=2, echo=True, logprobs=5, prompt_logprobs=5)
    assert asked.status_code == 200
    assert len(loop) == 1
    assert threads
    assert not threads & loop


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "check"])
def test_the_variables_of_a_template_do_not_replace_the_requests_fields(live: Live, name: str) -> None:
    answer = live.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], chat_template_kwargs={name: 1}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert f"cannot set '{name}'" in answer.text


def test_the_field_is_named_and_what_was_sent_is_cut(live: Live) -> None:
    for body, param in (
        ({"seed": 10**4000}, "seed"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"method": "m" * 5000}, "method"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"max_tokens": 10**4000}, "max_tokens"),
    ):
        answer = live.post("/v1/completions", prompt="x", **body)
        found = answer.json()["error"]
        assert (answer.status_code, found["param"]) == (400, param), found
        assert len(found["message"]) < 400
    torn = httpx.post(live.url + "/v1/completions", content=b'{"a"', headers={"content-type": "application/json"})
    found = torn.json()["error"]
    assert (found["param"], found["message"]) == (None, "the body is not JSON: Expecting ':' delimiter, at character 4")
    digits = b'{"prompt": "x", "seed": ' + b"1" * 9000 + b"}"
    many = httpx.post(live.url + "/v1/completions", content=digits, headers={"content-type": "application/json"})
    assert "more digits than any field takes" in many.text


def test_an_answer_that_is_sent_whole_wakes_the_event_loop_at_its_end(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each delta takes Python from the engine's thread, which waits for it before the next step."""
    put, deltas = asyncio.Queue.put_nowait, list[Delta]()

    def counted(queue: asyncio.Queue[Any], item: Any) -> None:
        deltas.extend(part for part in item if isinstance(part, Delta)) if isinstance(item, tuple) else None
        put(queue, item)

    monkeypatch.setattr(asyncio.Queue, "put_nowait", counted)
    found = dict[bool, int]()
    for stream in (False, True):
        deltas.clear()
        live.post("/v1/completions", prompt="def f(", max_tokens=60, ignore_eos=True, stream=stream)
        found[stream] = len(deltas)
    assert found[False] < 10 < found[True], found
