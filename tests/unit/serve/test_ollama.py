"""Ollama's API: its lines and durations, its options, and the tokens of the other protocols."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from architectures import tiny
from gguf_files import write_gguf
from serving import TEMPLATE, Live, builtin, serving

from outrider.models.load import load
from outrider.serve.assembly import Assembly
from outrider.serve.options import ServeOptions
from outrider.serve.pool import PooledModel
from outrider.serve.protocols.ollama import OllamaOptions, details

HELLO = [{"role": "user", "content": "sort a list"}]
FIXED = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, "seed": 3, "num_predict": 24}
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=512)
    llm.tokenizer.chat_template = TEMPLATE + "{# </think> #}"  # type: ignore[union-attr]
    with serving(llm, ServeOptions(model="code")) as live:
        yield live


def ask(live: Live, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(live.url + path, json={"model": "code", **body})
    assert response.status_code == 200, response.text
    return response.json()


def lines(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    response = httpx.post(live.url + path, content=json.dumps({"model": "code:latest", **body}))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def test_the_same_request_has_the_same_tokens_in_three_protocols(live: Live) -> None:
    plain = {"temperature": 0.9, "seed": 3, "max_tokens": 24, "messages": HELLO}
    chat = ask(live, "/v1/chat/completions", **plain)["choices"][0]["message"]["content"]
    message = ask(live, "/v1/messages", **plain)["content"][0]["text"]
    ours = ask(live, "/api/chat", messages=HELLO, options=FIXED, stream=False)
    generated = ask(live, "/api/generate", prompt="sort a list", options=FIXED, stream=False)
    assert chat == message == ours["message"]["content"] == generated["response"]
    raw = ask(live, "/api/generate", prompt="# user: sort a list\n# assistant:", raw=True, options=FIXED, stream=False)
    assert raw["response"] == chat
    assert (ours["done"], ours["done_reason"], ours["eval_count"]) == (True, "length", 24)


def test_lines_add_up_and_durations_are_within_each_other(live: Live) -> None:
    for path, given in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "sort a list", "raw": True})):
        found = lines(live, path, options=FIXED, **given)
        whole = ask(live, path, options=FIXED, stream=False, **given)
        text = [line["message"]["content"] if path == "/api/chat" else line["response"] for line in found]
        said = whole["message"]["content"] if path == "/api/chat" else whole["response"]
        assert "".join(text) == said
        assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
        assert {line["model"] for line in found} == {"code:latest"}
        for end in (found[-1], whole):
            assert 0 < end["prompt_eval_duration"] + end["eval_duration"] <= end["total_duration"]
            assert end["load_duration"] == 0
        assert set(found[-1]) == set(whole)


def test_what_is_not_said_is_as_ollama_has_it() -> None:
    given = {k: v for k, v in OllamaOptions.model_validate({}).shared(512).items() if v is not None}
    assert given == {"max_tokens": 512, "max_total_tokens": 512, "temperature": 0.8, "top_k": 40, "top_p": 0.9}


def test_options_reach_the_engine(live: Live) -> None:
    text = ask(live, "/api/chat", messages=HELLO, options={"temperature": 0, "num_predict": 24}, stream=False)
    said = text["message"]["content"]
    stopped = ask(live, "/api/chat", messages=HELLO, options={"temperature": 0, "stop": [said[4:8]]}, stream=False)
    assert (stopped["message"]["content"], stopped["done_reason"]) == (said[: said.index(said[4:8])], "stop")
    short = ask(live, "/api/chat", messages=HELLO, options={"temperature": 0, "num_ctx": 20}, stream=False)
    assert short["prompt_eval_count"] + short["eval_count"] <= 20
    ours = {"repeat_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.05, "num_thread": 4, "num_gpu": 0}
    body = {"max_tokens": 24, "temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.05}
    expected = ask(live, "/v1/chat/completions", messages=HELLO, **body)["choices"][0]["message"]["content"]
    options = {"temperature": 0, "num_predict": 24, **ours}
    assert ask(live, "/api/chat", messages=HELLO, options=options, stream=False)["message"]["content"] == expected


def test_schemas_tools_and_thoughts(live: Live) -> None:
    pytest.importorskip("llguidance")
    made = ask(live, "/api/chat", messages=HELLO, format={"enum": ["sky", "sea"]}, stream=False)
    assert json.loads(made["message"]["content"]) in ("sky", "sea")
    arguments = {"name": "look", "arguments": {"at": "sky"}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{"function": arguments}]},
        {"role": "tool", "tool_name": "look", "content": "blue"},
    ]
    tools = [{"type": "function", "function": LOOK}]
    assert ask(live, "/api/chat", messages=turns, tools=tools, options={"num_predict": 4}, stream=False)["done"]
    begun = [*HELLO, {"role": "assistant", "content": "<think>hm</think> so"}]
    assert ask(live, "/api/chat", messages=begun, options={"num_predict": 4}, stream=False)["message"]["content"]


@pytest.mark.parametrize(
    ("file", "quantization", "named"),
    [("model.gguf", None, "Q4_K_M"), ("model.gguf", "int8", "int8"), (None, None, "bfloat16")],
)
def test_the_precision_is_called_as_the_file_calls_it(
    tmp_path: Path, file: str | None, quantization: str | None, named: str
) -> None:
    if file:
        write_gguf(tiny("llama"), tmp_path / file, "Q8_0", metadata={"general.file_type": 15})
    model = str(tmp_path / file) if file else "builtin:code"
    loaded = load(model, quantization=quantization, dtype="auto" if file else "bfloat16")
    service: Any = SimpleNamespace(runtime=SimpleNamespace(loaded=loaded))
    found = details(PooledModel(ServeOptions(model=model), assembly=Assembly(service, [], True)))
    assert found["quantization_level"] == named
    assert found["format"] == ("gguf" if file else "safetensors")


def test_the_model_is_described_and_stays(live: Live) -> None:
    def read(path: str) -> Any:
        return httpx.get(live.url + path).json()

    [tagged], [running] = read("/api/tags")["models"], read("/api/ps")["models"]
    assert tagged["name"] == running["model"] == "code"
    assert running["context_length"] == 512
    shown = ask(live, "/api/show")
    assert shown["model_info"]["general.architecture"] == shown["details"]["family"]
    assert shown["capabilities"][0] == "completion"
    assert "version" in read("/api/version")
    for path, empty in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": "", "keep_alive": "-1m"})):
        assert ask(live, path, **empty)["done_reason"] == "load"
    assert read("/api/ps")["models"][0]["expires_at"].startswith("9999")
    assert ask(live, "/api/generate", keep_alive="1h30m")["done_reason"] == "load"
    left = datetime.fromisoformat(read("/api/ps")["models"][0]["expires_at"]) - datetime.now(UTC)
    assert 5390 < left.total_seconds() <= 5400
    assert ask(live, "/api/generate")["done_reason"] == "load"
    wrong = httpx.post(f"{live.url}/api/generate", json={"model": "code", "keep_alive": "soon"})
    assert (wrong.status_code, "such as" in wrong.json()["error"]) == (400, True)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, "messages.0 has images"),
    ("/api/chat", {"messages": HELLO, "options": {"mirostat": 2}}, "no mirostat"),
    ("/api/chat", {"messages": HELLO, "options": {"tempe": 2}}, "no option 'tempe'"),
    ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n=-1"),
    ("/api/chat", {"messages": HELLO, "options": {"num_predict": 0}}, "num_predict"),
    ("/api/chat", {"messages": HELLO, "options": {"num_ctx": 5}}, "maximum context length is 5 tokens"),
    ("/api/chat", {"messages": HELLO, "options": {"presence_penalty": 9}}, "presence_penalty must be in [-2, 2]"),
    ("/api/chat", {"messages": HELLO, "format": "xml"}, "JSON schema"),
    ("/api/chat", {"messages": HELLO, "logprobs": True}, "/v1/chat/completions"),
    ("/api/generate", {"prompt": "x", "images": ["aa"]}, "images"),
    ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "raw=true"),
    ("/api/generate", {"prompt": "x", "context": [1]}, "/api/chat"),
    ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
    ("/api/embed", {"input": "x"}, "embeddings"),
    ("/api/pull", {"model": "x"}, "outrider pull NAME"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_done_is_refused_in_its_form(live: Live, path: str, body: dict, words: str) -> None:
    response = httpx.post(live.url + path, json={"model": "code", **body})
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]
    assert words in response.json()["error"]


def test_a_gap_is_filled_by_models_with_tokens_for_it_only(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/v1/completions", "/api/generate"):
        refused = httpx.post(live.url + path, json={"model": "code", "prompt": "def f(", "suffix": "return x"})
        assert refused.status_code == 400
        assert "fill in the middle" in refused.text
    from outrider.core.infill import Infilling

    tokenizer = live.service.prompts.tokenizer
    form = Infilling(tokenizer, (), (5, 6, 7), (5, 6, 7))
    monkeypatch.setattr(live.service, "infilling", form)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("def f(", "return x")]  # type: ignore
    wanted = [5, *ids[0], 6, *ids[1], 7]
    made = ask(
        live, "/v1/completions", prompt="def f(", suffix="return x", max_tokens=8, temperature=0, return_token_ids=True
    )
    assert made["choices"][0]["prompt_token_ids"] == wanted
    assert not {5, 6, 7} & set(made["choices"][0]["token_ids"][:-1])
    options = {"temperature": 0, "num_predict": 8}
    same = ask(live, "/api/generate", prompt="def f(", suffix="return x", options=options, stream=False)
    assert same["response"] == made["choices"][0]["text"]
    ids = httpx.post(live.url + "/v1/completions", json={"prompt": [1, 2], "suffix": "x"})
    assert "not token ids" in ids.text  # type: ignore[union-attr]


def test_tools_that_the_model_cannot_see_are_told_of_once(
    live: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    monkeypatch.setattr(live.service, "_told_of_tools", False)
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    with caplog.at_level(logging.WARNING, "outrider"):
        for _ in range(2):
            ask(live, "/api/chat", messages=HELLO, tools=tools, options={"num_predict": 1}, stream=False)
    told = {id(record) for record in caplog.records if "chat template of code has no tool calls" in record.getMessage()}
    assert len(told) == 1
