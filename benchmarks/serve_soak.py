"""A server under clients that behave badly, for as long as one likes: what it answered, what it kept, what it leaked.

    python -m benchmarks.serve_soak --seconds 600 --save-result soak.json

Starts a server of the built-in pair and keeps twice as many clients at it as it seats and queues. They stream, wait, leave in
the middle, read slowly, send half a body or nonsense, repeat request ids, ask for 0 or a million tokens. At the end everything
that was accepted must have been answered once, the tables must be empty, and memory must not have grown.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.request import urlopen

from benchmarks.ruler import parser, save
from benchmarks.serve import own_server

PROMPTS = [
    "def quicksort(xs):\n",
    "import os\n" * 40,
    "class Stack:\n    def push(self",
    "x = 1\n",
    "# " + "word " * 300,
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

EXTRA: list[dict[str, Any]] = [
    {}, {}, {"disable_spec_decode": True}, {"num_speculative_tokens": 9}, {"n": 2}, {"logprobs": 2}, {"method": "suffix"},
    {"prediction": {"type": "content", "content": "import os\nimport sys\n"}}, {"stop": ["return", "\n\n"]}, {"timeout": 0.2},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
]  # fmt: skip
FIELDS = {"max_tokens": [0, 10**6], "n": [10**6], "stop": [[""]], "seed": [2**80], "top_p": [7]}
ABSURD = [json.dumps({"prompt": "x", name: value}).encode() for name, some in FIELDS.items() for value in some]
ABSURD += [b"{", b"[" * 50_000, b'"x"', b"", b'{"prompt": [[[]]]}', b'{"prompt": "\\ud800"}']


async def exchange(
    port: int, payload: bytes, *, cut: int | None = None, length: int | None = None, name: str = ""
) -> Any:
    """Send a request and give back the reader and writer.

    Args:
        port: of the server.
        payload: the body.
        cut: send so many bytes only.
        length: the length to claim.
        name: of the request.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"X-Request-Id: {name}\r\n" if name else ""
    head += f"Content-Length: {len(payload) if length is None else length}\r\n\r\n"
    writer.write(head.encode() + payload[:cut])
    return reader, writer


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the answer; the headers are read, too."""
    line = await reader.readline()
    while (await reader.readline()) not in (b"\r\n", b""):
        pass
    return int(line.split()[1]) if line else 0


class Client:
    """One client, over and over.

    Args:
        port: of the server.
        seed: of what it does.
        told: what happened, counted by kind and outcome.
        wrong: what must not happen.
    """

    def __init__(self, port: int, seed: int, told: Counter[str], wrong: list[str]) -> None:
        self.port, self.draw, self.told, self.wrong = port, random.Random(seed), told, wrong

    async def run(self, until: float) -> None:
        kinds = [self.streams, self.waits, self.leaves, self.leaves_at_once, self.reads_slowly, self.half, self.absurd]
        while perf_counter() < until:
            act = self.draw.choice(kinds)
            try:
                outcome = await asyncio.wait_for(act(), 120)
            except TimeoutError:
                self.wrong.append(f"{act.__name__}: no answer within two minutes")
                outcome = "hangs"
            except OSError as error:
                outcome = type(error).__name__
            self.told[f"{act.__name__}: {outcome}"] += 1

    def body(self, **more: Any) -> bytes:
        draw = self.draw
        body: dict[str, Any] = {"prompt": draw.choice(PROMPTS), "max_tokens": draw.randrange(1, 80), **more}
        body["temperature"] = draw.choice([0, 0.8, 1.3])
        return json.dumps({**body, **draw.choice(EXTRA)}).encode()

    async def streams(self, pause: float = 0.0) -> str:
        reader, writer = await exchange(self.port, self.body(stream=True), name=self.draw.choice(["", "same"]))
        try:
            if (status := await status_of(reader)) != 200:
                return await self._refused(status, reader)
            done, ends, asked = 0, Counter[int](), set[int]()
            async for line in reader:
                if line.startswith(b"data: [DONE]"):
                    done += 1
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.wrong.append(f"an error in a stream: {event}")
                    for choice in event.get("choices", ()):
                        asked.add(choice["index"])
                        ends[choice["index"]] += choice["finish_reason"] is not None
                if pause:
                    await asyncio.sleep(pause)
            if done != 1 or any(ends[i] != 1 for i in asked):
                self.wrong.append(f"a stream ended {done} times, its texts {dict(ends)}")
            return "200"
        finally:
            writer.close()

    async def reads_slowly(self) -> str:
        return await self.streams(0.02)

    async def waits(self) -> str:
        reader, writer = await exchange(self.port, self.body())
        try:
            status = await status_of(reader)
            if status != 200:
                return await self._refused(status, reader)
            answer = json.loads(await reader.read())
            if not all(c["finish_reason"] in ("stop", "length", "abort") for c in answer["choices"]):
                self.wrong.append(f"an answer without an end: {answer}")
            return "200"
        finally:
            writer.close()

    async def leaves(self) -> str:
        """In the middle of a stream."""
        reader, writer = await exchange(self.port, self.body(stream=True, max_tokens=1500, ignore_eos=True))
        for _ in range(self.draw.randrange(1, 12)):
            await reader.readline()
        writer.close()
        return "left"

    async def leaves_at_once(self) -> str:
        _, writer = await exchange(self.port, self.body(stream=self.draw.random() < 0.5, max_tokens=1500))
        await writer.drain()
        writer.close()
        return "left"

    async def half(self) -> str:
        payload = self.body()
        _, writer = await exchange(self.port, payload, cut=len(payload) // 2, length=len(payload))
        await asyncio.sleep(self.draw.random() / 10)
        writer.close()
        return "left"

    async def absurd(self) -> str:
        """Each must be refused, with a reason."""
        reader, writer = await exchange(self.port, self.draw.choice(ABSURD))
        try:
            status = await status_of(reader)
            if status not in (400, 503):
                self.wrong.append(f"an absurd request is answered by {status}")
            return await self._refused(status, reader)
        finally:
            writer.close()

    async def _refused(self, status: int, reader: asyncio.StreamReader) -> str:
        text = (await reader.read()).decode()
        if status not in (400, 408, 429, 503) or '"error"' not in text:
            self.wrong.append(f"{status}: {text[:300]}")
        if status == 429:
            await asyncio.sleep(0.05)  # a client that comes back too early, but not at once
        return str(status)


def page(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def value(metrics: str, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(f"outrider:{name}{{"))


async def soak(port: int, seconds: float, clients: int, seed: int, watch: Any = None) -> tuple[Counter[str], list[str]]:
    """Let the clients loose; then wait until the server is idle and look at what it says of itself."""
    told, wrong, until = Counter[str](), list[str](), perf_counter() + seconds
    tasks = [asyncio.create_task(Client(port, 1000 * seed + i, told, wrong).run(until)) for i in range(clients)]
    while perf_counter() < until:
        await asyncio.sleep(min(1.0, max(until - perf_counter(), 0.0)))
        if watch is not None:
            watch()
    await asyncio.gather(*tasks)
    health: dict[str, Any] = {}
    for _ in range(600):
        health = json.loads(await asyncio.to_thread(page, port, "/health"))
        if health["running"] == health["waiting"] == 0:
            break
        await asyncio.sleep(0.1)
    else:
        wrong.append(f"the server never became idle: {health}")
    metrics = await asyncio.to_thread(page, port, "/metrics")
    if value(metrics, "kv_cache_usage_perc"):
        wrong.append("the cache holds tokens of nobody")
    taken, answered = value(metrics, "requests_accepted_total"), value(metrics, "request_success_total")
    if taken != answered:
        wrong.append(f"{taken:.0f} texts were accepted and {answered:.0f} answered")
    told["texts accepted"], told["texts answered"] = int(taken), int(answered)
    return told, wrong


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=600)
    args.add_argument("--slots", type=int, default=4)
    args.add_argument("--queue", type=int, default=8)
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--save-result", type=Path)
    options = args.parse_args()
    more = ["--max-num-seqs", str(options.slots), "--max-queue", str(options.queue), "--kv-tokens", "2500"]
    memory, clients = list[int](), 2 * (options.slots + options.queue)
    with own_server("builtin:code", "--log-file", "/dev/null", "--prefix-cache", "8", *more) as (url, process):

        def watch() -> None:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            memory.append(pages * os.sysconf("SC_PAGE_SIZE") >> 20)

        port = int(url.rpartition(":")[2])
        told, wrong = asyncio.run(soak(port, options.seconds, clients, options.seed, watch))
    if process.returncode not in (0, -signal.SIGTERM):
        wrong.append(f"the server ended with {process.returncode}")
    third = max(len(memory) // 3, 1)
    last = max(memory[-third:], default=0)
    middle = max(memory[third : 2 * third], default=last)
    if last > 1.05 * middle:
        wrong.append(f"memory grew from {middle} to {last} MiB")
    for name, count in sorted(told.items()):
        print(f"{count:>7} {name}")
    print(f"memory: at most {middle} MiB in the second third, {last} MiB in the last")
    print("\n".join(["WRONG:", *wrong[:20]]) if wrong else "nothing is wrong")
    if options.save_result:
        load = {"seconds": options.seconds, "clients": clients, "slots": options.slots, "queue": options.queue}
        save("serve_soak", options.save_result, **load, told=told, memory_mib=memory[::10], wrong=wrong)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
