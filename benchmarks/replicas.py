"""What Ray costs: one replica behind `outrider deploy` against `outrider serve`, in turns, on the same requests.

    python -m benchmarks.replicas MODEL --rounds 3 --tokens 16

Both servers run all the time, and one of them works at a time. A row is one number of clients: the median time to the first
token in milliseconds, and tokens per second over all clients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

PORTS = {"serve": 8231, "deploy": 8232}
CLIENTS = (1, 8, 32)


def command(kind: str, model: str) -> list[str]:
    shared = ["--speculative-config", '{"method": "none"}', "--max-num-seqs", "8", "--served-model-name", "m"]
    more = ["--replicas", "1", "--cpus", str(os.cpu_count())] if kind == "deploy" else []
    return [sys.executable, "-m", "outrider", kind, model, *shared, "--port", str(PORTS[kind]), *more]


def ask(url: str, tokens: int, number: int) -> float:
    """Seconds to the first token of a stream that is read to its end."""
    body = {"prompt": f"Question {number}: why is the sky blue?", "max_tokens": tokens, "temperature": 0}
    start, first = time.perf_counter(), 0.0
    with httpx.stream(
        "POST", url + "/v1/completions", json={**body, "stream": True, "ignore_eos": True}, timeout=300
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and not first:
                assert "choices" in json.loads(line[6:])
                first = time.perf_counter() - start
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args()
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    servers = [subprocess.Popen(command(kind, given.model), env=env, stdout=subprocess.DEVNULL) for kind in PORTS]
    try:
        urls = {kind: f"http://127.0.0.1:{port}" for kind, port in PORTS.items()}
        for url in urls.values():
            while True:
                try:
                    if httpx.get(url + "/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            ask(url, 2, 0)
        for clients in CLIENTS:
            firsts, rates = {kind: list[float]() for kind in urls}, {kind: list[float]() for kind in urls}
            for number in range(given.rounds * (3 if clients == 1 else 1)):
                for kind, url in urls.items():
                    start = time.perf_counter()
                    with ThreadPoolExecutor(clients) as pool:
                        numbers = range(1000 * number, 1000 * number + clients)
                        firsts[kind] += pool.map(lambda i, url=url: ask(url, given.tokens, i), numbers)
                    rates[kind].append(clients * given.tokens / (time.perf_counter() - start))
            row = {k: (1000 * statistics.median(firsts[k]), statistics.median(rates[k])) for k in urls}
            (first, rate), (own, plain) = row["deploy"], row["serve"]
            print(
                f"{clients:3} clients   first token {own:7.1f} ms, {first - own:+6.1f} ms by Ray   "
                f"{plain:6.1f} tokens/s, {100 * (rate / plain - 1):+5.1f} % by Ray",
                flush=True,
            )
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(60)


if __name__ == "__main__":
    main()
