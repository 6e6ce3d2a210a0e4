"""What it is worth to send a chat where its beginning is known: our router against chance, on two replicas each, in turns.

    python -m benchmarks.prefix_routing MODEL --sessions 20 --turns 4

All sessions have one system prompt. Each turn of a session sends all that was said before. Both deployments run all the time,
and one of them works at a time. Printed: the share of prompt tokens that came from the prefix cache, and the time to the first
token, without the first turn, in which nothing of a session is known.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import httpx
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from outrider_ray import cluster
from outrider_ray.options import DeployOptions

SYSTEM = (
    "You are the assistant of a small library. Be brief and friendly. Say where a book stands, who wrote it and when, and "
    "what it is about. If you do not know a book, say so, and name one that is like it. Never invent a place or a year."
)
WORDS = "the reader asks about old maps, tall ships, quiet gardens, cold winters, lost letters and the long way home"
WORKERS = 4


class RandomRouter(RequestRouter):
    """Sends each request to a replica by chance."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates one by one, in any order."""
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]


@dataclass
class Found:
    """What one way of routing did in the turns after the first. replicas: of each session, those that it met."""

    prompt: int = 0
    cached: int = 0
    firsts: list[float] = field(default_factory=list)
    replicas: dict[int, set[str]] = field(default_factory=dict)


def ask(url: str, messages: list[dict[str, str]], tokens: int) -> tuple[str, float, dict[str, Any], str]:
    """The answer, the seconds to its first token, its usage and its replica."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    start, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    sent = {**body, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", url + "/v1/chat/completions", json=sent, timeout=300) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            first, text = first or (time.perf_counter() - start if piece else 0.0), text + piece
        return text, first, usage, response.headers["x-outrider-replica"]


def turn(url: str, number: int, talks: list[list[dict[str, str]]], tokens: int, found: Found) -> None:
    """One turn of every session, a few at once, in an order by chance."""

    def go(session: int) -> None:
        chance = random.Random(1000 * session + number)
        said = f"Question {number} of reader {session}: " + " ".join(chance.choices(WORDS.split(), k=24)) + "?"
        talks[session].append({"role": "user", "content": said})
        text, first, usage, replica = ask(url, talks[session], tokens)
        talks[session].append({"role": "assistant", "content": text})
        found.replicas.setdefault(session, set()).add(replica)
        if number:
            found.firsts.append(first)
            found.prompt += usage["prompt_tokens"]
            found.cached += usage["prompt_tokens_details"]["cached_tokens"]

    order = random.Random(number).sample(range(len(talks)), len(talks))
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(go, order))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args()
    urls, deployed = dict[str, str](), None
    for name in ("prefix", "chance"):
        engines = {"replicas": 2, "cpus": 0.5, "engines": f"{name}-engines"}
        options = DeployOptions.model_validate(
            {"model": given.model, "speculative_config": {"method": "none"}, **engines}
        )
        cluster.join_for(options, cluster.LOCAL)
        with ExitStack() as stack:
            if name == "chance":
                stack.enter_context(mock.patch("outrider_ray.deployments.PrefixRouter", RandomRouter))
            port = cluster.free_port("127.0.0.1", 0)
            deployed = cluster.start(options.with_(port=port), name, own=True, timeout=300)
        urls[name] = f"http://127.0.0.1:{port}"
    try:
        found = {name: Found() for name in urls}
        talks = {name: [[{"role": "system", "content": SYSTEM}] for _ in range(given.sessions)] for name in urls}
        for number in range(given.turns):
            for name in list(urls)[:: 1 if number % 2 else -1]:
                turn(urls[name], number, talks[name], given.tokens, found[name])
        assert talks["prefix"] == talks["chance"], "a text depends on its replica"
        for name, one in found.items():
            low, middle, high = (1000 * x for x in statistics.quantiles(one.firsts, n=4))
            stayed = sum(len(met) == 1 for met in one.replicas.values())
            print(
                f"{name:7} {one.cached / one.prompt:4.0%} of {one.prompt} prompt tokens cached   first token {middle:.0f} ms "
                f"({low:.0f} to {high:.0f})   {stayed} of {given.sessions} sessions at one replica"
            )
    finally:
        if deployed is not None:
            cluster.stop(deployed)  # and the cluster


if __name__ == "__main__":
    main()
