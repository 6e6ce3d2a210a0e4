"""What a server withstands: clients that leave, hang and flood; drafters and models that fail; being told to stop."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as quick
from patience import PATIENCE
from serving import Live, builtin, serving

from outrider import LLM, SamplingParams
from outrider.core.outputs import Delta
from outrider.serve import logs
from outrider.serve.answer import Answer, one_by_one
from outrider.serve.app import create_app
from outrider.serve.options import ServeOptions

PROMPT = "def quicksort(xs):\n"
LONG = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return builtin(2)


class Gate:
    """Stops the model before a forward until it is opened, so that a text is surely still being written."""

    def __init__(self, llm: LLM, free: int = 3) -> None:
        self.model, self.free, self.open, self.reached = llm.decoder.target, free, threading.Event(), threading.Event()
        self.forward = self.model.forward

    def __enter__(self) -> Gate:
        self.model.forward = self  # type: ignore[method-assign]
        return self

    def __call__(self, *args, **options):
        self.free -= 1
        if self.free < 0:
            self.reached.set()
            assert self.open.wait(PATIENCE)
        return self.forward(*args, **options)

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self.model.forward = self.forward  # type: ignore[method-assign]


@contextmanager
def streaming(live: Live, **body) -> Iterator[httpx.Response]:
    with httpx.stream("POST", live.url + "/v1/completions", json={**LONG, "stream": True, **body}) as response:
        yield response


def post(live: Live, **body) -> httpx.Response:
    return httpx.post(live.url + "/v1/completions", json=body)


def test_its_openapi_document_holds_under_schemathesis() -> None:
    import schemathesis  # it takes a second, which each process would spend at the collection of tests
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as openapi

    checks = [
        not_a_server_error,
        openapi.status_code_conformance,
        openapi.content_type_conformance,
        openapi.response_schema_conformance,
    ]
    with serving(builtin(2, max_model_len=64)) as live:
        schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
        asked = 0
        for found in schema.get_all_operations():
            operation = found.ok()

            @given(case=operation.as_strategy())
            @quick(max_examples=15, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
            def judge(case: schemathesis.Case) -> None:
                # 10 s if not given, which a busy machine exceeds
                case.call_and_validate(checks=checks, timeout=PATIENCE)

            judge()
            asked += 1
        assert asked == 23
        assert live.service.engine.problem is None


def test_a_stream_that_waits_says_so_in_comments(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer, "quiet", 0.02)
    with serving(llm) as live, Gate(llm, free=0) as gate, streaming(live, max_tokens=4) as response:
        lines = response.iter_lines()
        found = [next(lines) for _ in range(8)]
        gate.open.set()
        found += list(lines)
    assert found.count(": still reading") >= 2
    assert [line for line in found if line][-1] == "data: [DONE]"
    assert all(line.startswith(("data: ", ": ")) for line in found if line)


def test_memory_is_bounded_and_shown() -> None:
    limit = 40 << 20
    with serving(builtin(2, max_model_len=512), memory_limit=limit, prefix_bytes=1 << 20) as live:
        before = live.service.engine.stats.kv_bytes
        assert post(live, prompt=PROMPT * 20, max_tokens=100).status_code == 200
        read = live.registry.get_sample_value
        name = {"model_name": "code", "engine": "0"}
        assert read("outrider:kv_cache_limit_bytes", name) == limit
        assert 0 < before == read("outrider:kv_cache_bytes", name) <= limit - (1 << 20)
        assert 0 < read("outrider:prefix_cache_bytes", name) <= 1 << 20  # type: ignore[operator]


def test_the_key_is_asked_of_everybody_but_the_health_check(llm: LLM) -> None:
    with serving(llm, ServeOptions(model="code", api_key=["s3cret"])) as live:
        for key in (None, "", "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret2"):
            got = httpx.get(live.url + "/v1/models", headers={"authorization": key} if key else {})
            assert got.status_code == 401
            assert got.headers["www-authenticate"] == "Bearer"
            assert "s3cret" not in got.text
            assert got.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(live.url + "/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert httpx.get(live.url + "/health").status_code == 200


def test_the_key_is_compared_in_constant_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    with serving(llm, ServeOptions(model="code", api_key=["s3cret"])) as live:
        for key in ("s", "s3cret", "s3creT", "x" * 5000):
            httpx.get(live.url + "/v1/models", headers={"authorization": f"Bearer {key}"})
    assert compared == [(32, 32)] * 4  # digests, of one length whatever was sent


def test_health_tells_of_tables_that_are_wrong(llm: LLM) -> None:
    with serving(llm) as live:
        live.service.engine.roster.lost[99] = "a leak"
        assert post(live, prompt=PROMPT, max_tokens=2).status_code == 200
        while (sick := httpx.get(live.url + "/health")).status_code == 200:
            pass
        assert "remember slots [99]" in sick.json()["error"]["message"]
        del live.service.engine.roster.lost[99]


def test_health_tells_of_an_engine_that_hangs(llm: LLM) -> None:
    with serving(llm, ServeOptions(model="code", host="0.0.0.0", stall_timeout=0.2)) as live:
        assert live.service.engine.stalled == 0
        with Gate(llm) as gate, streaming(live, max_tokens=20) as response:
            assert gate.reached.wait(PATIENCE)
            while (sick := httpx.get(live.url + "/health")).status_code == 200:
                pass
            assert "busy with one step" in sick.json()["error"]["message"]
            gate.open.set()
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        assert httpx.get(live.url + "/health").status_code == 200  # and that it has come back


def test_no_page_of_another_origin_may_ask_unless_it_is_named(llm: LLM) -> None:
    asking = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    with serving(llm) as live:
        assert "access-control-allow-origin" not in httpx.options(live.url + "/v1/models", headers=asking).headers
        assert "access-control-allow-origin" not in httpx.get(live.url + "/v1/models", headers=asking).headers
    with serving(
        llm, ServeOptions(model="code", host="0.0.0.0", cors_origin=["http://evil.example"], api_key=["k"])
    ) as live:
        got = httpx.options(live.url + "/v1/models", headers=asking)
        assert got.headers["access-control-allow-origin"] == "http://evil.example"


def test_a_client_that_leaves_takes_its_text_with_it(llm: LLM) -> None:
    with serving(llm) as live, Gate(llm) as gate:
        with streaming(live):
            assert gate.reached.wait(PATIENCE)
        hangs = socket.create_connection(("127.0.0.1", live.port))  # not streaming
        body = json.dumps(LONG).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        hangs.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while live.service.engine.stats.running + live.service.engine.stats.waiting < 2:
            httpx.get(live.url + "/health")  # the loop gets round to it
        hangs.close()
        while not all(
            job.cancelled
            for job in [*live.service.engine.scheduler.running.values(), *live.service.engine.scheduler.queue]
        ):
            httpx.get(live.url + "/health")
        gate.open.set()
        assert post(live, prompt=PROMPT, max_tokens=3).status_code == 200
        reasons = live.registry.get_sample_value
        assert (
            reasons("outrider:request_success_total", {"model_name": "code", "engine": "0", "finished_reason": "abort"})
            == 2
        )


def test_half_a_body_costs_a_connection_and_no_more(llm: LLM) -> None:
    with serving(llm, ServeOptions(model="code", host="0.0.0.0", body_timeout=1.0)) as live:
        with socket.create_connection(("127.0.0.1", live.port)) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            assert b" 408 " in half.recv(1000)
        gone = socket.create_connection(("127.0.0.1", live.port))
        gone.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        gone.close()
        assert post(live, prompt=PROMPT, max_tokens=2).status_code == 200


def test_a_client_that_does_not_read_is_let_go(llm: LLM) -> None:
    settings = ServeOptions(model="code", host="0.0.0.0", send_timeout=0.05)
    with serving(llm, settings) as live:
        body = json.dumps({**LONG, "stream": True}).encode()
        parts = iter([{"type": "http.request", "body": body}])
        sent = []

        async def receive() -> dict:
            for part in parts:
                return part
            await asyncio.Event().wait()
            return {}

        async def send(message: dict) -> None:
            sent.append(message)
            if len(sent) > 2:
                await asyncio.Event().wait()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        app = create_app(live.pool)
        asyncio.run(asyncio.wait_for(app({**scope, "http_version": "1.1", "scheme": "http"}, receive, send), 30))
        assert [m["type"] for m in sent] == ["http.response.start", "http.response.body", "http.response.body"]
        assert post(live, prompt=PROMPT, max_tokens=2).status_code == 200
        reasons = live.registry.get_sample_value
        assert (
            reasons("outrider:request_success_total", {"model_name": "code", "engine": "0", "finished_reason": "abort"})
            == 1
        )


def test_a_full_queue(llm: LLM) -> None:
    with serving(llm, max_queue=1) as live, Gate(llm) as gate, streaming(live):
        assert gate.reached.wait(PATIENCE)
        with streaming(live), streaming(live):  # one for the row that is left, one for the queue
            full = post(live, prompt=PROMPT)
            assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(full.headers["retry-after"]) >= 1


def test_too_many_requests_leave_the_monitoring_alone_and_half_a_body_is_none(llm: LLM) -> None:
    with (
        serving(llm, ServeOptions(model="code", host="0.0.0.0", max_connections=1)) as live,
        socket.create_connection(("127.0.0.1", live.port)) as held,
    ):
        held.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        assert httpx.get(live.url + "/version").status_code == 200
        with Gate(llm) as gate, streaming(live):
            assert gate.reached.wait(PATIENCE)
            busy = httpx.get(live.url + "/version")
            assert (busy.status_code, busy.json()["error"]["code"]) == (503, "overloaded")
            assert httpx.get(live.url + "/health").status_code == 200
            assert httpx.get(live.url + "/metrics").status_code == 200


def test_a_deadline_hands_back_what_was_written(llm: LLM) -> None:
    with serving(llm) as live:
        answer: dict = {}
        with Gate(llm) as gate:
            thread = threading.Thread(target=lambda: answer.update(post(live, **LONG).json()))
            thread.start()
            assert gate.reached.wait(PATIENCE)
            [job] = live.service.engine.scheduler.running.values()
            job.request = replace(job.request, deadline=0.0)
            gate.open.set()
            thread.join(PATIENCE)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert "deadline" in answer["choices"][0]["stop_reason"]
        assert 0 < answer["usage"]["completion_tokens"] < 2000
        for seconds in (1e-9, 5e-324):  # the least number that there is
            late = post(live, **LONG, timeout=seconds)
            assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
            assert "deadline" in late.json()["error"]["message"]


def test_told_to_stop_it_hands_back_partial_texts(llm: LLM) -> None:
    with serving(llm) as live, Gate(llm) as gate, streaming(live, stream_options={"include_usage": True}) as response:
        assert gate.reached.wait(PATIENCE)
        live.service.engine.drain(0)
        refused = post(live, prompt=PROMPT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopped")
        gate.open.set()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        ends = [json.loads(e)["choices"][0] for e in events[:-1] if json.loads(e)["choices"]]
        assert (ends[-1]["finish_reason"], ends[-1]["stop_reason"]) == ("length", "the server is shutting down")
        assert "".join(e["text"] for e in ends)


def test_a_model_that_fails_is_an_error_without_a_trace(llm: LLM) -> None:
    def broken(*args, **options):
        out = forward(*args, **options)
        if armed:
            if armed[0] == "raise":
                raise RuntimeError("secret: /etc/passwd")
            out.logits.fill_(float("nan"))
        return out

    forward, armed = llm.decoder.target.forward, list[str]()
    llm.decoder.target.forward = broken  # type: ignore[method-assign]
    try:
        with serving(llm) as live:
            for how, words in (("raise", "the server failed"), ("nan", "logits are not numbers")):
                armed[:] = [how]
                whole = post(live, prompt=PROMPT)
                assert (whole.status_code, whole.json()["error"]["code"]) == (500, "generation_failed")
                assert words in whole.text
                assert "secret" not in whole.text
                with streaming(live) as response:
                    events = [line for line in response.iter_lines() if line]
                assert '"error"' in events[-2]
                assert words in events[-2]
                armed.clear()
                assert post(live, prompt=PROMPT, max_tokens=2).status_code == 200
                assert httpx.get(live.url + "/health").status_code == 200
    finally:
        llm.decoder.target.forward = forward  # type: ignore[method-assign]


def test_a_drafter_that_fails_costs_guesses_and_says_so(llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    drafter = llm.drafters["draft_model"]
    propose = drafter.propose
    drafter.propose = lambda batch: 1 / 0  # type: ignore[method-assign,assignment]
    try:
        with serving(llm) as live:
            choice = post(live, prompt=PROMPT, temperature=0, max_tokens=20).json()["choices"][0]
    finally:
        drafter.propose = propose  # type: ignore[method-assign]
    assert choice["text"] == expected
    assert (
        choice["note"]
        == "the drafter 'draft_model' failed (it raised ZeroDivisionError); the rest of the text was written without drafts"
    )


def test_when_the_engine_dies_health_tells_and_everybody_is_answered(llm: LLM) -> None:
    with serving(llm) as live, Gate(llm) as gate, streaming(live) as response:
        assert gate.reached.wait(PATIENCE)

        def die(*args, **options):
            raise SystemExit

        forward, gate.forward = gate.forward, die
        gate.open.set()
        events = [line for line in response.iter_lines() if line]
        gate.forward = forward
        assert "the engine has died" in events[-2]
        live.service.engine.close()
        sick = httpx.get(live.url + "/health")
        assert (sick.status_code, sick.json()["error"]["message"]) == (503, "the engine has died (SystemExit)")
        assert post(live, prompt=PROMPT).status_code == 503


def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = []
    for file in (Path("/dev/full"), tmp_path / "log"):
        handler = logs.start(file, lambda: lost.append(1))
        try:
            with serving(llm) as live:
                assert post(live, prompt=PROMPT + "secret", max_tokens=2).status_code == 200
        finally:
            logs.log.parent.removeHandler(handler)  # type: ignore[union-attr]
        if file.name == "full":
            assert lost
    assert "POST /v1/completions 200" in (tmp_path / "log").read_text()
    assert "secret" not in (tmp_path / "log").read_text()


def test_a_padded_stream_sends_one_token_an_event_on_an_even_clock(llm: LLM) -> None:
    settings = ServeOptions(model="code", host="0.0.0.0", pad_stream=1)
    with serving(llm, settings) as live, streaming(live, max_tokens=30, temperature=0) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line and not line.endswith("[DONE]")]
    texts = [e["choices"][0]["text"] for e in events[:-1]]
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    assert all(len(tokenizer(t)["input_ids"]) <= 2 for t in texts)
    assert len(texts) >= 25
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0].text
    assert "".join(texts) == expected
    several = Delta("abc", [1, 2, 3], [(c, False) for c in "abc"], logprobs=[{1: -0.5}, {2: -0.1}, {3: -0.2}])
    assert [(u.text, u.token_ids, u.logprobs) for u in one_by_one(several)] == [
        ("a", [1], [{1: -0.5}]), ("b", [2], [{2: -0.1}]), ("c", [3], [{3: -0.2}])
    ]  # fmt: skip
