"""Ollama's API: its lines and durations, its options, and the tokens of the other protocols."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gguf_writer import write_toy
from serving import TEMPLATE, Live, builtin, serving

from outrider.models.load import load
from outrider.serve.options import ServeOptions
from outrider.serve.pool import PooledModel
from outrider.serve.protocols.ollama import API_VERSION, OllamaOptions, details

HELLO = [{"role": "user", "content": "sort a list"}]
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=512)
    llm.tokenizer.chat_template = TEMPLATE + "{# </think> #}"  # type: ignore[union-attr]
    with serving(llm, ServeOptions(model="code")) as live:
        yield live


def test_what_is_not_said_is_as_ollama_has_it() -> None:
    given = {k: v for k, v in OllamaOptions.model_validate({}).shared(512).items() if v is not None}
    assert given == {"max_tokens": 512, "max_total_tokens": 512, "temperature": 0.8, "top_k": 40, "top_p": 0.9}


@pytest.mark.parametrize(
    ("file", "quantization", "named"),
    [("model.gguf", None, "Q4_K_M"), ("model.gguf", "int8", "int8"), (None, None, "bfloat16")],
)
def test_the_precision_is_called_as_the_file_calls_it(
    tmp_path: Path, file: str | None, quantization: str | None, named: str
) -> None:
    if file:
        write_toy(tmp_path / file, metadata={"general.file_type": 15})
    model = str(tmp_path / file) if file else "builtin:code"
    loaded = load(model, quantization=quantization, dtype="auto" if file else "bfloat16")
    service: Any = SimpleNamespace(runtime=SimpleNamespace(loaded=loaded))
    found = details(PooledModel(ServeOptions(model=model), service=service))
    assert found["quantization_level"] == named
    assert found["format"] == ("gguf" if file else "safetensors")


def test_the_model_is_described_and_stays(live: Live) -> None:
    def read(path: str) -> Any:
        return httpx.get(live.url + path).json()

    [tagged], [running] = read("/api/tags")["models"], read("/api/ps")["models"]
    assert tagged["name"] == running["model"] == "code"
    assert running["context_length"] == 512
    shown = live.ask("/api/show")
    assert shown["model_info"]["general.architecture"] == shown["details"]["family"]
    assert shown["capabilities"][0] == "completion"
    assert "version" in read("/api/version")
    for path, empty in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": "", "keep_alive": "-1m"})):
        assert live.ask(path, **empty)["done_reason"] == "load"
    assert read("/api/ps")["models"][0]["expires_at"].startswith("9999")
    assert live.ask("/api/generate", keep_alive="1h30m")["done_reason"] == "load"
    left = datetime.fromisoformat(read("/api/ps")["models"][0]["expires_at"]) - datetime.now(UTC)
    assert 5390 < left.total_seconds() <= 5400
    assert live.ask("/api/generate")["done_reason"] == "load"
    wrong = httpx.post(f"{live.url}/api/generate", json={"model": "code", "keep_alive": "soon"})
    assert (wrong.status_code, "such as" in wrong.json()["error"]) == (400, True)


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
    made = live.ask(
        "/v1/completions", prompt="def f(", suffix="return x", max_tokens=8, temperature=0, return_token_ids=True
    )
    assert made["choices"][0]["prompt_token_ids"] == wanted
    assert not {5, 6, 7} & set(made["choices"][0]["token_ids"][:-1])
    options = {"temperature": 0, "num_predict": 8}
    same = live.ask("/api/generate", prompt="def f(", suffix="return x", options=options, stream=False)
    assert same["response"] == made["choices"][0]["text"]
    ids = httpx.post(live.url + "/v1/completions", json={"prompt": [1, 2], "suffix": "x"})
    assert "not token ids" in ids.text  # type: ignore[union-attr]


def test_tools_that_the_model_cannot_see_are_told_of_once(
    live: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    with caplog.at_level(logging.WARNING, "outrider"):
        for _ in range(2):
            live.ask("/api/chat", messages=HELLO, tools=tools, options={"num_predict": 1}, stream=False)
    told = {id(record) for record in caplog.records if "chat template of code has no tool calls" in record.getMessage()}
    assert len(told) == 1


def test_editors_find_an_ollama_that_is_new_enough(live: Live) -> None:
    found = httpx.get(live.url + "/api/version").json()
    assert found["version"] == API_VERSION
    assert tuple(map(int, API_VERSION.split("."))) >= (0, 6, 4)
    assert found["outrider"] == httpx.get(live.url + "/version").json()["version"]
    about = live.ask("/api/show")["model_info"]
    assert about["general.basename"] == "code"
    assert about[f"{about['general.architecture']}.context_length"] == 512
