"""Replicas on a real Ray cluster of this machine: every text is that of one process, whatever dies or is replaced."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from serving import PAIR

from outrider import LLM, SamplingParams

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from outrider_ray import cluster  # noqa: E402
from outrider_ray.options import DeployOptions  # noqa: E402

pytestmark = pytest.mark.long  # a cluster takes a minute to start
TOKENS = 16
OPTIONS: dict[str, Any] = {"model": "builtin:code", "speculative_config": PAIR, "max_num_seqs": 4, "cpus": 0.5}
OPTIONS |= {"engines": "test-engines"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = DeployOptions(**OPTIONS, port=0, replicas=2)
    cluster.join_for(options, cluster.LOCAL)
    deployed = cluster.start(options, "test", local=True, timeout=PATIENCE)
    yield f"http://127.0.0.1:{deployed.port}"
    cluster.stop(deployed)


def port(url: str) -> int:
    return int(url.rpartition(":")[2])


class Asked:
    """Requests of all kinds and the texts that one process writes for them."""

    def __init__(self, count: int) -> None:
        llm = LLM("builtin:code", max_num_seqs=8)
        self.bodies = [
            {
                "prompt": f"def function_{i % 7}(x, y_{i}):\n",
                "temperature": 0 if i % 2 else 0.9,
                "seed": i,
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "presence_penalty": 0.5 * (i % 3),
                "stream": i % 3 != 0,
            }
            for i in range(count)
        ]
        params = [
            SamplingParams(**{k: v for k, v in body.items() if k not in ("prompt", "stream")}) for body in self.bodies
        ]
        outputs = llm.generate([body["prompt"] for body in self.bodies], params)
        self.texts = [o.outputs[0].text for o in outputs]

    def wrong(self, url: str, workers: int, on: dict[int, Any] | None = None) -> list[str]:
        """Ask for all of them at once. Returns what was not as it must be. on: acts, by the number of answers before."""
        done, lock, found = 0, threading.Lock(), list[str]()
        acts = dict(on or {})

        def ask(i: int) -> None:
            nonlocal done
            try:
                text = read(url, self.bodies[i])
                if text != self.texts[i]:
                    found.append(f"{i}: {text!r}, not {self.texts[i]!r}")
            except Exception as error:
                found.append(f"{i}: {error!r}")
            with lock:
                done += 1
                act = acts.pop(done, None)
            if act is not None:
                act()

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(ask, range(len(self.bodies))))
        assert done == len(self.bodies)
        assert not acts
        return found


def read(url: str, body: dict[str, Any]) -> str:
    """The text of one answer. A stream must end as streams do."""
    if not body["stream"]:
        response = httpx.post(url + "/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]
    text, ends = "", list[str]()
    with httpx.stream("POST", url + "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                ends.append("done")
            elif line.startswith("data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
                    ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert ends == ["length", "done"]
    return text


def replicas(application: str = "test-engines") -> list[str]:
    """The names of an application's actors that live."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [a["name"] for a in named if a["name"].startswith(f"SERVE_REPLICA::{application}#")]


def kill_one(application: str = "test-engines") -> None:
    """End the process of one replica at once."""
    ray.kill(ray.get_actor(replicas(application)[0], namespace="serve"), no_restart=True)


def wait_for(count: int) -> None:
    """Until as many replicas live. Ray looks back over half a minute before it takes one away."""
    for _ in range(600):
        if len(replicas()) == count:
            return
        time.sleep(0.5)
    raise AssertionError(replicas())


def test_texts_survive_a_replica_that_is_killed(url: str) -> None:
    asked = Asked(24)
    assert asked.wrong(url, 6, {6: kill_one}) == []
    page = httpx.get(url + "/metrics").text
    assert 'replica="front"' in page
    assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "code"
    error = httpx.post(url + "/v1/completions", json={"prompt": "x", "temperature": -1, "stream": True})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "temperature"


def test_500_requests_a_kill_and_a_rolling_update(url: str) -> None:
    asked, updates = Asked(500), list[threading.Thread]()

    def update() -> None:
        changed = DeployOptions(**{**OPTIONS, "speculative_config": {"method": "suffix"}}, replicas=2)
        thread = threading.Thread(
            target=cluster.start, args=(changed.with_(port=port(url)), "test"), kwargs={"own": True, "timeout": 300}
        )
        thread.start()
        updates.append(thread)

    assert asked.wrong(url, 8, {40: kill_one, 150: update, 420: kill_one}) == []
    [thread] = updates
    thread.join(PATIENCE)
    model = httpx.get(url + "/v1/models").json()["data"][0]
    assert model["speculative"]["method"] == "suffix"


def test_a_front_that_dies_cuts_its_clients_and_comes_back(url: str) -> None:
    """Who asks again gets the same text. Replicas are free again although nobody told them."""
    body = {"prompt": "def f(x):\n", "temperature": 0.9, "seed": 1, "max_tokens": 400, "ignore_eos": True}
    whole = httpx.post(url + "/v1/completions", json=body).json()["choices"][0]["text"]
    with (
        httpx.stream("POST", url + "/v1/completions", json={**body, "stream": True}) as stream,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for number, _ in enumerate(stream.iter_lines()):
            if number == 10:
                kill_one("test")
    for _ in range(600):
        try:
            again = httpx.post(url + "/v1/completions", json=body)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    assert again.json()["choices"][0]["text"] == whole
    assert [httpx.get(url + "/health").json()["running"] for _ in range(6)] == [0] * 6


def test_the_number_of_replicas_follows_the_load(url: str) -> None:
    moving = DeployOptions(
        **OPTIONS, min_replicas=1, max_replicas=2, target_requests=2, upscale_delay=1, downscale_delay=3
    )
    cluster.start(moving.with_(port=port(url)), "test", local=True, timeout=PATIENCE)
    wait_for(1)
    asked = Asked(200)
    grown = list[int]()
    assert asked.wrong(url, 12, {150: lambda: grown.append(len(replicas()))}) == []
    assert grown == [2]
    wait_for(1)
    assert Asked(6).wrong(url, 3) == []


def test_what_never_becomes_healthy_is_said(url: str) -> None:
    """A worker without the model, and replicas for which the cluster has no room."""
    for change, timeout, error, says in (
        ({"model": "/no/such/folder"}, 120, RuntimeError, "/no/such/folder"),
        ({"cpus": 99.0}, 5, TimeoutError, "--start-timeout"),
    ):
        options = DeployOptions(**{**OPTIONS, "engines": "bad-engines", **change})
        with pytest.raises(error, match=says):
            cluster.start(options.with_(port=0), "bad", local=True, timeout=timeout)
        serve.delete("bad-engines")
