"""Two models in one server: each writes what it writes alone, whoever was loaded before, beside it, or in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from outrider.models.load import stored_bytes
from outrider.serve.options import ServeOptions
from outrider.serve.pool import ModelPool
from tests.support.serving import Live, running

MODELS = {"code": "builtin:code", "code-draft": "builtin:code-draft"}
PROMPTS = ("def quicksort(xs):\n", "import argparse\n", "class Tree:\n    def ")
CANARY = "canary_7f3a = [" + ", ".join(f"'{n * 7919 % 1000:03}'" for n in range(40)) + "]\n"
WAYS = [(PROMPTS[0], 0.0), (PROMPTS[1], 0.9), (PROMPTS[2], 0.9), (CANARY, 0.0)]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str, float], str]:
    """What each model writes by plain decoding."""
    found = dict[tuple[str, str, float], str]()
    for name, model in MODELS.items():
        llm = LLM(model)
        for prompt, temperature in WAYS:
            params = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
            found[name, prompt, temperature] = llm.generate(prompt, params)[0].outputs[0].text
    return found


@contextmanager
def two(memory: str, method: str = "suffix", **more: Any) -> Iterator[Live]:
    given: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 512, "prefix_cache": 1, **more}
    config = {"method": method}
    options = [ServeOptions(model=m, memory=memory, speculative_config=config, **given) for m in MODELS.values()]
    pool = ModelPool.of(options)
    pool.start()
    with running(pool) as live:
        yield live


def tight() -> str:
    """Bytes in which one of the two has room."""
    return str(sum(map(stored_bytes, MODELS.values())))


def ask(live: Live, model: str, prompt: str, temperature: float = 0.0) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": temperature, "max_tokens": 12, "seed": 5}
    answer = httpx.post(f"{live.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(live: Live, order: list[tuple[str, str, float]], clients: int) -> list[str]:
    with ThreadPoolExecutor(clients) as pool:
        return [one["choices"][0]["text"] for one in pool.map(lambda one: ask(live, *one), order)]


def states(live: Live) -> dict[str, str]:
    return {one["id"]: one["state"] for one in httpx.get(f"{live.url}/v1/models").json()["data"]}


def loads(live: Live, model: str) -> float:
    labels = {"model_name": model, "engine": "0"}
    return live.registry.get_sample_value("outrider:model_loads_total", labels) or 0


def test_each_writes_what_it_writes_alone_while_the_other_leaves_for_it(alone: dict[Any, str]) -> None:
    """One client, each of whose requests loads a model; then six at once."""
    order = [(name, *way) for way in WAYS for name in MODELS]
    with two(tight()) as live:
        assert states(live) == {"code": "loaded", "code-draft": "unloaded"}
        assert texts(live, order[:4], 1) == [alone[one] for one in order[:4]]
        assert (loads(live, "code"), loads(live, "code-draft")) == (2, 2)
        assert texts(live, order, 6) == [alone[one] for one in order]
        assert sorted(states(live).values()) == ["loaded", "unloaded"]


def test_both_answer_at_once_where_both_fit(alone: dict[Any, str]) -> None:
    order = [(name, *way) for way in WAYS for name in MODELS]
    with two("1GiB") as live:
        assert texts(live, order, 6) == [alone[one] for one in order]
        assert set(states(live).values()) == {"loaded"}
        assert (loads(live, "code"), loads(live, "code-draft")) == (1, 1)
        page = httpx.get(f"{live.url}/metrics").text
        for name in MODELS:
            assert f'outrider:request_success_total{{engine="0",finished_reason="length",model_name="{name}"}}' in page
            assert f'outrider:http_requests_total{{engine="0",model_name="{name}",status="200"}} 4.0' in page
            assert f'outrider:model_loaded{{engine="0",model_name="{name}"}} 1.0' in page
        assert page.count("# TYPE outrider:num_requests_running") == 1
        with httpx.stream("GET", f"{live.url}/dashboard/events?model=code-draft") as events:
            hello = next(line for line in events.iter_lines() if line.startswith("data: "))
        assert json.loads(hello[6:])["model"] == "code-draft"


def test_no_model_drafts_from_or_reads_a_text_of_the_other() -> None:
    """The canary is long enough for drafts and for the prefix cache. The other model's counts are those of a first time."""

    def counted(live: Live, name: str) -> tuple[Any, ...]:
        answer = ask(live, name, CANARY)
        used, spec = answer["usage"], answer["metrics"]["speculative_decoding"]
        return (
            used["prompt_tokens_details"]["cached_tokens"],
            spec["num_draft_tokens"],
            spec["num_accepted_draft_tokens"],
        )

    with two("1GiB") as live:
        first, again = counted(live, "code"), counted(live, "code")
        planted = counted(live, "code-draft")
    with two("1GiB") as live:
        alone = counted(live, "code-draft")
    assert first[0] == 0
    assert again[0] > 0  # the model's own text is found
    assert again != first
    assert planted == alone


def test_names_and_times_of_ollamas_clients() -> None:
    with two("1GiB", "none") as live:
        post = lambda path, **body: httpx.post(live.url + path, json=body)  # noqa: E731
        tags = httpx.get(f"{live.url}/api/tags").json()["models"]
        assert [one["name"] for one in tags] == list(MODELS)
        assert all(one["size"] > 0 for one in tags)
        running = lambda: [one["name"] for one in httpx.get(f"{live.url}/api/ps").json()["models"]]  # noqa: E731
        assert running() == ["code"]
        asked = {"prompt": "def f(", "raw": True, "stream": False, "options": {"num_predict": 2}, "keep_alive": 0}
        answer = post("/api/generate", model="code-draft:latest", **asked).json()
        assert answer["load_duration"] > 0
        assert answer["load_duration"] + answer["eval_duration"] <= answer["total_duration"]
        while "code-draft" in running():
            pass
        assert post("/api/show", model="code-draft").json()["capabilities"][0] == "completion"
        assert running() == list(MODELS)
        assert post("/api/generate", model="code", keep_alive=0).json()["done_reason"] == "unload"
        while "code" in running():
            pass
        assert httpx.get(f"{live.url}/health").status_code == 200
