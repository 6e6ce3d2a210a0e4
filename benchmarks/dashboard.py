"""What a viewer of the dashboard costs: `python -m benchmarks.dashboard`. Throughput with a viewer and without, in turns.

The same prompts, greedy, on one server; turns of both kinds change places, so a slow phase of the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import httpx
import numpy as np

from benchmarks.machine import facts
from outrider.bench.stats import interval


def turn(url: str, clients: int, requests: int, tokens: int) -> float:
    """Tokens per second of some requests."""

    def ask(n: int) -> int:
        body = {
            "model": "code",
            "prompt": f"def f{n}(x):\n",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
        return answer["usage"]["completion_tokens"]

    started = perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        written = sum(pool.map(ask, range(requests)))
    return written / (perf_counter() - started)


def view(url: str, stop: threading.Event, seen: list[int]) -> None:
    """A viewer that reads until it is stopped."""
    with httpx.stream("GET", f"{url}/dashboard/events", timeout=60) as stream:
        for part in stream.iter_raw():
            seen.append(len(part))
            if stop.is_set():
                return


@contextmanager
def server(clients: int) -> Iterator[str]:
    """A server of the built-in pair with a fixed draft length; its URL."""
    config = {
        "method": "draft_model",
        "model": "builtin:code-draft",
        "num_speculative_tokens": 4,
        "controller": "fixed",
    }
    command = [sys.executable, "-m", "outrider", "serve", "builtin:code", "--port", "0", "--served-model-name", "code"]
    command += ["--max-num-seqs", str(clients), "--speculative-config", json.dumps(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield next(found[1] for line in process.stdout if (found := re.search(r"health: (http://[\w.:]+)/", line)))
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12, help="of each kind")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16, help="of a turn")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pairs, seen = list[tuple[float, float]](), list[int]()
    with server(given.clients) as url:
        turn(url, given.clients, given.requests, given.tokens)
        for n in range(given.turns):
            rates = dict[bool, float]()
            for watched in (n % 2 == 0, n % 2 != 0):
                stop = threading.Event()
                viewer = threading.Thread(target=view, args=(url, stop, seen))
                if watched:
                    before = len(seen)
                    viewer.start()
                    while len(seen) == before:
                        sleep(0.01)
                rates[watched] = turn(url, given.clients, given.requests, given.tokens)
                stop.set()
                if watched:
                    viewer.join()
            pairs.append((rates[False], rates[True]))
    # equal numbers of tokens in each turn: seconds are proportional to 1 / rate
    found = interval(np.array([(1 / a, 1 / b) for a, b in pairs]), lambda t: t[..., 0] / t[..., 1])
    plain, watched_rate = (median(rates) for rates in zip(*pairs, strict=True))
    print(f"without a viewer {plain:.1f} tokens/s, with one {watched_rate:.1f}")
    print(
        f"with over without: {found.value:.4f} (95 % interval {found.low:.4f} to {found.high:.4f}), {sum(seen)} bytes sent"
    )
    if given.json is not None:
        numbers = {"ratio": found.value, "low": found.low, "high": found.high, "pairs": pairs, "machine": facts()}
        given.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
