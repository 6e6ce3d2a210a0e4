"""Bench against servers: one that works, and ones that refuse, stall, break off and talk nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest
from serving import builtin, serving

from outrider_lab.bench import stats
from outrider_lab.bench.prompts import Prompt
from outrider_lab.bench.remote import Remote, address
from outrider_lab.bench.run import Run, Setting
from outrider_lab.bench.schedule import measure

URL = "http://127.0.0.1:1"
SAMPLING = {"temperature": 0.0, "max_tokens": 8, "seed": 0}
PROMPTS = [Prompt("a", "x", "def f(x):"), Prompt("b", "y", [{"role": "user", "content": "Hi"}])]
PLAIN, FAST = Setting(name="plain", base_url=URL), Setting(name="server", base_url=URL, speculative_config={})


def sse(*events: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(e)}\n\n" for e in events]
    return "".join(lines + ["data: [DONE]\n\n"] * done).encode()


def chunk(text: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}


END = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}


def remote(handler: Callable[[httpx.Request], httpx.Response], **options: object) -> Remote:
    settings = [PLAIN.model_copy(), FAST.model_copy()]
    return Remote(settings, "m", SAMPLING, transport=httpx.MockTransport(handler), **options)  # type: ignore[arg-type]


def answered(body: bytes | Iterator[bytes], status: int = 200, timeout: float = 60):
    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body)

    side = remote(handler, timeout=timeout)
    return side, side.answer(FAST, PROMPTS[:1], 0, 0)[0]


def drip() -> Iterator[bytes]:
    """Sends a sign of life without end, and never an answer."""
    while True:
        yield b": still here\n\n"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"error": {"message": "no such model"}}', 404, "HTTP 404: no such model"),
        (b"<html>busy</html>", 503, "HTTP 503: <html>busy</html>"),
        (b"", 500, "HTTP 500: Internal Server Error"),
        (b"<html>hello</html>", 200, "not an event stream: <html>hello"),
        (b'{"choices": [{"text": "not streamed"}]}', 200, "not an event stream"),
        (b"data: {nonsense\n\n", 200, "an event is not JSON: {nonsense"),
        (b"data: [1]\n\n", 200, "an event is not an object"),
        (sse({"choices": [7]}), 200, "is not valid (AttributeError"),
        (sse(END, {"choices": [], "usage": {"prompt_tokens": 1}}), 200, "is not valid (KeyError"),
        (sse({"error": {"message": "out of memory"}}), 200, "the server stopped: out of memory"),
        (sse(chunk("a"), done=False), 200, "the stream ended before the answer did"),
        (sse(), 200, "the stream had no text"),
        (b"", 200, "the stream had no text"),
        (b"x" * (1 << 25), 200, "not an event stream: xxx"),
        (drip(), 200, "longer than --timeout allows"),
    ],
)
def test_what_is_no_answer_is_an_error_of_the_sample(body: bytes, status: int, message: str) -> None:
    _, sample = answered(body, status, timeout=60 if isinstance(body, bytes) else 0.05)
    assert sample.error is not None
    assert message in sample.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx.ReadTimeout("late"), "no data for 600 s; --timeout allows more"),
        (httpx.ConnectError("refused"), f"no connection to {URL} (refused)"),
        (httpx.RemoteProtocolError("cut"), "the connection broke (RemoteProtocolError: cut)"),
    ],
)
def test_what_breaks_the_connection(error: Exception, message: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error

    assert remote(handler).answer(FAST, PROMPTS[:1], 0, 0)[0].error == message


def test_a_stream_is_measured() -> None:
    metrics = {"speculative_decoding": {"per_step_drafted": [2, 2, 2], "per_step_accepted": [0, 2, 2]}}
    events = [chunk("de", so_far={"tokens": 2}), chunk("f", so_far={"tokens": 5}), {**END, "guarantee": "exact-tokens"}]
    side, sample = answered(sse(*events, {**USAGE, "metrics": metrics}))
    assert (sample.error, sample.text, sample.prompt_tokens, sample.output_tokens) == (None, "def", 3, 5)
    assert [n for _, n in sample.gaps] == [3]
    assert (sample.drafted, sample.accepted) == ([2, 2, 2], [0, 2, 2])
    assert sample.finish_reason == "length"
    assert 0 < (sample.ttft or 0) <= sample.seconds
    assert FAST.guarantee == "exact-tokens"
    assert not side.notes


def test_a_server_without_metrics_and_usage_is_measured_with_a_note() -> None:
    side, sample = answered(sse(chunk("a"), chunk("b"), END))
    assert (sample.error, sample.output_tokens, sample.drafted) == (None, 2, None)
    assert "does not report the number of tokens" in next(iter(side.notes))


def test_rejected_guesses_of_a_prediction_are_no_tokens() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 9}
    usage["completion_tokens_details"] = {"rejected_prediction_tokens": 4}  # type: ignore[assignment]
    assert answered(sse(chunk("a"), END, {"choices": [], "usage": usage}))[1].output_tokens == 5


def test_wishes_are_given_up_where_they_are_refused_and_the_switch_is_watched() -> None:
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        bodies.append(body)
        if "detailed_metrics" in body:
            return httpx.Response(400, json={"error": {"message": "unknown field"}})
        told = {"per_step_drafted": [3], "per_step_accepted": [1]}
        return httpx.Response(200, content=sse(chunk("a"), END, {**USAGE, "metrics": {"speculative_decoding": told}}))

    side = remote(handler, off={"speculative": False})
    side.warm(PLAIN, PROMPTS[:1])
    assert bodies[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert bodies[1]["stream_options"] == {"include_usage": True}
    assert bodies[1]["speculative"] is False
    assert "still drafts tokens with" in next(iter(side.notes))
    side.answer(FAST, PROMPTS[1:], 2, 0)
    assert "speculative" not in bodies[2]
    assert (bodies[2]["seed"], bodies[2]["messages"]) == (2, PROMPTS[1].content)


def test_a_run_goes_on_when_requests_fail() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content).get("messages"):
            return httpx.Response(500, text="no chat here")
        return httpx.Response(200, content=sse(chunk("a"), END, USAGE))

    settings = [PLAIN.model_copy(), FAST.model_copy()]
    run = Run(
        date="", command="", model="m", machine={}, sampling=SAMPLING, settings=settings,
        prompts=[{"id": a.id, "text": a.text} for a in PROMPTS],  # type: ignore[list-item]
    )  # fmt: skip
    assert len(list(measure(run, remote(handler), PROMPTS))) == 4
    assert run.complete
    assert [s.error for s in run.samples if s.prompt == "b"] == ["HTTP 500: no chat here"] * 2
    assert len(stats.answered(run, "plain")) == 1


@pytest.mark.parametrize(
    ("url", "whole"),
    [("localhost:8000", "http://localhost:8000"), ("https://h/v1/", "https://h"), ("http://h/x/v1", "http://h/x")],
)
def test_addresses(url: str, whole: str) -> None:
    assert address(url) == whole


@pytest.mark.parametrize(("url", "message"), [("ftp://h", "not the address"), ("http://me:key@h", "OUTRIDER_API_KEY")])
def test_addresses_that_are_none(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        address(url)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(401), "needs a key: set OUTRIDER_API_KEY"),
        (httpx.Response(200, text="hello"), "does not list its models (hello); name one: -m NAME"),
        (httpx.Response(200, json={"data": []}), "does not list its models"),
    ],
)
def test_servers_that_do_not_name_their_models(response: httpx.Response, message: str) -> None:
    with pytest.raises(ConnectionError) as caught:
        Remote([FAST], None, SAMPLING, transport=httpx.MockTransport(lambda _: response))
    assert message in str(caught.value)


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionError, match=r"no server answers at .*outrider serve"):
        Remote([FAST], None, SAMPLING)


@pytest.fixture(scope="module")
def live() -> Iterator[str]:
    with serving(builtin()) as server:
        yield server.url


def test_our_own_server_keeps_its_promise(live: str) -> None:
    settings = [Setting(name="plain", base_url=live), Setting(name="server", base_url=live, speculative_config={})]
    side = Remote(settings, None, {**SAMPLING, "temperature": 0.8, "seed": 3})
    run = Run(
        date="", command="", model="m", machine={}, sampling=side.sampling, settings=settings, concurrency=2,
        prompts=[{"id": a.id, "text": a.text} for a in PROMPTS],  # type: ignore[list-item]
    )  # fmt: skip
    list(measure(run, side, PROMPTS))
    plain, fast = stats.answered(run, "plain"), stats.answered(run, "server")
    assert [s.error for s in run.samples] == [None] * 4
    assert stats.identity_promised(run, "server")
    assert stats.differing(fast, plain) == ([], 2)
    assert not side.notes
    assert stats.acceptance(plain) is None
    assert stats.acceptance(fast) is not None
    assert all(sum(n for _, n in s.gaps) < s.output_tokens == 8 for s in run.samples)
