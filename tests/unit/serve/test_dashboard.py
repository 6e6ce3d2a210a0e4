"""The dashboard's server side: who is told what, and viewers that do not read."""

from __future__ import annotations

import gc
import json
import random
import re
import socket
import threading
import tracemalloc
from contextlib import ExitStack
from dataclasses import fields
from time import sleep
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx
import pytest

from outrider.core.params import SamplingParams
from outrider.core.stopping import FinishReason, StopChecker
from outrider.core.types import PHASES, Budget, Commit, Step
from outrider.engine.engine import Stats
from outrider.engine.llm import LLM
from outrider.engine.request import Request, Sequence
from outrider.serve.dashboard import viewers
from outrider.serve.dashboard.watch import Tick, Watch, added, figures, gain, outlook, recent
from outrider_lab.bench.events import events
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


def sums(seen: list[dict[str, Any]]) -> list[Tick]:
    return [Tick(**event["sums"]) for event in seen[1:]]


def test_events_add_up_to_what_was_answered_and_each_tick_has_the_figures_of_its_windows(live: Live) -> None:
    """The page computes nothing. With fixed lengths nothing is weighed."""
    answers = list[dict[str, Any]]()
    seen = watched(live, lambda: answers.extend(ask(live).json() for _ in range(3)), lambda seen: len(ended(seen)) == 3)
    counts = [answer["metrics"]["speculative_decoding"] for answer in answers]
    ticks = sums(seen)
    total = added(ticks)
    assert total.tokens == sum(a["usage"]["completion_tokens"] for a in answers)
    assert total.drafted == sum(c["num_draft_tokens"] for c in counts)
    assert total.accepted == sum(c["num_accepted_draft_tokens"] for c in counts)
    assert [r["tokens"] for r in ended(seen)] == [a["usage"]["completion_tokens"] for a in answers]
    assert all("text" not in r and "prompt" not in r for r in ended(seen))
    found = figures(total)
    assert found["survival"][0] >= found["survival"][-1] > 0
    assert (found["weighed"], found["plans"]["draft_model"] > 0, found["depth"] > 0) == ({}, True, True)
    for n, last in enumerate(seen[1:], 1):
        assert last["windows"].keys() == {"10", "60", "300"}
        for seconds, window in last["windows"].items():
            wanted = outlook(recent(ticks[:n], int(seconds)), int(seconds), speculates=True)
            assert window == json.loads(json.dumps(wanted))
        assert last["point"][0] == figures(added(ticks[max(n - 4, 0) : n]))["rate"]


def test_plans_are_counted_and_the_last_words_on_each_drafter_are_told() -> None:
    llm = LLM("builtin:code", speculative_config=BOTH, max_num_seqs=4)
    with serving(llm) as live:
        seen = watched(live, lambda: [ask(live) for _ in range(3)], lambda seen: len(ended(seen)) == 3)
    total = added(sums(seen))
    found = figures(total)
    assert sum(total.plans.values()) == total.sequences
    assert sum(found["plans"].values()) == pytest.approx(1)
    assert found["plans"].keys() <= {"none", "reading", "suffix", "draft_model"}
    drafted = found["weighed"]["draft_model"]
    assert 0 < drafted["accepted"] <= 1
    assert drafted["seconds"] > 0
    assert drafted["verdict"]
    assert len(total.requests) == 3


