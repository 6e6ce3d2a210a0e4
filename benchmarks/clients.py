"""The product as its users meet it: a default server, from its first request on, over its own plain decoding.

    python -m benchmarks.clients MODEL --draft-model SMALL              4, 8 and 16 clients at once, half code, half chat
    python -m benchmarks.clients MODEL --clients 1 --rounds 50 --workloads code chat talk maths
    python -m benchmarks.clients MODEL --clients 1 --rounds 8 --workloads talk maths --arm '{"method": "draft_model"}'

In a round each client asks for one or a few texts of 24 to 96 tokens, greedy or sampled with a seed. The server gets each round
as it is, and with `num_speculative_tokens` 0, in turns, whose order is reversed in each round. Texts must be equal. Settings are
the server's defaults, but nothing that one arm read or wrote helps another: there is no prefix cache, and each arm of each round
is a user of its own, because the server remembers a user's texts. Times are the clients', of whole requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import headline, machine
from benchmarks.dashboard import cpu_seconds
from benchmarks.real.texts import WORKLOADS, texts
from benchmarks.serve import Sample, ask, own_server
from outrider.core.intervals import interval

NAME = "model"
PLAIN, DEFAULT = {"num_speculative_tokens": 0}, dict[str, Any]()
Body = dict[str, Any]


def has_chats(url: str) -> bool:
    """Whether the model has a chat template."""
    told = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/tokenize", told, {"Content-Type": "application/json"})
        ):
            return True
    except urllib.error.HTTPError:
        return False


def requests(workloads: Sequence[str], temperatures: Sequence[float], chat: bool) -> Iterator[Body]:
    """Bodies of requests, always the same ones: the workloads in turns, each from its first prompt to its last and again."""
    drawn, prompts = random.Random(7), [cycle(texts(workload, chat, 32)) for workload in workloads]
    for seed, prompt in enumerate(next(some) for some in cycle(prompts)):
        yield {
            "model": NAME,
            "messages" if chat else "prompt": prompt.content,
            "max_tokens": drawn.choice([24, 48, 96]),
            "temperature": drawn.choice(temperatures),
            "top_p": drawn.choice([1.0, 0.9]),
            "seed": seed,
            "stream": True,
        }


async def answers(url: str, bodies: Sequence[Body], clients: int) -> list[Sample]:
    """The answers to all, so many at once. Raises RuntimeError for one that fails."""
    at, gate = urlsplit(url), asyncio.Semaphore(clients)

    async def one(body: Body) -> Sample:
        async with gate:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            sample = await ask(at.hostname or "127.0.0.1", at.port or 80, path, body)
        if sample.error:
            raise RuntimeError(f"{sample.error}: {body}")
        return sample

    return await asyncio.gather(*map(one, bodies))


def compared(
    url: str, pid: int, rounds: Sequence[Sequence[Body]], arms: Sequence[Body], clients: int
) -> list[list[Body]]:
    """What each arm took in each round: seconds, processor seconds of the server, and of each request `latency` and `ttft`.

    Raises AssertionError if the texts of two arms differ.
    """
    results = list[list[Body]]()
    for n, bodies in enumerate(rounds):
        figures, words = [DEFAULT] * len(arms), [list[str]()] * len(arms)
        for arm in range(len(arms)) if n % 2 else reversed(range(len(arms))):
            own = {**arms[arm], "user": f"{clients} {n} {arm}"}
            began, used = perf_counter(), cpu_seconds(pid)
            samples = asyncio.run(answers(url, [{**body, **own} for body in bodies], clients))
            figures[arm] = {"seconds": perf_counter() - began, "processor": cpu_seconds(pid) - used}
            figures[arm] |= {name: [getattr(one, name) for one in samples] for name in ("latency", "ttft")}
            words[arm] = [one.text for one in samples]
        differ = [body for body, *one in zip(bodies, *words, strict=True) if len(set(one)) > 1]
        assert not differ, f"{len(differ)} texts of a round differ, the first one for {differ[0]}"
        results.append(figures)
    return results


def summary(rounds: Sequence[Sequence[Body]], arm: int) -> Body:
    """An arm over the first one, which is plain: speed by wall time, processor time and the median request; delays."""

    def speed(name: str) -> list[float]:
        over = interval(np.array([[one[0][name], one[arm][name]] for one in rounds]))
        return [over.value, over.low, over.high]

    def ratios(name: str) -> list[float]:
        return [p / own for one in rounds for p, own in zip(one[0][name], one[arm][name], strict=True)]

    means = [statistics.fmean(one[0]["latency"]) / statistics.fmean(one[arm]["latency"]) for one in rounds]
    slowest = [max(max(one[side]["latency"]) for one in rounds) for side in (0, arm)]
    return {
        "wall": speed("seconds"),
        "processor": speed("processor"),
        "median_request": statistics.median(ratios("latency")),
        "rounds": sorted(means),
        "slowest_over_plain": slowest[1] / slowest[0],
        "first_token_over_plain": 1 / statistics.median(ratios("ttft")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("model")
    parser.add_argument("more", nargs="*", help="further options of the server, behind --")
    parser.add_argument("--draft-model", help="for `auto`; for its own method: -- --draft-model SMALL")
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8, 16], help="at once")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1, help="of each client in a round")
    parser.add_argument("--workloads", nargs="+", default=["code", "chat"], choices=WORKLOADS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0, 0.7, 1.0], help="one is drawn")
    parser.add_argument(
        "--arm", type=json.loads, action="append", default=[], help="fields of requests to compare, too"
    )
    parser.add_argument("--checkout", type=Path, help="of the repository, whose server is asked")
    parser.add_argument("--out", type=Path, help="a file for the measurement")
    options = parser.parse_args()
    draft = ["--draft-model", options.draft_model, "--method", "auto"] if options.draft_model else []
    flags = ["--served-model-name", NAME, "--log-file", "/dev/null", "--prefix-cache", "0", *draft, *options.more]
    beside = {"checkout": options.checkout.resolve()} if options.checkout else {}
    arms, results = [PLAIN, DEFAULT, *options.arm], list[Body]()
    with own_server(options.model, *flags, **beside) as (url, process):
        chat = has_chats(url)
        for clients in options.clients:
            bodies = requests(options.workloads, options.temperatures, chat)
            every = [list(islice(bodies, clients * options.requests)) for _ in range(options.rounds)]
            rounds = compared(url, process.pid, every, arms, clients)
            for arm, extra in enumerate(arms[1:], 1):
                figures = summary(rounds, arm)
                results.append({"clients": clients, "extra_body": extra, **figures})
                (wall, *reach), (work, *other), means = figures["wall"], figures["processor"], figures["rounds"]
                print(
                    f"{clients} at once, {json.dumps(extra) if extra else 'default'} over plain, {len(rounds)} rounds, 0 texts "
                    f"differ: {wall:.2f} times as fast by time ({reach[0]:.2f}-{reach[1]:.2f}), processor time {work:.2f} "
                    f"({other[0]:.2f}-{other[1]:.2f}), median request {figures['median_request']:.2f}, rounds' means "
                    f"{means[0]:.2f}-{means[-1]:.2f}; slowest request {figures['slowest_over_plain']:.2f}, first token "
                    f"{figures['first_token_over_plain']:.2f} of plain's",
                    flush=True,
                )
    if options.out is not None:
        result = {"machine": machine.facts(), "options": vars(options), "results": results}
        options.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
