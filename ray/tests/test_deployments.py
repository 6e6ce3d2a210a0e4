"""Front and engine as Ray Serve runs them, in this process: its own local mode. `ray/tests/test_ray.py` has a real cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from serving import PAIR

from outrider.core.params import SamplingParams

pytest.importorskip("ray.serve")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from outrider import LLM
from outrider.serve.errors import Refused
from outrider_ray import cluster
from outrider_ray.calls import ReplicaLost, ReplicaRequest
from outrider_ray.deployments import build
from outrider_ray.direct import Reservation
from outrider_ray.options import DeployOptions
from outrider_ray.prefixes import BLOCK
from outrider_ray.replicas import RayReplicas
from outrider_ray.router import PrefixRouter
from ray import serve

BODY: dict[str, Any] = {"prompt": "def quicksort(xs):\n", "max_tokens": 12, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def url() -> str:
    port = cluster.free_port("127.0.0.1", 0)
    given = {"model": "builtin:code", "speculative_config": PAIR, "max_num_seqs": 2, "max_queue": 1, "api_key": "key"}
    options = DeployOptions.model_validate({**given, "replicas": 1, "listen": ("127.0.0.1", port)})
    context = SimpleNamespace(replica_id=ReplicaID("alone", DeploymentID("d", "a")))  # which the local mode lacks
    with (
        mock.patch("outrider_ray.deployments.serve.get_replica_context", return_value=context),
        mock.patch("outrider_ray.deployments.get_node_ip_address", return_value="127.0.0.1"),
    ):
        serve.run(build(options), name="local", _local_testing_mode=True)
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"authorization": "Bearer key"}) as made:
        yield made


def test_texts_come_through_front_and_engine(client: httpx.Client) -> None:
    params = SamplingParams(**{k: v for k, v in BODY.items() if k != "prompt"})
    wanted = LLM("builtin:code").generate([BODY["prompt"]], params)[0].outputs[0].text
    whole = client.post("/v1/completions", json=BODY)
    assert whole.json()["choices"][0]["text"] == wanted
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == wanted
    assert stream.headers["x-outrider-replica"] == whole.headers["x-outrider-replica"] == "alone"
    assert client.post("/v1/completions", json={**BODY, "temperature": -1}).status_code == 400
    assert httpx.get(str(client.base_url) + "/v1/models").status_code == 401


def test_pages_of_the_replica_come_through_the_front(client: httpx.Client) -> None:
    assert client.get("/health").json()["status"] == "ok"
    assert 'replica="front"' in client.get("/metrics").text
    refused = client.get("/dashboard")
    assert refused.status_code == 404
    assert "recipes/monitoring" in refused.text


def test_a_client_that_leaves_frees_its_row(client: httpx.Client) -> None:
    long = {**BODY, "max_tokens": 900, "ignore_eos": True, "stream": True}
    for _ in range(4):  # of two rows and one place in the queue
        with client.stream("POST", "/v1/completions", json=long) as stream:
            assert next(stream.iter_lines())
    for _ in range(500):
        if client.get("/health").json()["running"] == 0:
            return
    raise AssertionError(client.get("/health").json())


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("d", "a")))


def test_the_router_knows_what_it_sent_where() -> None:
    async def go() -> None:
        router = PrefixRouter(DeploymentID("d", "a"), DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        router.initialize_state(prefix_weight=4.0)
        some = [replica("one"), replica("two")]

        async def first(prompt: str, home: str = "") -> str:
            pending: Any = SimpleNamespace(args=[prompt, home])
            ranked = await router.choose_replicas(some, pending)
            router.on_request_routed(pending, ranked[0][0].replica_id, None)
            return ranked[0][0].replica_id.unique_id

        chat = "a" * (2 * BLOCK)
        home = await first(chat)
        assert [await first(chat + "b" * BLOCK) for _ in range(3)] == [home] * 3  # its prefix outweighs its load
        other = await first("c" * BLOCK)
        assert other != home  # nothing is known of this one, and the other has nothing to do
        assert await first(chat, other) == other  # which keeps what the request is about
        router.on_request_completed(replica(other).replica_id, "")
        for _ in range(4):
            router.on_request_completed(replica(home).replica_id, "")
        assert await first("d" * BLOCK) == home  # which has nothing to do now
        router.on_replica_actor_died(replica(home).replica_id)
        some.remove(next(one for one in some if one.replica_id.unique_id == home))
        assert await first(chat) == other

    asyncio.run(go())


class Held:
    """A place that a replica holds, as Ray hands it out; none comes if place is None. cancelled: it was given back."""

    def __init__(self, place: Reservation | None) -> None:
        self.place, self.cancelled = place, False

    def __aiter__(self) -> Held:
        return self

    async def __anext__(self) -> Reservation:
        if self.place is None:
            await asyncio.sleep(60)
        place, self.place = self.place, None
        assert place is not None
        return place

    def cancel(self) -> None:
        self.cancelled = True


def test_a_place_that_is_not_used_is_given_back() -> None:
    """It would count as a request of its replica for ever."""

    async def go(held: Held) -> None:
        taking = SimpleNamespace(remote=lambda prompt, home: held)
        handle: Any = SimpleNamespace(options=lambda stream: SimpleNamespace(take=taking))
        async for _ in RayReplicas(handle, 0.2).ask(ReplicaRequest("GET", "/health")):
            raise AssertionError

    nobody = Held(Reservation("r0", f"http://127.0.0.1:{cluster.free_port('127.0.0.1', 0)}", "ticket"))
    with pytest.raises(ReplicaLost, match="r0"):
        asyncio.run(go(nobody))
    late = Held(None)
    with pytest.raises(Refused, match="no replica took"):
        asyncio.run(go(late))
    assert nobody.cancelled
    assert late.cancelled
