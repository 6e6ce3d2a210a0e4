"""The dashboard's server side: who is told what, trials, and viewers that do not read."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import re
import socket
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import httpx
import pytest

from outrider.core.http import events
from outrider.core.params import SamplingParams
from outrider.core.stopping import FinishReason, StopChecker
from outrider.engine.llm import LLM
from outrider.engine.request import Request, Sequence
from outrider.serve.dashboard import viewers
from outrider.serve.dashboard.figures import figures, outlook, recent
from outrider.serve.dashboard.trial import OFF, ON, Trial
from tests.support.serving import Live, builtin, serving

BOTH = {"method": ["suffix", "draft_model"], "model": "builtin:code-draft"}
BODY = {"model": "code", "prompt": "def f(x):", "max_tokens": 16, "temperature": 0}


def ask(live: Live, **more: Any) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/completions", json={**BODY, **more})


def watched(live: Live, act: Any, until: Any, **options: Any) -> list[dict[str, Any]]:
    """The events while `act` runs, up to the first for which `until` holds."""
    seen = list[dict[str, Any]]()
    with httpx.stream("GET", f"{live.url}/dashboard/events", **options) as stream:
        stream.raise_for_status()
        done = threading.Thread(target=act)
        for event in events(stream.iter_raw()):
            seen.append(event)
            if len(seen) == 1:
                done.start()
            if len(seen) > 1 and until(seen):
                break
        done.join()
    return seen


@pytest.fixture(scope="module")
def live() -> Any:
    with serving(builtin()) as found:
        yield found


def ended(seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [request for event in seen for request in event["ended"]]


def test_events_add_up_to_what_was_answered(live: Live) -> None:
    answers = list[dict[str, Any]]()
    seen = watched(live, lambda: answers.extend(ask(live).json() for _ in range(3)), lambda seen: len(ended(seen)) == 3)
    counts = [answer["metrics"]["speculative_decoding"] for answer in answers]
    ticks = seen[1:]
    assert sum(t["tokens"] for t in ticks) == sum(a["usage"]["completion_tokens"] for a in answers)
    assert sum(t["drafted"] for t in ticks) == sum(c["num_draft_tokens"] for c in counts)
    assert sum(t["accepted"] for t in ticks) == sum(c["num_accepted_draft_tokens"] for c in counts)
    assert [r["tokens"] for r in ended(seen)] == [a["usage"]["completion_tokens"] for a in answers]
    assert all("text" not in r and "prompt" not in r for r in ended(seen))
    found = figures(ticks)
    assert found["survival"][0] >= found["survival"][-1] > 0
    assert figures(recent(ticks, 0.1))["elapsed"] <= found["elapsed"]


def test_plans_are_counted_and_the_last_words_on_each_drafter_are_told() -> None:
    llm = LLM("builtin:code", speculative_config=BOTH, max_num_seqs=4)
    with serving(llm) as live:
        ticks = watched(live, lambda: [ask(live) for _ in range(3)], lambda seen: len(ended(seen)) == 3)[1:]
    found = figures(ticks)
    assert sum(sum(t["plans"].values()) for t in ticks) == sum(t["rows"] for t in ticks)
    assert sum(found["plans"].values()) == pytest.approx(1)
    assert found["plans"].keys() <= {"none", "reading", "suffix", "draft_model"}
    assert found["sigma"] > 0
    drafted = found["weighed"]["draft_model"]
    assert drafted["tokens"] > 0
    assert drafted["seconds"] > 0
    assert drafted["verdict"]
    assert ticks[-1]["drift"]["target"] > 0
    assert "times plain decoding" in ticks[-1]["why"]


def test_a_fixed_length_weighs_nothing(live: Live) -> None:
    ticks = watched(live, lambda: ask(live), lambda seen: len(ended(seen)) == 1)[1:]
    found = figures(ticks)
    assert (found["weighed"], found["sigma"], ticks[-1]["drift"]) == ({}, None, {})
    assert found["plans"]["draft_model"] > 0
    assert sum(t["depth"] for t in ticks) == sum(drafted for t in ticks for drafted, _ in t["by_depth"])


def test_nothing_is_counted_while_nobody_looks(live: Live) -> None:
    engine, watch = live.service.engine, live.dashboard.watch
    assert ask(live).status_code == 200
    assert engine.scheduler.observers == (live.metrics,)
    assert watch.tick()[0]["steps"] == 0
    watched(live, lambda: ask(live), lambda seen: seen[-1]["steps"] > 0)
    while live.dashboard.viewers:
        sleep(0.01)
    assert engine.scheduler.observers == (live.metrics,)


def test_a_viewer_that_leaves_is_no_failure(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "outrider.serve"):
        watched(live, lambda: ask(live), lambda seen: seen[-1]["steps"] > 0)
        while not any("/dashboard/events" in record.getMessage() for record in caplog.records):
            sleep(0.01)
    assert all(record.levelname == "INFO" for record in caplog.records)


def test_a_tick_has_the_figures_of_each_window(live: Live) -> None:
    """The page computes nothing: each tick brings the figures of its windows."""
    ticks = watched(live, lambda: [ask(live) for _ in range(3)], lambda seen: len(ended(seen)) == 3)[1:]
    for n, last in enumerate(ticks, 1):
        assert last["windows"].keys() == {"10", "60", "300"}
        for seconds, found in last["windows"].items():
            wanted = outlook(ticks[:n], last, int(seconds))
            assert found == json.loads(json.dumps(wanted))
        assert last["point"][0] == figures(ticks[max(n - 4, 0) : n])["rate"]
    assert figures([])["between"] is None


def some(worth: list[float], none: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    """Ticks of half a second. worth: plain seconds of the tokens of each, which took 0.4 s. none: share without a draft."""
    tick = {"steps": 4, "rows": 4, "tokens": 8, "drafted": 8, "accepted": 4, "depth": 8, "planned": 4, "sigma": 6.0}
    tick |= {"elapsed": 0.5, "taken": 0.4, "seconds": {"target": 0.4}, "weighed": {}, "by_depth": [[4, 2]]}
    tick |= {
        "speed_from": "made",
        "speculates": True,
        "trial": None,
        "plans": {"none": none, "suffix": 1 - none},
        **more,
    }
    return [{**tick, "worth": w} for w in worth]


def trial(ratio: float, ago: float) -> dict[str, Any]:
    return {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1, "ended": {ON: 20, OFF: 20}, "ago": ago}


UP, DOWN, LEVEL = [0.6, 0.62, 0.58] * 4, [0.3, 0.31] * 5, [0.35, 0.45] * 5
ANSWERS = {
    "gain": (some(UP), "yes", "Yes: 1.50 times"),
    "loss": (some(DOWN), "no", "No: 0.76 times"),
    "neither": (some(LEVEL), "even", "No difference is shown: 1.00 times"),
    "resting": (some(LEVEL, none=0.95), "rest", "Not now: 95 % of the steps over the last 5 s had no draft, because none was"),
    "resting, and yet a gain": (some(UP, none=0.95), "yes", "Yes: 1.50 times"),
    "few steps": (some(UP[:3]), "unknown", "Too few requests to say: 1.50 times"),
    "no steps": (some([0.0] * 9, taken=0.0, plans={}), "unknown", "Too few requests to say: nothing"),
    "no plain step": (some([0.0] * 9, taken=0.0), "unknown", "Not known: no plain step"),
    "plain server": (some(LEVEL, speculates=False), "no", "No: this server decodes plainly"),
    "a trial just now": (some(UP, trial=trial(0.8, 3)), "no", "No: 0.80 times as fast as plain decoding (0.70 to 0.90), m"),
    "a trial of old": (some(UP, trial=trial(0.8, 3000)), "yes", "Yes: 1.50 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_is_one_sentence_with_an_interval(name: str) -> None:
    ticks, kind, words = ANSWERS[name]
    found = outlook(ticks, ticks[-1], 60)
    assert found["kind"] == kind
    assert found["answer"].startswith(words)
    assert len(re.findall(r"\.(?!\d)", found["answer"])) == 1
    assert bool(re.search(r"\(\d\.\d\d to \d\.\d\d\)", found["answer"])) == ("times" in words and kind != "unknown")
    assert [*found["sources"]] == ["Measured", "Estimated", "Expected"]
    assert ("A/B trial, 40 requests" in found["sources"]["Measured"]) == ("trial" in name)
    assert "1.50 times" in found["sources"]["Expected"]


def test_the_interval_covers_the_ratio() -> None:
    """Ticks of texts of ten ticks each, so neighbours are alike. In 95 of 100 windows the true ratio, 1.5, is inside."""
    make, inside = random.Random(7), 0
    for _ in range(200):
        texts = [0.6 * make.uniform(0.5, 1.5) for _ in range(12)]
        low, high = figures(some([worth for worth in texts for _ in range(10)]))["between"]
        inside += low <= 1.5 <= high
    assert inside >= 0.9 * 200
    assert figures(some([0.6] * 20))["between"] == pytest.approx((1.5, 1.5))


def test_two_hundred_requests_at_capacity_beside_a_viewer_that_stalls() -> None:
    """Every request is answered, the viewer is dropped, and its queue is all that it ever held."""
    with serving(builtin(), max_queue=300) as live:
        board = live.dashboard
        board.interval = 0.01
        # The system buffers megabytes of a connection, which would take minutes to fill.
        live.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stalled = socket.create_connection(("127.0.0.1", live.port))
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        stalled.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: x\r\n\r\n")
        while not board.viewers:
            sleep(0.01)
        [viewer] = board.viewers
        longest = 0
        with ThreadPoolExecutor(16) as clients:
            answers = [clients.submit(ask, live, max_tokens=8) for _ in range(200)]
            while not all(a.done() for a in answers) or (board.viewers and not board.dropped):
                longest = max(longest, viewer.waiting)
                sleep(0.002)
        assert [a.result().status_code for a in answers] == [200] * 200
        assert all(a.result().json()["usage"]["completion_tokens"] == 8 for a in answers)
        assert board.dropped == 1
        assert 0 < longest <= viewers.WAITING
        while board.viewers:
            sleep(0.01)
        stalled.close()
        assert ask(live).status_code == 200


def test_memory_is_flat_beside_viewers_that_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers come, read nothing and stay connected. Each is dropped, and nothing that was meant for it is kept."""
    size, many = 100_000, 4
    with serving(builtin()) as live:
        board = live.dashboard
        board.interval = 0.005
        tick = board.watch.tick
        monkeypatch.setattr(board.watch, "tick", lambda: ({**tick()[0], "padding": "x" * size}, []))
        stalled = list[socket.socket]()
        live.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        def stall() -> None:
            one = socket.create_connection(("127.0.0.1", live.port))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            one.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: x\r\n\r\n")
            stalled.append(one)
            for _ in range(3000):
                if board.dropped == len(stalled) and not board.viewers and not live.server.server_state.connections:
                    return
                sleep(0.01)
            pytest.fail("the connection of a viewer that was dropped is kept")

        stall()
        tracemalloc.start()
        try:
            for _ in range(many):
                stall()
            gc.collect()
            left, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            for one in stalled:
                one.close()
        # One viewer's queue is all that is ever held: unbounded, or kept, it would be many times that.
        assert most < 2.5 * viewers.WAITING * size
        assert left < 2 * size


