"""The Model Server Protocol of the Gateway API inference extension (its proposal 003), as its endpoint picker reads a server.

MUST: OpenAI's completions and chat; gauges of queued requests, running requests, and use of the KV cache. For prefix affinity:
block size and number of blocks. The names are vLLM's. Adapters (LoRA) are optional, and this server has none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Live, builtin, serving

from outrider.serve.options import ServeOptions

GAUGES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(rows=2), ServeOptions(model="code", metrics_prefix="vllm")) as found:
        yield found


def gauges(live: Live) -> dict[str, float]:
    """The gauges as a scraper sees them, by name. One sample each, with the labels that select a pod's engine."""
    found = dict[str, float]()
    for family in text_string_to_metric_families(httpx.get(f"{live.url}/metrics").text):
        if family.name in GAUGES:
            assert family.type == "gauge"
            [sample] = family.samples
            assert sample.labels == {"model_name": "code", "engine": "0"}
            found[family.name] = sample.value
    assert set(found) == set(GAUGES)
    return found


def test_the_two_apis(live: Live) -> None:
    asked = {"model": "code", "max_tokens": 4}
    text = httpx.post(f"{live.url}/v1/completions", json={**asked, "prompt": "def f(x):"}).raise_for_status().json()
    chat = {**asked, "messages": [{"role": "user", "content": "hello"}]}
    talk = httpx.post(f"{live.url}/v1/chat/completions", json=chat).raise_for_status().json()
    assert text["object"] == "text_completion"
    assert talk["choices"][0]["message"]["role"] == "assistant"


def test_the_gauges_follow_the_load(live: Live) -> None:
    """Five requests on two slots: two run, three wait, keys and values grow; afterwards nothing is left."""
    assert gauges(live) == dict.fromkeys(GAUGES, 0.0)
    body = {"model": "code", "prompt": "def f(x):", "max_tokens": 120, "ignore_eos": True}
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(httpx.post, f"{live.url}/v1/completions", json=body) for _ in range(5)]
        seen = list[dict[str, float]]()
        while not all(answer.done() for answer in answers):
            seen.append(gauges(live))
            time.sleep(0.03)
        assert all(answer.result().status_code == 200 for answer in answers)
    assert max(found["vllm:num_requests_running"] for found in seen) == 2
    full = [found for found in seen if found["vllm:num_requests_running"] == 2]  # before, four may wait for a moment
    assert max(found["vllm:num_requests_waiting"] for found in full) == 3
    assert 0 < max(found["vllm:kv_cache_usage_perc"] for found in seen) <= 1
    assert gauges(live) == dict.fromkeys(GAUGES, 0.0)


def test_blocks_for_prefix_affinity(live: Live) -> None:
    """`cache_config_info` is a gauge of 1 whose labels tell the size and the number of blocks; together they are the cache."""
    page = httpx.get(f"{live.url}/metrics").text
    [family] = [f for f in text_string_to_metric_families(page) if f.name == "vllm:cache_config_info"]
    [sample] = family.samples
    assert (family.type, sample.value) == ("gauge", 1.0)
    assert sample.labels["engine"] == "0"
    size, blocks = int(sample.labels["block_size"]), int(sample.labels["num_gpu_blocks"])
    assert size > 0
    assert blocks == live.service.engine.kv_limit // size
    assert sample.labels["enable_prefix_caching"] == "True"
    # A picker that holds prompts in blocks of this size finds the same prefixes as the cache: the second prompt shares its
    # whole blocks with the first.
    prompt = [*range(3, 3 + 2 * size), 9]
    body = {"model": "code", "prompt": prompt, "max_tokens": 1}
    for _ in range(2):
        answer = httpx.post(f"{live.url}/v1/completions", json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2 * size
