"""The dashboard before many replicas shows their sums, on the page and in the terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from replicas import LocalReplicas
from serving import Live, builtin, serving

from outrider.serve.dashboard.figures import added, figures
from outrider.serve.dashboard.viewers import Audience, Dashboard
from outrider.serve.options import ServeOptions
from outrider_ray.dashboard import SummedDashboard, summed_hello, summed_state, summed_tick
from outrider_ray.front import Front, guarded

pytest.importorskip("aiohttp")

from outrider_ray.direct import Listener

PROMPT = "def quicksort(xs):\n"


def tick(tokens: int, ended: list[dict[str, Any]] | None = None, problem: str | None = None, **more: Any) -> Any:
    """A tick as a dashboard sends it, with some numbers."""
    engine = {"running": 1, "waiting": 2, "kv_tokens": 30, "kv_limit": 100, "memory_limit": None, "accepted": 4}
    sums = {"elapsed": 0.5, "steps": 2, "sequences": 2, "tokens": tokens, "drafted": 8, "by_depth": [[2, 2], [2, 1]]}
    sums |= {"requests": [[1.0, 0.5]], "plans": {"suffix": 1, "none": 1}, "seconds": {"target": 0.2, "draft": 0.1}}
    sums |= {"weighed": {"suffix": {"tokens": float(tokens)}}, **more}
    return {"sums": sums, "time": 100.0, "engine": engine, "problem": problem, "ended": ended or []}


def test_counts_are_sums_and_times_are_means() -> None:
    one = tick(10, [{"id": 7, "at": 2.0}])
    two = tick(30, [{"id": 7, "at": 1.0}], "it hangs", by_depth=[[1, 1]], requests=[(3.0, 2.0), (0.5, 0.5)])
    total, state = (
        summed_tick({"x": [one], "y": [two]}, 2),
        summed_state({"x": [one], "y": [two]}, {"x": one, "y": two}),
    )
    assert (total.tokens, total.drafted, total.steps, total.elapsed) == (40, 16, 4, 0.5)
    assert total.plans == {"suffix": 2, "none": 2}
    assert total.requests == [(1.0, 0.5), (3.0, 2.0), (0.5, 0.5)]
    assert total.weighed == {"suffix": {"tokens": 30.0}}
    assert total.seconds == pytest.approx({"target": 0.2, "draft": 0.1})
    assert total.by_depth == [[3, 3], [2, 1]]
    assert (state["engine"]["running"], state["engine"]["kv_limit"], state["engine"]["memory_limit"]) == (2, 200, None)
    assert state["problem"] == "y: it hangs"
    assert [r["id"] for r in state["ended"]] == ["y:7", "x:7"]
    assert figures(total)["rate"] == 80.0
    assert one.keys() == {*state, "sums"}


def test_a_replica_without_a_new_tick_keeps_its_place() -> None:
    """Polls and ticks are not in step: one poll may find two ticks of a replica and none of another."""
    one, two = tick(10), tick(30)
    polls: list[Any] = [{"x": [one, one], "y": []}, {"x": [], "y": [two, two]}]
    assert [summed_state(poll, {"x": one, "y": two})["engine"]["running"] for poll in polls] == [2, 2]
    assert figures(added(summed_tick(poll, 2) for poll in polls))["rate"] == 80.0


def test_the_models_of_an_update_stand_side_by_side() -> None:
    base = {"model": "m", "verifier": "match", "guarantee": "exact-tokens", "speculates": True}
    one = {
        **base,
        "method": "suffix",
        "num_speculative_tokens": 4,
        "slots": 4,
        "shows_text": True,
        "ended": [],
    }
    two = {**one, "method": "ngram", "num_speculative_tokens": 6, "slots": 2, "shows_text": False}
    found = summed_hello({"x": one, "y": two})
    assert (found["model"], found["method"], found["slots"]) == ("m", "suffix; ngram", 6)
    assert (found["num_speculative_tokens"], found["shows_text"]) == (6, False)
    assert found.keys() == one.keys()


def boards(lives: list[Live]) -> list[Dashboard]:
    return [live.dashboard for live in lives]


def behind_a_front(lives: list[Live], act: Callable[[str, Front], None]) -> None:
    """Run act(url, front) in a thread, beside a front at that address."""

    async def go() -> None:
        front = Front(LocalReplicas({f"r{i}": live.app for i, live in enumerate(lives)}), ServeOptions(model="code"))
        front.dashboard.interval = 0.05
        for board in boards(lives):
            board.interval = 0.05
        listener = Listener(guarded(front), "127.0.0.1")
        try:
            await asyncio.to_thread(act, listener.url, front)
        finally:
            await listener.close()
        for board in boards(lives):  # who is not polled any more is forgotten
            while board.viewers:
                await asyncio.sleep(0.01)
            assert board.service.engine.scheduler.observers == (board.service.engine.scheduler.observers[0],)

    asyncio.run(asyncio.wait_for(go(), 60))


def test_the_events_and_the_terminal_at_the_front_are_those_of_all_replicas() -> None:
    with serving(builtin(2)) as one, serving(builtin(2, None)) as two:
        answers, seen = list[int](), list[Any]()

        def ask(url: str) -> None:
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answers.append(httpx.post(url + "/v1/completions", json=body).json()["usage"]["completion_tokens"])

        def act(url: str, front: Front) -> None:
            with httpx.stream("GET", url + "/dashboard/events") as events, ThreadPoolExecutor(2) as pool:
                for line in events.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    seen.append(json.loads(line[6:]))
                    if len(seen) == 2:  # both replicas are watched now
                        list(pool.map(ask, [url] * 6))
                    if sum(len(event["ended"]) for event in seen) == 6:
                        break
            assert httpx.get(url + "/dashboard").text.startswith("<!DOCTYPE html>")

        behind_a_front([one, two], act)
    hello, *ticks = seen
    assert hello["slots"] == 4
    assert sum(t["sums"]["tokens"] for t in ticks) == sum(answers) == 6 * 12
    requests = [request for t in ticks for request in t["ended"]]
    assert {request["id"].split(":")[0] for request in requests} == {"r0", "r1"}
    assert sum(request["drafted"] for request in requests) == sum(t["sums"]["drafted"] for t in ticks) > 0


class Counted(Audience):
    """An audience that counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__(0.01)
        self.begun, self.ended, self.ticks = 0, 0, 0

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> None:
        self.ended += 1

    def hello(self) -> None:
        return None

    async def tick(self) -> None:
        self.ticks += 1
        self.send(b"x")


