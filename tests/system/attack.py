"""What strangers may try against a server without a key, all at once: `python -m tests.system.attack --seconds 60`.

A good client asks beside them, and each of its texts must be the one that it got alone. Everything stays on 127.0.0.1.
The strangers run in a process of their own, with the least priority, on the last core; the server has the others. So what they
take from the server is what they ask of it. `--replicas 2` attacks `outrider deploy`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
SLOW = r"^(([a-z]{1,30}){1,30}){1,30}$"
ASKED = [{"prompt": f"def f{n}(xs):\n", "max_tokens": 24, "temperature": 0.8, "seed": n} for n in range(4)]


@dataclass
class Report:
    """What the good client saw. memory: MiB, before the attacks and after. attacks: how often each was tried."""

    texts: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    unhealthy: int = 0
    memory: dict[str, float] = field(default_factory=dict)
    attacks: dict[str, int] = field(default_factory=dict)


@dataclass
class Attack:
    """Attacks on one server until `over`. heads, bodies: connections that are held at once. unit: bytes of the large things."""

    port: int
    heads: int
    bodies: int
    unit: int
    over: threading.Event = field(default_factory=threading.Event)
    counts: dict[str, int] = field(default_factory=dict)

    def half_heads(self) -> None:
        self._hold(self.heads, HEAD)

    def half_bodies(self) -> None:
        self._hold(self.bodies, HEAD + b"content-length: 100000\r\n\r\n{")

    def huge_head(self) -> None:
        with self._connected() as one:
            one.sendall(HEAD)
            for n in range(self.unit // 1000):
                one.sendall(b"x-%d: " % n + b"a" * 990 + b"\r\n")

    def unknown_fields(self) -> None:
        self._post({f"promt{n}": n for n in range(max(1, self.unit // 950))} | {"prompt": "x"})

    def long_prompt(self) -> None:
        self._post({"prompt": "word " * (self.unit // 80), "max_tokens": 1})

    def long_tokenize(self) -> None:
        self._post({"prompt": "word " * (self.unit // 80), "return_token_strs": True}, "/tokenize")

    def slow_grammar(self) -> None:
        self._post({"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": SLOW}})

    def all(self) -> list[Callable[[], None]]:
        return [
            self.half_heads, self.half_bodies, self.huge_head, self.unknown_fields, self.long_prompt, self.long_tokenize,
            self.slow_grammar,
        ]  # fmt: skip

    def repeat(self, act: Callable[[], None]) -> None:
        """One kind of attack, again and again. What the server does to it is its own affair."""
        while not self.over.is_set():
            with contextlib.suppress(OSError, httpx.HTTPError):
                act()
            self.counts[act.__name__] = self.counts.get(act.__name__, 0) + 1
            self.over.wait(0.01)

    def _hold(self, count: int, sent: bytes) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                if self.over.is_set():
                    break
                with contextlib.suppress(OSError):
                    stack.enter_context(self._connected()).sendall(sent)
            self.over.wait(3)

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 5)

    def _post(self, body: dict[str, Any], path: str = "/v1/completions") -> None:
        httpx.post(f"http://127.0.0.1:{self.port}{path}", json=body, timeout=30)


def strangers(names: list[str], over: Any, counts: Any, **given: int) -> None:
    """A process that attacks until `over`. names: of the attacks; all if there are none."""
    os.nice(19)
    attack = Attack(**given)
    acting = [act for act in attack.all() if not names or act.__name__ in names]
    threads = [threading.Thread(target=attack.repeat, args=(act,), daemon=True) for act in acting]
    for thread in threads:
        thread.start()
    over.wait()
    attack.over.set()
    for thread in threads:
        thread.join(120)
    counts.put(attack.counts)


def attacked(server: Server, seconds: float, *, names: list[str] | None = None, **sizes: int) -> Report:
    """Ask alone, then under attacks, then count what is left. names: of the attacks, all without it. sizes: of `Attack`."""
    url, report = f"http://127.0.0.1:{server.port}", Report()
    alone = [[ask(url, body, report) for body in ASKED] for _ in range(2)][1]  # the first time warms up
    assert None not in alone, alone
    before, spawn = server.memory(), multiprocessing.get_context("spawn")
    over, counts = spawn.Event(), spawn.Queue()
    given = {"port": server.port, **sizes}
    attackers = spawn.Process(target=strangers, args=(names or [], over, counts), kwargs=given, daemon=True)
    stop = threading.Event()
    watching = threading.Thread(target=_watch, args=(url, stop, report), daemon=True)
    attackers.start()
    watching.start()
    report.texts, until = 0, perf_counter() + seconds
    while perf_counter() < until or not report.texts:
        for body, expected in zip(ASKED, alone, strict=True):
            found = ask(url, body, report)
            if found is not None and found != expected:
                report.wrong.append(f"{found!r} is not {expected!r}")
    stop.set()
    over.set()
    report.attacks = counts.get(timeout=240)
    attackers.join(30)
    watching.join(120)
    with httpx.Client(timeout=60) as quiet:
        while '"running":0,"waiting":0' not in (said := quiet.get(url + "/health").text):
            assert "error" not in said, said
            sleep(0.05)
    report.memory = {"calm": before, "after": server.memory()}
    return report


def ask(url: str, body: dict[str, Any], report: Report) -> str | None:
    """A text; None if the server was too busy for it. Each attempt is a connection of its own, as a new client's is."""
    try:
        response = httpx.post(url + "/v1/completions", json=body, timeout=120)
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        report.refused += 1
        return None
    if response.status_code in (429, 503):
        report.refused += 1
        sleep(0.1)
        return None
    assert response.status_code == 200, response.text
    report.texts += 1
    return response.json()["choices"][0]["text"]