def test_there_is_a_limit_of_viewers(live: Live) -> None:
    held = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(viewers.VIEWERS)]
    for one in held:
        one.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: x\r\n\r\n")
    while len(live.dashboard.viewers) < viewers.VIEWERS:
        sleep(0.01)
    assert httpx.get(f"{live.url}/dashboard/events").status_code == 503
    for one in held:
        one.close()
    while live.dashboard.viewers:
        sleep(0.01)


def sequence(n: int, tokens: int = 11, seconds: float = 1.0, finish: str = "length") -> Sequence:
    made = Sequence(Request(n, [1], SamplingParams()), StopChecker(SamplingParams(), (), tokens))
    made.tokens += [2] * tokens
    made.clock.first, made.clock.done, made.finish = 10.0, 10.0 + seconds, FinishReason(finish)
    return made


def test_a_trial_finds_the_difference_that_is_there() -> None:
    trial, arms = Trial(40, seed=3), list[str]()
    for n in range(40):
        with trial.enrolled([Request(n, [1], SamplingParams())]) as [request]:
            arms.append(OFF if request.num_speculative_tokens == 0 else ON)
        trial.finished(sequence(n, seconds=(1.0 if arms[-1] == ON else 2.0) * (1 + 0.1 * (n % 3))))
    for n in range(40, 44):
        with trial.enrolled([Request(n, [1], SamplingParams())]) as [request]:
            assert request.num_speculative_tokens is None
    assert trial.assigned == 40
    assert all({a, b} == {ON, OFF} for a, b in zip(arms[::2], arms[1::2], strict=True))
    assert len(set(arms[::2])) == 2, "the order within pairs is by chance"
    result = trial.result()
    assert result["complete"]
    assert result["ratio"] == pytest.approx(2, rel=0.05)
    assert 1 < result["low"] < 2 < result["high"] * 1.05