def test_nothing_is_counted_while_nobody_looks_and_a_viewer_that_leaves_is_no_failure(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    engine, watch = live.service.engine, live.dashboard.watch
    assert ask(live).status_code == 200
    assert engine.scheduler.observers == (live.metrics,)
    assert watch.tick()[0].steps == 0
    with caplog.at_level("INFO", "outrider.serve"):
        watched(live, lambda: ask(live), lambda seen: seen[-1]["sums"]["steps"] > 0)
        while not any("/dashboard/events" in record.getMessage() for record in caplog.records):
            sleep(0.01)
    assert all(record.levelname == "INFO" for record in caplog.records)
    while live.dashboard.viewers:
        sleep(0.01)
    assert engine.scheduler.observers == (live.metrics,)


def stepped(
    watch: Watch, written: list[int], drafted: int, accepted: int, seconds: float, draft: float = 0.0, first: int = 0
) -> None:
    """A step of the sequences in slots `first`, `first` + 1, ... with prompts of one token. written: tokens of each so far."""
    host, count = [(7, n - 1) for n in range(drafted + 1)], accepted + 1
    proposal: Any = SimpleNamespace(host=[host for _ in written], notes=())
    commits = [Commit([7] * count, [*range(count)], accepted) for _ in written]
    phases = {**dict.fromkeys(PHASES, 0.0), "draft": draft, "target": seconds - draft}
    slots, positions, verdict = [*range(first, first + len(written))], [1 + n for n in written], cast("Any", None)
    step = Step(proposal, verdict, commits, slots, positions, [Budget(drafted)] * len(written), phases)
    watch.step(step, [0.1 if n else None for n in written])
    written[:] = [n + count for n in written]


def engine(costs: dict[int, float] | None = None) -> Any:
    """What a watch reads of an engine. costs: believed seconds of plain steps, by rows; lengths are fixed without."""
    planner = SimpleNamespace(lengths=None if costs else "fixed", costs=SimpleNamespace(forward=(costs or {}).get))
    roster, decoder = SimpleNamespace(planner=planner), SimpleNamespace(waiting=list[Sequence]())
    return SimpleNamespace(roster=roster, decoder=decoder, stats=Stats(*[0] * len(fields(Stats))), problem="")


def ended_after(watch: Watch, written: list[int], seconds: float, first: int = 0) -> list[float]:
    """The sequences end, `seconds` after they came. Plain seconds of each, where they are known."""
    for slot, tokens in enumerate(written, first):
        one = sequence(slot, tokens, seconds)
        one.slot = slot
        watch.finished(one)
    requests = watch.tick()[0].requests
    assert [taken for _, taken in requests] == pytest.approx([seconds] * len(requests))
    return [plain for plain, _ in requests]


def test_what_is_outside_of_steps_counts_on_both_sides() -> None:
    """Steps alone are 1.11 times as fast with drafts; requests, whose half is no step, 1.04."""
    watch, written = Watch(engine()), [0] * 8
    for _ in range(4):
        stepped(watch, written, 0, 0, 0.2)
    for _ in range(5):
        stepped(watch, written, 3, 1, 0.36)
    assert ended_after(watch, written, 5.2) == pytest.approx([5.4] * 8)
    assert watch.tick()[0].requests == []


def test_plain_steps_have_as_many_rows_and_no_plan() -> None:
    watch = Watch(engine())
    for rows, seconds in ((1, 0.1), (2, 0.3)):
        for _ in range(3):
            written = [0] * rows
            stepped(watch, written, 0, 0, 9.0)  # the first step of a text says nothing of others
            stepped(watch, written, 0, 0, seconds + 0.05, draft=0.05)
            ended_after(watch, written, 20.0)
        written = [0] * rows
        stepped(watch, written, 3, 3, 0.2)
        assert ended_after(watch, written, 1.0) == pytest.approx([0.8 + 4 * seconds] * rows)
    stepped(watch, written := [0], 0, 0, 0.15, draft=0.05)  # a step without a draft pays for its plan
    assert ended_after(watch, written, 1.0) == pytest.approx([0.95])
    stepped(watch, written := [0] * 3, 3, 3, 0.2)
    assert ended_after(watch, written, 1.0) == []  # no plain step had three rows
    watch = Watch(engine(costs={3: 0.5}))
    stepped(watch, written := [0] * 3, 3, 3, 0.2)
    assert ended_after(watch, written, 1.0) == pytest.approx([2.8] * 3)


def test_a_prompt_that_waits_pays_for_the_drafts_of_others() -> None:
    watch, late = Watch(engine(costs={1: 0.1})), sequence(1, 0)
    late.slot = 1
    watch.engine.decoder.waiting.append(late)
    stepped(watch, [0], 3, 0, 0.3)
    watch.engine.decoder.waiting.clear()
    stepped(watch, written := [0], 0, 0, 0.1, first=1)
    assert ended_after(watch, written, 1.0, first=1) == pytest.approx([0.8])


def virtual_server(
    watch: Watch, requests: list[tuple[int, int]], drafts: bool, draw: random.Random, load: Load
) -> float:
    """Clients write these requests, one each at a time, on a server in virtual time. Returns the seconds of all requests.

    requests: (pieces of the prompt, tokens of the answer) of each. In every turn one piece of the oldest prompt is read.
    """
    left, now, whole = list(enumerate(requests)), 0.0, 0.0
    slots, pieces, limits = dict[int, Sequence](), dict[int, int](), dict[int, int]()
    while left or slots:
        for slot in range(load.clients):
            if slot not in slots and left:
                number, (prompt, tokens) = left.pop(0)
                slots[slot], pieces[number] = sequence(number, 0), prompt
                slots[slot].slot, slots[slot].clock.arrived, limits[number] = slot, now, tokens
        waiting = sorted((one for one in slots.values() if pieces[one.id]), key=lambda one: one.id)
        if waiting:
            now += load.piece
            pieces[waiting[0].id] -= 1
        live = [one for one in slots.values() if not pieces[one.id]]
        if not live:
            continue
        watch.engine.decoder.waiting[:] = [one for one in waiting if pieces[one.id]]
        new = [min(1 + (draw.random() < load.accepted and drafts), limits[one.id] - len(one.written)) for one in live]
        rows, hosts = len(live), [[(7, -1), (7, 0)] if drafts else [(7, -1)] for _ in live]
        phases = {
            **dict.fromkeys(PHASES, 0.0),
            "draft": load.draft * drafts,
            "target": load.plain[rows] + load.node * rows * drafts,
        }
        commits = [Commit([7] * count, [*range(count)], count - 1) for count in new]
        positions, verdict, proposal = (
            [len(one.tokens) for one in live],
            cast("Any", None),
            SimpleNamespace(host=hosts, notes=()),
        )
        step = Step(
            cast("Any", proposal), verdict, commits, [one.slot for one in live], positions, [Budget(1)] * rows, phases
        )
        now += sum(phases.values())
        watch.step(step, [0.1] * rows)
        for one, count in zip(live, new, strict=True):
            one.tokens += [7] * count
            if len(one.written) == limits[one.id]:
                one.clock.done, one.finish = now, FinishReason("length")
                whole += one.clock.total
                watch.finished(slots.pop(one.slot))
    return whole


class Load(NamedTuple):
    """Seconds of a plain step by rows, of a piece of a prompt, of drafting for all, and of verifying a token more."""

    clients: int
    plain: dict[int, float]
    piece: float
    draft: float
    node: float
    accepted: float


def test_no_gain_is_promised_that_whole_requests_do_not_have() -> None:
    """Loads by chance, written with drafts and plainly. The answer for the run with drafts says what the clocks of both say."""
    draw, kinds = random.Random(5), set[str]()
    for _ in range(16):
        clients, base = draw.choice([1, 4, 8]), draw.uniform(0.02, 0.1)
        plain = {rows: base * (1 + 0.15 * (rows - 1)) for rows in range(1, clients + 1)}
        load = Load(
            clients, plain, draw.uniform(0, 4) * base, draw.uniform(0, 0.6) * base, 0.1 * base, draw.uniform(0, 1)
        )
        requests = [(draw.randint(0, 6), draw.randint(8, 60)) for _ in range(40)]
        watch = Watch(engine(costs=plain))
        took = virtual_server(watch, requests, True, draw, load)
        pairs = tuple(watch.tick()[0].requests)
        truth = virtual_server(Watch(engine(costs=plain)), requests, False, draw, load) / took
        told = gain(pairs)
        assert told is not None
        assert len(pairs) == 40
        assert told.value == pytest.approx(truth, rel=0.04)
        assert truth > 1 or told.low <= 1, f"a gain of {told} was promised, it is {truth}"
        kinds.add("yes" if told.low > 1 else "no" if told.high < 1 else "even")
    assert kinds == {"yes", "no", "even"}


def test_a_text_that_was_not_watched_from_its_start_says_nothing() -> None:
    watch = Watch(engine(costs={1: 0.1}))
    stepped(watch, written := [5], 3, 0, 0.3)
    assert ended_after(watch, written, 1.0) == []


def some(requests: list[tuple[float, float]]) -> Tick:
    """Ticks of half a second, one of them ends in each. requests: its plain seconds, and its seconds."""
    one = {"steps": 4, "sequences": 4, "tokens": 8, "drafted": 8, "by_depth": [[4, 2]], "plans": {"suffix": 4}}
    return added(Tick(elapsed=0.5, seconds={"target": 0.4}, requests=[pair], **one) for pair in requests)


UP, DOWN, LEVEL = (
    [(plain, 0.4) for plain in some] for some in ([0.6, 0.62, 0.58] * 4, [0.3, 0.31] * 5, [0.35, 0.45] * 5)
)
ANSWERS = {
    "gain": (some(UP), "yes", "Yes: 1.50 times"),
    "loss": (some(DOWN), "no", "No: 0.76 times"),
    "neither": (some(LEVEL), "even", "No gain: 1.00 times"),
    "few requests": (some(UP[:4]), "unknown", "Too few requests to say: 4 requests ended over the last 2 s"),
    "plain server": (some(UP), "no", "No: this server decodes plainly"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_is_one_sentence_with_the_only_figure(name: str) -> None:
    total, kind, words = ANSWERS[name]
    found = outlook(total, 60, speculates=name != "plain server")
    assert found["kind"] == kind
    assert found["answer"].startswith(words)
    assert len(re.findall(r"\.(?!\d)", found["answer"])) == 1
    assert bool(re.search(r"\(\d\.\d\d to \d\.\d\d\)", found["answer"])) == ("times" in words)
    assert found.keys() == {*figures(total), "kind", "answer"}


def test_requests_that_are_alike_leave_no_doubt() -> None:
    speed = gain(((0.6, 0.4),) * 20)
    assert speed is not None
    assert (speed.value, speed.low, speed.high) == pytest.approx((1.5, 1.5, 1.5))


def test_memory_is_flat_beside_viewers_that_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers come, read nothing and stay connected. Each is dropped, and nothing that was meant for it is kept."""
    size = 100_000
    with serving(builtin()) as live, ExitStack() as stalled:
        board = live.dashboard
        board.interval, told = 0.005, board.told
        monkeypatch.setattr(board, "told", lambda *given: {**told(*given), "padding": "x" * size})
        # The system buffers megabytes of a connection, which would take minutes to fill.
        live.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        def stall(number: int) -> None:
            one = stalled.enter_context(socket.create_connection(("127.0.0.1", live.port)))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            one.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: x\r\n\r\n")
            while board.dropped < number or board.viewers or live.server.server_state.connections:
                sleep(0.01)

        stall(1)
        tracemalloc.start()
        stalled.callback(tracemalloc.stop)
        for number in (2, 3):
            stall(number)
        gc.collect()
        left, most = tracemalloc.get_traced_memory()
        # One viewer's queue is all that is ever held: unbounded, or kept, it would be many times that.
        assert most < 2.5 * viewers.WAITING * size
        assert left < 2 * size
        assert ask(live).status_code == 200


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
    made.clock.arrived, made.clock.done, made.finish = 10.0, 10.0 + seconds, FinishReason(finish)
    return made


def test_pictures_of_another_sites_page_take_no_seat(live: Live) -> None:
    picture = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    for method in ("GET", "POST"):
        assert httpx.request(method, live.url + "/dashboard/events", headers=picture).status_code in (403, 405)
    assert not live.dashboard.viewers