def test_nothing_ticks_when_the_last_viewer_was_dropped() -> None:
    """One that does not read never says that it leaves."""

    async def go() -> None:
        board = Counted()
        board.join()
        while board.viewers:
            await asyncio.sleep(0.01)
        ticks = board.ticks
        await asyncio.sleep(0.05)
        assert (board.begun, board.ended, board.ticks, board.dropped) == (1, 1, ticks, 1)
        board.join()
        await asyncio.sleep(0.05)
        assert board.begun == 2
        assert board.ticks > ticks

    asyncio.run(go())


def test_replicas_that_are_gone_leave_the_sum() -> None:
    class Pages:
        def __init__(self) -> None:
            self.pages, self.names = dict[str, bytes](), set[bytes]()

        async def each(self, call: Any) -> dict[str, bytes]:
            assert call.path == "/dashboard/poll"
            self.names.add(call.query)
            return self.pages

        def ask(self, call: Any) -> Any:
            raise AssertionError

    def page(name: str, event: dict[str, Any]) -> bytes:
        return f"event: {name}\ndata: {json.dumps(event)}\n\n".encode()

    async def go() -> None:
        pages = Pages()
        board = SummedDashboard(pages)
        hello = {
            "model": "m",
            "method": "x",
            "verifier": "v",
            "guarantee": "g",
            "num_speculative_tokens": 1,
            "slots": 2,
        }
        hello |= {"speculates": True, "shows_text": False, "ended": []}
        pages.pages = {n: page("hello", hello) + page("tick", tick(3)) for n in ("x", "y")}
        viewer = board.join()
        await board.tick()
        pages.pages = {"x": page("tick", tick(3))}
        await board.tick()
        pages.pages = {}
        await board.tick()
        events = [json.loads(part.partition("data: ")[2]) for part in viewer.taken().decode().split("\n\n")[:-1]]
        assert all(event["windows"]["10"]["kind"] == "unknown" for event in events if "windows" in event)
        assert [event.get("slots") or event["engine"]["running"] for event in events] == [4, 2, 2, 1]
        board.leave(viewer)
        assert len(pages.names) == 1
        viewer = board.join()
        assert board.hello() is None  # what was known is old
        await board.tick()
        board.leave(viewer)
        assert len(pages.names) == 2  # so that replicas that know the first one say hello again

    asyncio.run(go())
