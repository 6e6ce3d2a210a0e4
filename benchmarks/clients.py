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

from benchmarks import ROOT
from benchmarks.machine import cpu_seconds
from benchmarks.ruler import parser, save, shown, speedup, turns
from benchmarks.serve import Sample, ask, own_server
from benchmarks.texts import WORKLOADS, texts
from outrider.core.intervals import Interval

NAME = "model"
PLAIN, DEFAULT = {"num_speculative_tokens": 0}, dict[str, Any]()
Body = dict[str, Any]


def has_chats(url: str) -> bool:
    """Whether the model has a chat template."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request):
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

    Args:
        url: of the server.
        pid: of its process.
        rounds: bodies of requests.
        arms: fields that are added to each body.
        clients: requests at once.
    """
    results, words = [[DEFAULT] * len(arms) for _ in rounds], dict[int, list[str]]()
    for n, arm in turns(range(len(arms)), len(rounds), warm=0):
        extra = {**arms[arm], "user": f"{clients} {n} {arm}"}
        began, used = perf_counter(), cpu_seconds(pid)
        samples = asyncio.run(answers(url, [{**body, **extra} for body in rounds[n]], clients))
        results[n][arm] = {"seconds": perf_counter() - began, "processor": cpu_seconds(pid) - used}
        results[n][arm] |= {name: [getattr(one, name) for one in samples] for name in ("latency", "ttft")}
        first = words.setdefault(n, [one.text for one in samples])
        differ = [body for body, a, b in zip(rounds[n], first, samples, strict=True) if a != b.text]
        assert not differ, f"{len(differ)} texts of a round differ, the first one for {differ[0]}"
    return results


def summary(rounds: Sequence[Sequence[Body]], arm: int) -> Body:
    """An arm over the first one, which is plain: speed by wall time, processor time and the median request; delays."""

    def speed(name: str) -> Interval:
        return speedup(*([one[side][name] for one in rounds] for side in (0, arm)))

    def ratios(name: str) -> list[float]:
        return [p / a for one in rounds for p, a in zip(one[0][name], one[arm][name], strict=True)]

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
    args = parser(__doc__)
    args.add_argument("model")
    args.add_argument("more", nargs="*", help="further options of the server, behind --")
    args.add_argument("--draft-model", help="for `auto`; for its own method: -- --draft-model SMALL")
    args.add_argument("--clients", type=int, nargs="+", default=[4, 8, 16], help="at once")
    args.add_argument("--rounds", type=int, default=10)
    args.add_argument("--requests", type=int, default=1, help="of each client in a round")
    args.add_argument("--workloads", nargs="+", default=["code", "chat"], choices=WORKLOADS)
    args.add_argument("--temperatures", type=float, nargs="+", default=[0, 0, 0.7, 1.0], help="one is drawn")
    args.add_argument("--arm", type=json.loads, action="append", default=[], help="fields of requests to compare, too")
    args.add_argument("--checkout", type=Path, default=ROOT, help="of the repository, whose server is asked")
    args.add_argument("--out", type=Path, help="a file for the measurement")
    options = args.parse_args()
    draft = ["--draft-model", options.draft_model, "--method", "auto"] if options.draft_model else []
    flags = ["--served-model-name", NAME, "--log-file", "/dev/null", "--prefix-cache", "0", *draft, *options.more]
    arms, results = [PLAIN, DEFAULT, *options.arm], list[Body]()
    with own_server(options.model, *flags, checkout=options.checkout.resolve()) as (url, process):
        chat = has_chats(url)
        for clients in options.clients:
            bodies = requests(options.workloads, options.temperatures, chat)
            every = [list(islice(bodies, clients * options.requests)) for _ in range(options.rounds)]
            rounds = compared(url, process.pid, every, arms, clients)
            for arm, extra in enumerate(arms[1:], 1):
                figures = summary(rounds, arm)
                means = figures["rounds"]
                print(
                    f"{clients} at once, {json.dumps(extra) if extra else 'default'} over plain, {len(rounds)} rounds, 0 texts "
                    f"differ: {shown(figures['wall'])} times as fast by time, processor time {shown(figures['processor'])}, "
                    f"median request {figures['median_request']:.2f}, rounds' means {means[0]:.2f}-{means[-1]:.2f}; slowest "
                    f"request {figures['slowest_over_plain']:.2f}, first token {figures['first_token_over_plain']:.2f} of "
                    "plain's",
                    flush=True,
                )
                spans = {name: [r.value, r.low, r.high] for name, r in figures.items() if isinstance(r, Interval)}
                results.append({"clients": clients, "extra_body": extra, **figures, **spans})
    if options.out is not None:
        save("clients", options.out, options=vars(options), results=results)


if __name__ == "__main__":
    main()