def test_a_trial_leaves_out_what_failed() -> None:
    trial = Trial(4, seed=1)
    bad = [sequence(0, finish="error"), sequence(1, tokens=1), sequence(2)]
    for one in bad:
        with contextlib.suppress(KeyError), trial.enrolled([one.request]):
            if one is bad[2]:
                raise KeyError
    for one in bad:
        trial.finished(one)
    assert trial.left == 3
    assert trial.result()["ratio"] is None
    with pytest.raises(ValueError, match="4 to"):
        Trial(2)


def test_a_trial_turns_speculation_off_for_half_and_leaves_wishes_alone(live: Live) -> None:
    started = httpx.post(f"{live.url}/dashboard/trial", json={"requests": 8})
    assert started.status_code == 200, started.text
    wish = ask(live, num_speculative_tokens=2).json()
    answers = [ask(live).json() for _ in range(8)]
    counts = [(a["metrics"] or {}).get("speculative_decoding") for a in answers]
    assert sum(c is None or c["num_draft_tokens"] == 0 for c in counts) == 4
    assert wish["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert len({a["choices"][0]["text"] for a in answers}) == 1, "the text is the same in both arms"
    state = live.service.trials.state() or {}
    assert state["complete"]
    assert state["ended"] == {ON: 4, OFF: 4}
    live.service.trials.stop()


def test_another_sites_page_cannot_start_a_trial(live: Live) -> None:
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        refused = httpx.post(f"{live.url}/dashboard/trial", json={"requests": 8}, headers=headers)
        assert refused.status_code == 403
    own = {"origin": live.url, "sec-fetch-site": "same-origin"}
    assert httpx.request("DELETE", f"{live.url}/dashboard/trial", headers=own).status_code == 200


def test_pictures_of_another_sites_page_take_no_seat(live: Live) -> None:
    picture = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    for path in ("/dashboard/poll?viewer=x", "/dashboard/events"):
        for method in ("GET", "POST"):
            assert httpx.request(method, live.url + path, headers=picture).status_code in (403, 405)
    assert httpx.get(f"{live.url}/dashboard/poll?viewer=x").status_code == 405
    assert not live.dashboard.viewers


def test_a_plain_server_has_nothing_to_compare() -> None:
    with serving(builtin(config={"method": "none"})) as live:
        refused = httpx.post(f"{live.url}/dashboard/trial", json={"requests": 8})
        assert refused.status_code == 400
        assert "decodes plainly" in refused.json()["error"]["message"]