def _watch(url: str, over: threading.Event, report: Report) -> None:
    """Ask for the server's health, as an orchestrator does."""
    while not over.wait(0.05):
        try:
            report.unhealthy += httpx.get(url + "/health", timeout=60).status_code != 200
        except httpx.HTTPError:
            report.unhealthy += 1


@dataclass
class Server:
    """A server that is attacked."""

    port: int
    process: subprocess.Popen[str]

    def memory(self) -> float:
        """MiB that the process and its children hold."""
        kids = dict[int, list[int]]()
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = int(status.read_text().rpartition(")")[2].split()[1])
                kids.setdefault(parent, []).append(int(status.parent.name))
        found, waiting = 0, [self.process.pid]
        while waiting:
            pid = waiting.pop()
            waiting += kids.get(pid, [])
            with contextlib.suppress(OSError):
                held = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                found += int(held[1]) if held else 0
        return found / 1024


@contextmanager
def serving(*options: str, replicas: int = 0) -> Iterator[Server]:
    """A server of the built-in model on all cores but the last, or replicas of it."""
    cores = sorted(os.sched_getaffinity(0))
    kind = ["deploy", "--replicas", str(replicas), "--cpus", "0.5"] if replicas else ["serve"]
    os.sched_setaffinity(0, cores[:-1] or cores)
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", *kind, "builtin:code", "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    os.sched_setaffinity(0, cores[-1:])
    try:
        assert process.stdout is not None
        found = next(m for line in process.stdout if (m := re.search(r"http://127\.0\.0\.1:(\d+)/", line)))
        yield Server(int(found[1]), process)
    finally:
        os.sched_setaffinity(0, cores)
        process.send_signal(signal.SIGINT)
        process.wait(120)
        assert process.stdout is not None
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--replicas", type=int, default=0, help="attack `outrider deploy` with so many replicas")
    parser.add_argument("--only", action="append", help="an attack; may be repeated")
    given = parser.parse_args()
    with serving("--prefix-cache", "16", replicas=given.replicas) as server:
        report = attacked(server, given.seconds, names=given.only, heads=3000, bodies=256, unit=57 << 20)
    print(json.dumps(asdict(report), indent=1))
    if report.wrong or not report.texts:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
