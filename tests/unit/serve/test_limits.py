"""What a server withstands: clients that leave, hang and flood; drafters and models that fail; being told to stop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as quick
from patience import PATIENCE
from serving import Live, builtin, serving

from outrider import LLM, SamplingParams
from outrider.core.outputs import Delta
from outrider.engine import scheduler
from outrider.models.base import LanguageModel
from outrider.serve import logs
from outrider.serve.answer import Answer, one_by_one
from outrider.serve.app import create_app
from outrider.serve.options import ServeOptions

PROMPT = "def quicksort(xs):\n"
LONG = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return builtin(2)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(2)) as live:
        yield live


def aborted(live: Live) -> float:
    """Texts that nobody waited for any more."""
    labels = {"model_name": "code", "engine": "0", "finished_reason": "abort"}
    return live.registry.get_sample_value("outrider:request_success_total", labels) or 0


class Gate:
    """Stops the model before a forward until it is opened, so that a text is surely still being written."""

    def __init__(self, live: Live, free: int = 3) -> None:
        self.model, self.free = live.service.engine.decoder.target, free
        self.open, self.reached, self.forward = threading.Event(), threading.Event(), self.model.forward

    def __enter__(self) -> Gate:
        self.model.forward = self  # type: ignore[method-assign]
        self.model.step = partial(LanguageModel.step, self.model)  # type: ignore[method-assign]
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
        del self.model.step


@contextmanager
def streaming(live: Live, **body) -> Iterator[httpx.Response]:
    with httpx.stream("POST", live.url + "/v1/completions", json={**LONG, "stream": True, **body}) as response:
        yield response


@pytest.mark.parametrize("examples", [2, pytest.param(50, marks=pytest.mark.long)])
def test_its_openapi_document_holds_under_schemathesis(examples: int) -> None:
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
            @quick(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
            def judge(case: schemathesis.Case) -> None:
                # 10 s if not given, which a busy machine exceeds
                case.call_and_validate(checks=checks, timeout=PATIENCE)

            judge()
            asked += 1
        assert asked == 23
        assert live.service.engine.problem is None


def test_a_stream_that_waits_says_so_in_comments(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer, "quiet", 0.02)
    with Gate(live, free=0) as gate, streaming(live, max_tokens=4) as response:
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
        assert live.post(prompt=PROMPT * 20, max_tokens=100).status_code == 200
        read = live.registry.get_sample_value
        name = {"model_name": "code", "engine": "0"}
        assert read("outrider:kv_cache_limit_bytes", name) == limit
        assert 0 < before == read("outrider:kv_cache_bytes", name) <= limit - (1 << 20)
        assert 0 < read("outrider:prefix_cache_bytes", name) <= 1 << 20  # type: ignore[operator]


def test_health_tells_of_tables_that_are_wrong(llm: LLM) -> None:
    with serving(llm) as live:
        live.service.engine.roster.lost[99] = "a leak"
        assert live.post(prompt=PROMPT, max_tokens=2).status_code == 200
        while (sick := httpx.get(live.url + "/health")).status_code == 200:
            pass
        assert "remember slots [99]" in sick.json()["error"]["message"]
        del live.service.engine.roster.lost[99]


def test_health_tells_of_an_engine_that_hangs(llm: LLM) -> None:
    with serving(llm, ServeOptions(model="code", host="0.0.0.0", stall_timeout=0.2)) as live:
        assert live.service.engine.stalled == 0
        with Gate(live) as gate, streaming(live, max_tokens=20) as response:
            assert gate.reached.wait(PATIENCE)
            while (sick := httpx.get(live.url + "/health")).status_code == 200:
                pass
            assert "busy with one step" in sick.json()["error"]["message"]
            gate.open.set()
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        assert httpx.get(live.url + "/health").status_code == 200  # and that it has come back


def test_a_client_that_leaves_takes_its_text_with_it(live: Live) -> None:
    before, engine = aborted(live), live.service.engine
    with Gate(live) as gate:
        with streaming(live):
            assert gate.reached.wait(PATIENCE)
        hangs = socket.create_connection(("127.0.0.1", live.port))  # not streaming
        body = json.dumps(LONG).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        hangs.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while engine.stats.running + engine.stats.waiting < 2:
            httpx.get(live.url + "/health")  # the loop gets round to it
        hangs.close()
        while not all(job.cancelled for job in [*engine.scheduler.running.values(), *engine.scheduler.queue]):
            httpx.get(live.url + "/health")
        gate.open.set()
        assert live.post(prompt=PROMPT, max_tokens=3).status_code == 200
        assert aborted(live) == before + 2


def test_half_a_body_costs_a_connection_and_a_client_that_does_not_read_is_let_go(llm: LLM) -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    with serving(llm, ServeOptions(model="code", host="0.0.0.0", body_timeout=1.0, send_timeout=0.05)) as live:
        with socket.create_connection(("127.0.0.1", live.port)) as slow:
            slow.sendall(half)
            assert b" 408 " in slow.recv(1000)
        with socket.create_connection(("127.0.0.1", live.port)) as gone:
            gone.sendall(half)
        parts = iter([{"type": "http.request", "body": json.dumps({**LONG, "stream": True}).encode()}])
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
        assert live.post(prompt=PROMPT, max_tokens=2).status_code == 200
        assert aborted(live) == 1


def test_a_full_queue(llm: LLM) -> None:
    with serving(llm, max_queue=1) as live, Gate(live) as gate, streaming(live):
        assert gate.reached.wait(PATIENCE)
        with streaming(live), streaming(live):  # one for the row that is left, one for the queue
            full = live.post(prompt=PROMPT)
            assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(full.headers["retry-after"]) >= 1


def test_too_many_requests_leave_the_monitoring_alone_and_half_a_body_is_none(llm: LLM) -> None:
    with (
        serving(llm, ServeOptions(model="code", host="0.0.0.0", max_connections=1)) as live,
        socket.create_connection(("127.0.0.1", live.port)) as held,
    ):
        held.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        assert httpx.get(live.url + "/version").status_code == 200
        with Gate(live) as gate, streaming(live):
            assert gate.reached.wait(PATIENCE)
            busy = httpx.get(live.url + "/version")
            assert (busy.status_code, busy.json()["error"]["code"]) == (503, "overloaded")
            assert httpx.get(live.url + "/health").status_code == 200
            assert httpx.get(live.url + "/metrics").status_code == 200


def test_a_deadline_hands_back_what_was_written(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    answer: dict = {}
    with Gate(live) as gate:
        thread = threading.Thread(target=lambda: answer.update(live.post(**LONG).json()))
        thread.start()
        assert gate.reached.wait(PATIENCE)
        [job] = live.service.engine.scheduler.running.values()
        with monkeypatch.context() as clock:  # of the next steps
            clock.setattr(scheduler, "perf_counter", lambda: job.request.deadline)
            gate.open.set()
            thread.join(PATIENCE)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "deadline" in answer["choices"][0]["stop_reason"]
    assert 0 < answer["usage"]["completion_tokens"] < 2000
    for seconds in (1e-9, 5e-324):  # the least number that there is
        late = live.post(**LONG, timeout=seconds)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
        assert "deadline" in late.json()["error"]["message"]


def test_told_to_stop_it_hands_back_partial_texts(llm: LLM) -> None:
    with serving(llm) as live, Gate(live) as gate, streaming(live, stream_options={"include_usage": True}) as response:
        assert gate.reached.wait(PATIENCE)
        live.service.engine.drain(0)
        refused = live.post(prompt=PROMPT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopped")
        gate.open.set()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        ends = [json.loads(e)["choices"][0] for e in events[:-1] if json.loads(e)["choices"]]
        assert (ends[-1]["finish_reason"], ends[-1]["stop_reason"]) == ("length", "the server is shutting down")
        assert "".join(e["text"] for e in ends)


@pytest.mark.parametrize(("how", "words"), [("raise", "the server failed"), ("nan", "logits are not numbers")])
def test_a_model_that_fails_is_an_error_without_a_trace(
    how: str, words: str, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args, **options):
        out = forward(*args, **options)
        if how == "raise":
            raise RuntimeError("secret: /etc/passwd")
        out.logits[:] = float("nan")
        return out

    target = live.service.engine.decoder.target
    forward = target.forward
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", broken)
        patch.setattr(target, "step", partial(LanguageModel.step, target))
        whole = live.post(prompt=PROMPT)
        with streaming(live) as response:
            events = [line for line in response.iter_lines() if line]
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "generation_failed")
    assert '"error"' in events[-2]
    assert all(words in text and "secret" not in text for text in (whole.text, events[-2]))
    assert live.post(prompt=PROMPT, max_tokens=2).status_code == 200
    assert httpx.get(live.url + "/health").status_code == 200


def test_a_drafter_that_fails_costs_guesses_and_says_so(live: Live, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    with monkeypatch.context() as patch:
        patch.setattr(live.service.engine.roster.drafters["draft_model"], "propose", lambda batch: 1 / 0)
        choice = live.post(prompt=PROMPT, temperature=0, max_tokens=20).json()["choices"][0]
    assert choice["text"] == expected
    why = "the drafter 'draft_model' failed (it raised ZeroDivisionError); the rest of the text was written without drafts"
    assert choice["note"] == why


def test_when_the_engine_dies_health_tells_and_everybody_is_answered(llm: LLM) -> None:
    with serving(llm) as live, Gate(live) as gate, streaming(live) as response:
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
        assert live.post(prompt=PROMPT).status_code == 503


def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(live: Live, tmp_path: Path) -> None:
    lost = []
    for file in (Path("/dev/full"), tmp_path / "log"):
        handler = logs.start(file, lambda: lost.append(1))
        try:
            assert live.post(prompt=PROMPT + "secret", max_tokens=2).status_code == 200
            while not (lost or (file.name == "log" and file.read_text())):  # the line comes after the answer
                sleep(0.01)
        finally:
            logs.log.parent.removeHandler(handler)  # type: ignore[union-attr]
        assert file.name == "log" or lost
        lost.clear()
    assert "POST /v1/completions 200" in (tmp_path / "log").read_text()
    assert "secret" not in (tmp_path / "log").read_text()


def test_a_padded_stream_sends_one_token_an_event_and_no_more(llm: LLM) -> None:
    """Also a token without text of its own, as half of a character. It says nothing of drafts."""
    with serving(llm, ServeOptions(model="code", host="0.0.0.0", pad_stream=1)) as live:
        body = {"prompt": "# ééé 日本語\n", "max_tokens": 20, "seed": 1, "logprobs": 0, "return_token_ids": True}
        body |= {"logit_bias": {str(t): 8 for t in llm.encode("日本語é")[:8]}}  # characters of several tokens
        whole = live.post(**body).json()["choices"][0]
        with streaming(live, **body, ignore_eos=False, return_pieces=True) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line and not line.endswith("[DONE]")]
    chunks = [event["choices"][0] for event in events]
    assert [t for c in chunks for t in c.get("token_ids", ())] == whole["token_ids"]
    assert all(len(c.get("token_ids", ())) <= 1 and "pieces" not in c for c in chunks)
    assert "".join(c["text"] for c in chunks) == whole["text"]
    told = [x for c in chunks if c["logprobs"] for x in c["logprobs"]["token_logprobs"]]
    assert told == whole["logprobs"]["token_logprobs"]
    several = Delta("abc", [1, 2, 3], [(c, False) for c in "abc"], logprobs=[{1: -0.5}, {2: -0.1}, {3: -0.2}])
    assert [(u.text, u.token_ids, u.logprobs) for u in one_by_one(several)] == [
        ("a", [1], [{1: -0.5}]), ("b", [2], [{2: -0.1}]), ("c", [3], [{3: -0.2}])
    ]  # fmt: skip
