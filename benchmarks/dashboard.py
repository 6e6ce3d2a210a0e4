"""What a viewer of the dashboard costs: `python -m benchmarks.dashboard`. Turns with a viewer and without change places.

Three measures of the same turns. The share of the server's processor time that it spends for a viewer, as the server counts it:
watching steps and making events, but not sending them. The processor time of the server for a token, and the time of a token:
with them comes all that the machine does besides, so turns are short and many. The prompts are the same, and greedy.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import httpx
import numpy as np

from benchmarks.machine import facts
from benchmarks.serve import own_server
from outrider.core.http import events
from outrider.core.intervals import interval


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far. Linux; see clock_getcpuclockid."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def turn(http: httpx.Client, pid: int, clients: int, requests: int, tokens: int) -> tuple[float, float]:
    """Seconds of a token, and processor seconds of the server for it."""

    def ask(n: int) -> int:
        body = {
            "model": "code",
            "prompt": f"def f{n}(x):\n",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = http.post("/v1/completions", json=body).json()
        return answer["usage"]["completion_tokens"]

    started, used = perf_counter(), cpu_seconds(pid)
    with ThreadPoolExecutor(clients) as pool:
        written = sum(pool.map(ask, range(requests)))
    return (perf_counter() - started) / written, (cpu_seconds(pid) - used) / written


def view(url: str, stop: threading.Event, seen: list[dict[str, Any]]) -> None:
    """A viewer that reads until it is stopped."""
    with httpx.stream("GET", f"{url}/dashboard/events", timeout=60) as stream:
        for event in events(stream.iter_raw()):
            seen.append(event)
            if stop.is_set():
                return


@contextmanager
def server(clients: int) -> Iterator[tuple[str, int]]:
    """A server of the built-in pair with a fixed draft length; its URL and the number of its process."""
    config = {
        "method": "draft_model",
        "model": "builtin:code-draft",
        "num_speculative_tokens": 4,
        "controller": "fixed",
    }
    given = ["--served-model-name", "code", "--max-num-seqs", str(clients), "--speculative-config", json.dumps(config)]
    with own_server("builtin:code", *given) as (url, process):
        yield url, process.pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60, help="of each kind")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4, help="of a turn")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    turns, seen = dict[bool, list[tuple[float, float]]]({False: [], True: []}), list[dict[str, Any]]()
    with server(given.clients) as (url, pid), httpx.Client(base_url=url, timeout=300) as http:
        turn(http, pid, given.clients, given.requests, given.tokens)
        for n in range(given.turns):
            for watched in (n % 2 == 0, n % 2 != 0):
                stop = threading.Event()
                viewer = threading.Thread(target=view, args=(url, stop, seen))
                if watched:
                    before = len(seen)
                    viewer.start()
                    while len(seen) == before:
                        sleep(0.01)
                turns[watched].append(turn(http, pid, given.clients, given.requests, given.tokens))
                stop.set()
                if watched:
                    viewer.join()
    plain, viewed = np.array(turns[False]), np.array(turns[True])  # [turn, (seconds, processor seconds)]
    numbers: dict[str, object] = {"machine": facts()}
    sums = [event["sums"] for event in seen if "sums" in event]
    ticks = np.array([(one["own"], one["processor"]) for one in sums if one["tokens"]])
    own = interval(ticks)
    numbers["share"] = {"share": own.value, "low": own.low, "high": own.high, "ticks": ticks.tolist()}
    print(f"a viewer's share of the server's processor time: {100 * own.value:.2f} % (95 % interval {100 * own.low:.2f} to "
          f"{100 * own.high:.2f} %), {len(ticks)} ticks")  # fmt: skip
    for column, name in enumerate(("seconds", "processor seconds")):
        pairs = np.stack([viewed[:, column], plain[:, column]], 1)
        found = interval(pairs)
        numbers[name] = {"ratio": found.value, "low": found.low, "high": found.high, "pairs": pairs.tolist()}
        print(f"{name} of a token: {1e3 * median(plain[:, column]):.3f} ms without a viewer; with one over without: "
              f"{found.value:.4f} (95 % interval {found.low:.4f} to {found.high:.4f})")  # fmt: skip
    print(f"{len(plain)} turns of each kind")
    if given.json is not None:
        given.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
