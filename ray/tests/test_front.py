"""The front before replicas that die at every event: a client sees what one server would have sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from replicas import LocalReplicas
from serving import Live, builtin, serving

from outrider.serve.options import ServeOptions
from outrider_ray.calls import ReplicaRequest
from outrider_ray.front import Front, ResumableStream, guarded

PROMPT = "def quicksort(xs):\n"
SETTINGS = ServeOptions(model="code", host="0.0.0.0")
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLED = {"max_tokens": 10, "temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def lives() -> Iterator[list[Live]]:
    with serving(builtin(4)) as one, serving(builtin(2, None)) as two:
        yield [one, two]


def front(lives: list[Live], dies: Callable[[int, int], bool] = lambda call, events: False, **options: Any) -> Front:
    apps = {f"r{i}": live.app for i, live in enumerate(lives)}
    return Front(LocalReplicas(apps, dies), SETTINGS.with_(**options), patience=5.0)


def post(app: Front, path: str, body: Any, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(guarded(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await client.post(path, **given, **options)

    return asyncio.run(go())


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def seen(chunks: list[Any]) -> dict[str, Any]:
    """What does not depend on how the text was cut into events, nor on time and drafts."""
    found: dict[str, Any] = {"ids": {c["id"] for c in chunks}, "created": len({c["created"] for c in chunks})}
    for chunk in chunks:
        if chunk.get("usage"):
            found["usage"] = {k: v for k, v in chunk["usage"].items() if not k.endswith("details")}
        for choice in chunk["choices"]:
            mine = found.setdefault(choice["index"], {"text": "", "ids": [], "ends": [], "opened": 0, "calls": []})
            delta = choice.get("delta", {})
            mine["text"] += choice.get("text") or delta.get("content") or ""
            mine["ids"] += choice.get("token_ids", [])
            mine["calls"] += [c["function"] for c in delta.get("tool_calls", ())]
            mine["opened"] += "role" in delta
            if choice["finish_reason"]:
                mine["ends"].append((choice["finish_reason"], choice["stop_reason"], choice["seed"]))
    return found


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "seed": 1}),
    "sampled": ("/v1/completions", {"prompt": PROMPT, **SAMPLED, "presence_penalty": 1.0, "stop": ["\n\n\n", "xs)"]}),
    "ids": ("/v1/completions", {"prompt": PROMPT, **SAMPLED, "return_token_ids": True, "echo": True}),
    "several": ("/v1/completions", {"prompt": [PROMPT, "import os\n"], **SAMPLED, "n": 2, "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "sort"}], **SAMPLED}),
    "logprobs": ("/v1/completions", {"prompt": PROMPT, **SAMPLED, "logprobs": 1}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_survives_a_death_at_every_event(lives: list[Live], name: str) -> None:
    path, body = REQUESTS[name]
    body = {**body, **USAGE}
    expected = seen(events(httpx.post(lives[0].url + path, json=body, headers={"x-request-id": "mine"})))
    cut, died = 0, 0
    while True:
        deaths: list[int] = []

        def dies(call: int, event: int, cut: int = cut, deaths: list[int] = deaths) -> bool:
            if call == 0 and event == cut:
                deaths.append(event)
                return True
            return False

        app = front(lives, dies)
        chunks = events(post(app, path, body, headers={"x-request-id": "mine"}))
        assert seen(chunks) == expected, cut
        if not deaths:
            break
        assert app.moved == 1
        cut, died = cut + 1, died + 1
    assert died >= 5


def test_a_stream_survives_many_deaths(lives: list[Live]) -> None:
    """Each replica writes two events and dies."""
    path, body = REQUESTS["sampled"]
    body = {**body, "stop": [], "max_tokens": 12}
    expected = seen(events(httpx.post(lives[0].url + path, json={**body, **USAGE}, headers={"x-request-id": "a"})))
    app = front(lives, lambda call, event: event == 3 and call < 12)
    assert seen(events(post(app, path, {**body, **USAGE}, headers={"x-request-id": "a"}))) == expected
    assert app.moved >= 3


def test_events_are_those_of_the_server_byte_by_byte(lives: list[Live]) -> None:
    """Where no replica dies, nothing that the front asks for itself can be seen."""
    plain = [lives[1]]  # without drafts an event is a token, whatever the load
    for path, body in (*REQUESTS.values(), ("/v1/completions", {"prompt": "# ééé\n", **SAMPLED, "temperature": 1.5})):
        sent = {**body, "stream": True}
        if isinstance(body.get("prompt"), list):
            continue  # two texts race
        headers = {"x-request-id": "same"}
        own = httpx.post(plain[0].url + path, json=sent, headers=headers)
        mine = post(front(plain), path, sent, headers=headers)

        def timeless(text: str) -> list[str]:
            return [",".join(p for p in e.split(",") if '"created"' not in p) for e in text.split("\n\n")]

        assert timeless(mine.text) == timeless(own.text)
        assert mine.headers["x-outrider-guarantee"] == own.headers["x-outrider-guarantee"]
        assert mine.headers["x-outrider-replica"] == "r0"
        assert mine.headers.get_list("x-request-id") == ["same"]


def test_a_stream_without_a_seed_goes_on_with_the_one_it_began_with(lives: list[Live]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 1.0, **USAGE}
    chunks = events(post(front(lives, lambda call, event: call == 0 and event == 4), "/v1/completions", body))
    [end] = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    again = httpx.post(lives[0].url + "/v1/completions", json={**body, "stream": False, "seed": end["seed"]}).json()
    assert again["choices"][0]["text"] == "".join(c["choices"][0]["text"] for c in chunks if c["choices"])


def test_a_continued_stream_is_continued_again(lives: list[Live]) -> None:
    body = {"prompt": PROMPT, **SAMPLED, "return_token_ids": True}
    whole = httpx.post(lives[0].url + "/v1/completions", json=body).json()["choices"][0]
    tokens = whole["token_ids"]
    for form in ({"continued_tokens": tokens[:4]}, {"continued_tokens": [tokens[:4]]}):
        sent = {**body, **form, "stream": True}
        app = front(lives, lambda call, event: call < 2 and event == 2)
        chunks = events(post(app, "/v1/completions", sent))
        assert [t for c in chunks for t in c["choices"][0].get("token_ids", ())] == tokens[4:]
        assert app.moved == 2


def test_whole_answers_are_asked_again(lives: list[Live]) -> None:
    for name in ("several", "chat", "logprobs"):
        path, body = REQUESTS[name]
        own = httpx.post(lives[0].url + path, json=body).json()
        app = front(lives, lambda call, event: call < 3 and event == call % 2)
        found = post(app, path, body).json()
        assert [c.get("text") or c.get("message") for c in found["choices"]] == [
            c.get("text") or c.get("message") for c in own["choices"]
        ]
        assert app.moved == 3


def test_errors_and_routes_are_those_of_the_server(lives: list[Live]) -> None:
    app = front(lives[:1])
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "temperature": -1}),
        ("/v1/completions", {"prompt": PROMPT, "temperature": -1, "stream": True}),
        ("/v1/completions", {"prompt": PROMPT, "model": "other", "stream": True}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**6, "stream": True}),
        ("/v1/completions", {"prompt": PROMPT, "timeout": 5e-324}),  # it would be as late elsewhere
        ("/v1/completions", {"prompt": [], "n": "x", "stream": True}),
        ("/v1/completions", {"prompt": PROMPT, "continued_tokens": [[1], [2]], "stream": True}),
        ("/v1/chat/completions", {"messages": 3, "stream": True}),
        ("/v1/completions", b"{nonsense"),
        ("/v1/nothing", {}),
        ("/tokenize", {"prompt": PROMPT}),
    ):
        given: Any = {"content": body} if isinstance(body, bytes) else {"json": body}
        own, mine = httpx.post(lives[0].url + path, **given), post(app, path, body)
        assert (mine.status_code, mine.content) == (own.status_code, own.content), path
        assert mine.headers["content-type"] == own.headers["content-type"]
    assert app.moved == 0
    locked = front(lives[:1], api_key=["secret"])
    assert post(locked, "/v1/completions", {"prompt": PROMPT}).status_code == 401
    given = {"headers": {"authorization": "Bearer secret"}}
    assert post(locked, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, **given).status_code == 200
    assert post(front(lives[:1], max_body=1), "/v1/completions", {"prompt": "x" * 2000}).status_code == 413


def test_patience_ends(lives: list[Live]) -> None:
    app = front(lives, lambda call, event: True)
    app.patience = 0.3
    refused = post(app, "/v1/completions", {"prompt": PROMPT})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_replica"
    assert refused.headers["retry-after"] == "5"
    half = front(lives, lambda call, event: event == (3 if call == 0 else 0))
    half.patience = 0.3
    response = post(half, "/v1/completions", {"prompt": PROMPT, **SAMPLED, "stream": True})
    *_, error, done, _ = response.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "no_replica"
    assert done == "data: [DONE]"


def test_a_full_queue_is_another_replicas_turn(lives: list[Live]) -> None:
    with serving(builtin(1, None), max_queue=0) as full:
        busy = [{"prompt": PROMPT, "max_tokens": 100, "stream": True}] * 1
        with httpx.stream("POST", full.url + "/v1/completions", json=busy[0]) as held:
            next(held.iter_lines())
            found = post(front([full, lives[0]]), "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "n": 2})
            assert found.status_code == 200
            assert found.headers["x-outrider-replica"] == "r1"
            refused = post(front([full]), "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "n": 2})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1


def test_a_client_that_leaves_frees_the_row(lives: list[Live]) -> None:
    """Its sequences are cancelled on the replica, whole answers and streams alike."""

    async def leave(body: dict[str, Any]) -> None:
        app, sent = guarded(front(lives[:1])), asyncio.Event()
        data = json.dumps(body).encode()
        given = False

        async def receive() -> Any:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": data, "more_body": False}
            if body["stream"]:
                await sent.wait()
            else:
                while not lives[0].service.engine.stats.running:
                    await asyncio.sleep(0.005)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.set()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        await asyncio.wait_for(app(scope, receive, send), 10)

    for streams in (True, False):
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": streams}
        asyncio.run(leave(body))
        for _ in range(200):
            if lives[0].service.engine.scheduler.idle:
                break
            asyncio.run(asyncio.sleep(0.01))
        assert lives[0].service.engine.scheduler.idle


def test_metrics_of_all_replicas_stand_on_one_page(lives: list[Live]) -> None:
    app = front(lives)
    post(app, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})

    async def get(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded(app)), base_url="http://front") as client:
            return await client.get(path)

    page = asyncio.run(get("/metrics")).text
    for name in ("r0", "r1"):
        assert f'outrider:num_requests_running{{engine="0",model_name="code",replica="{name}"}} 0.0' in page
        assert (
            f'outrider:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="code",replica="{name}"}}'
            in page
        )
    assert page.count("# TYPE outrider:num_requests_running gauge") == 1
    assert 'outrider:http_requests_total{engine="0",model_name="code",replica="front",status="200"} 1.0' in page
    assert 'http_requests_total{engine="0",model_name="code",replica="r0"' not in page
    assert asyncio.run(get("/health")).json()["status"] == "ok"
    assert asyncio.run(get("/v1/models")).json()["data"][0]["id"] == "code"


def test_a_stored_response_is_asked_for_at_the_replica_that_keeps_it() -> None:
    asked = {"input": "sort", "max_output_tokens": 4, "temperature": 0}
    with (
        serving(builtin(2, None), ServeOptions(model="code", replica_name="r0")) as one,
        serving(builtin(2, None), ServeOptions(model="code", replica_name="r1")) as two,
    ):
        app = front([one, two])

        async def get(method: str, name: str) -> int:
            transport = httpx.ASGITransport(guarded(app))
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
                return (await client.request(method, f"/v1/responses/{name}")).status_code

        names = [post(app, "/v1/responses", asked).json()["id"] for _ in range(3)]
        assert [name[-3:] for name in names] == ["_r0", "_r1", "_r0"]
        for name in names:
            again = post(app, "/v1/responses", {**asked, "previous_response_id": name})
            assert again.status_code == 200, again.text
            assert again.headers["x-outrider-replica"] == name[-2:]
            assert asyncio.run(get("GET", name)) == 200
            assert asyncio.run(get("DELETE", name)) == 200
            assert asyncio.run(get("GET", name)) == 404
        for bad in ("resp_1_nobody", "resp_", "x", 5):
            assert post(app, "/v1/responses", {**asked, "previous_response_id": bad}).status_code == 400


def test_the_deadline_shrinks_with_the_time_that_was_used() -> None:
    stream = ResumableStream({"prompt": "x", "timeout": 5.0, "stream": True})
    sent = json.loads(stream.request())
    assert 4.0 < sent["timeout"] <= 5.0
    assert sent["seed"] is not None
    assert "continued_tokens" not in sent


def test_calls_carry_what_prompts_begin_with(lives: list[Live]) -> None:
    app = front(lives)
    replicas: Any = app.replicas
    chat = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}], "max_tokens": 1}
    longer = {**chat, "messages": [*chat["messages"], {"role": "assistant", "content": "y"}]}
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", longer),
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 1}),
    ):
        post(app, path, body)
    calls: list[ReplicaRequest] = replicas.calls
    assert calls[0].prompt == PROMPT
    assert calls[2].prompt.startswith(calls[1].prompt[:-2])
    assert all(c.prompt for c in calls)


def test_a_replica_is_told_whose_request_it_is_and_a_client_cannot_say_it(lives: list[Live]) -> None:
    app = front(lives[:1], api_key=["one", "two"])
    sent = {"authorization": "Bearer two", "x-outrider-owner": "key 0"}
    assert post(app, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, headers=sent).status_code == 200
    replicas = app.replicas
    assert isinstance(replicas, LocalReplicas)
    [call] = replicas.calls
    digest = hashlib.sha256(b"two").hexdigest()[:16]
    assert [v for k, v in call.headers if k == b"x-outrider-owner"] == [f"key {digest}".encode()]


def test_a_front_checks_hosts_and_origins_for_its_replicas(lives: list[Live]) -> None:
    app = front(lives[:1], host="127.0.0.1", allowed_host=["front"])
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert post(app, "/v1/completions", body).status_code == 200
    assert post(app, "/v1/completions", body, headers={"host": "evil.example"}).status_code == 403
    assert post(app, "/v1/completions", body, headers={"origin": "http://evil.example"}).status_code == 403
