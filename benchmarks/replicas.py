"""What Ray costs: one replica behind `outrider deploy` against `outrider serve`, in turns, on the same requests.

    python -m benchmarks.replicas MODEL --rounds 3 --tokens 16

Both servers run all the time, and one of them works at a time. A row is one number of clients: the median time to the first
token in milliseconds, and tokens per second over all clients. Intervals are the quartiles of rounds. Below it stands the
processor time of a token by process, which says where the rest goes.
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
from contextlib import suppress
from pathlib import Path

import httpx

PORTS = {"serve": 8231, "deploy": 8232}
CLIENTS = (1, 8, 32)
TICK = os.sysconf("SC_CLK_TCK")


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


def processor_time(root: int) -> dict[str, float]:
    """Processor seconds of a process and all below it, by name (Linux)."""
    parents, used, names = dict[int, int](), dict[int, float](), dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pid = int(folder.name)
            parents[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICK
            names[pid] = (folder / "cmdline").read_text().replace("\0", " ").strip()
    found = dict[str, float]()
    for pid, name in names.items():
        at = pid
        while at > 1 and at != root:
            at = parents.get(at, 0)
        if at == root:
            found[kind_of(name)] = found.get(kind_of(name), 0.0) + used[pid]
    return found


def kind_of(name: str) -> str:
    """A short name of a process, from its command line."""
    for sign, kind in (("OutriderEngine", "engine"), ("front", "front"), ("ProxyActor", "proxy")):
        if name.startswith("ray::") and sign in name:
            return kind
    if "ServeController" in name:
        return "controller"
    return "engine" if " outrider serve " in name else "rest of Ray"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args()
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    servers = {kind: subprocess.Popen(command(kind, given.model), env=env, stdout=subprocess.DEVNULL) for kind in PORTS}
    try:
        urls = {kind: f"http://127.0.0.1:{port}" for kind, port in PORTS.items()}
        for kind, url in urls.items():
            while True:
                if servers[kind].poll() is not None:
                    raise SystemExit(f"{kind} ended before it answered; run: {' '.join(command(kind, given.model))}")
                try:
                    if httpx.get(url + "/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            ask(url, 2, 0)
        for clients in CLIENTS:
            measure(clients, given.rounds * (3 if clients == 1 else 1), given.tokens, urls, servers)
    finally:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait(60)


def measure(
    clients: int, rounds: int, tokens: int, urls: dict[str, str], servers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """One row of the table."""
    firsts, rates = {kind: list[float]() for kind in urls}, {kind: list[float]() for kind in urls}
    spent = {kind: dict[str, float]() for kind in urls}
    for number in range(rounds):
        for kind, url in list(urls.items())[:: 1 if number % 2 else -1]:
            before, start = processor_time(servers[kind].pid), time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                numbers = range(1000 * number, 1000 * number + clients)
                firsts[kind].append(statistics.median(pool.map(lambda i, url=url: ask(url, tokens, i), numbers)))
            rates[kind].append(clients * tokens / (time.perf_counter() - start))
            after = processor_time(servers[kind].pid)
            for name, value in after.items():
                spent[kind][name] = spent[kind].get(name, 0.0) + value - before.get(name, 0.0)
    first = [1000 * (a - b) for a, b in zip(firsts["deploy"], firsts["serve"], strict=True)]
    rate = [100 * (a / b - 1) for a, b in zip(rates["deploy"], rates["serve"], strict=True)]
    print(
        f"{clients:3} clients   first token {1000 * statistics.median(firsts['serve']):7.1f} ms, by Ray {spread(first)} ms   "
        f"{statistics.median(rates['serve']):6.1f} tokens/s, by Ray {spread(rate)} %"
    )
    for kind, parts in spent.items():
        per_token = {name: 1000 * value / (rounds * clients * tokens) for name, value in parts.items()}
        print(f"    {kind}, ms a token: " + ", ".join(f"{k} {v:.2f}" for k, v in per_token.items()), flush=True)


def spread(values: list[float]) -> str:
    """The median, and the quartiles in parentheses."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values
    return f"{middle:+.1f} ({low:+.1f} to {high:+.1f})"


if __name__ == "__main__":
    main()
