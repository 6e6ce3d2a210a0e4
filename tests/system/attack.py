"""What strangers may try against a server without a key, all at once: `python -m tests.system.attack --seconds 60`.

A good client asks beside them, and each of its texts must be the one that it got alone. Everything stays on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
SLOW = r"^(([a-z]{1,30}){1,30}){1,30}$"
ASKED = [{"prompt": f"def f{n}(xs):\n", "max_tokens": 24, "temperature": 0.8, "seed": n} for n in range(4)]


@dataclass
class Report:
    """What was seen. Times are seconds. longest_pause: the slowest answer of `/health`. memory: MiB before and after."""

    texts: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    slowest_token: float = 0.0
    longest_pause: float = 0.0
    unhealthy: int = 0
    memory: tuple[float, float] = (0.0, 0.0)
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


def attacked(port: int, pid: int, seconds: float, *, heads: int, bodies: int, unit: int) -> Report:
    """Ask alone, then under all attacks, then count what is left."""
    url, report = f"http://127.0.0.1:{port}", Report()
    alone = [text(url, body, report) for body in ASKED]
    assert None not in alone, alone
    report.slowest_token, before = 0.0, memory(pid)
    attack = Attack(port, heads, bodies, unit)
    acting = [threading.Thread(target=attack.repeat, args=(act,), daemon=True) for act in attack.all()]
    watching = threading.Thread(target=_watch, args=(url, attack.over, report), daemon=True)
    for thread in (*acting, watching):
        thread.start()
    until = perf_counter() + seconds
    while perf_counter() < until or not report.texts:
        for number, body in enumerate(ASKED):
            found = text(url, body, report)
            if found is not None:
                report.texts += 1
                if found != alone[number]:
                    report.wrong.append(f"{found!r} is not {alone[number]!r}")
    attack.over.set()
    for thread in (*acting, watching):
        thread.join(120)
    report.attacks, quiet = attack.counts, httpx.Client(timeout=60)
    with quiet:
        while (state := quiet.get(url + "/health").json()) != {"status": "ok", "running": 0, "waiting": 0}:
            assert "error" not in state, state
            sleep(0.05)
    report.memory = before, memory(pid)
    return report


def text(url: str, body: dict[str, Any], report: Report) -> str | None:
    """A streamed text; None if the server was too busy for it. Each attempt is a connection of its own, as a new client's is."""
    found, last = "", perf_counter()
    try:
        with httpx.stream("POST", url + "/v1/completions", json={**body, "stream": True}, timeout=120) as response:
            if response.status_code in (429, 503):
                report.refused += 1
                sleep(0.1)
                return None
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    now = perf_counter()
                    report.slowest_token, last = max(report.slowest_token, now - last), now
                    found += json.loads(line[6:])["choices"][0]["text"]
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        report.refused += 1
        return None
    return found


def memory(pid: int) -> float:
    """MiB that a process holds."""
    [pages] = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(pages) / 1024


def _watch(url: str, over: threading.Event, report: Report) -> None:
    while not over.wait(0.05):
        begun = perf_counter()
        try:
            report.unhealthy += httpx.get(url + "/health", timeout=60).status_code != 200
        except httpx.HTTPError:
            report.unhealthy += 1
        report.longest_pause = max(report.longest_pause, perf_counter() - begun)


@contextmanager
def server(*options: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server of the built-in model: its port and its process."""
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        "builtin:code",
        "--port",
        "0",
        "--log-file",
        os.devnull,
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(m for line in process.stdout if (m := re.search(r"http://127\.0\.0\.1:(\d+)/", line)))
            yield int(found[1]), process
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--port", type=int, help="of a server that runs here; with --pid")
    parser.add_argument("--pid", type=int)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        port, pid = given.port, given.pid
        if port is None:
            port, process = stack.enter_context(server("--prefix-cache", "16"))
            pid = process.pid
        report = attacked(port, pid, given.seconds, heads=3000, bodies=256, unit=57 << 20)
    print(json.dumps(report.__dict__, indent=1))
    if report.wrong or not report.texts:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
