"""The product as its user meets it: a server with its default settings, from its first request on.

    python -m benchmarks.default_server model.gguf                       100 requests: 50, each with and without speculation
    python -m benchmarks.default_server model.gguf -- --draft-model small.gguf

A request asks for code, prose or a calculation, for 24 to 96 tokens, greedy or sampled with a seed of its own. It is sent twice,
in turns: as it is, and with `num_speculative_tokens` 0. Both texts must be equal. Times are the client's, of whole requests.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import headline, machine
from benchmarks.real.texts import texts
from benchmarks.serve import own_server
from outrider.core.intervals import interval

WORKLOADS = ("code", "chat", "talk", "maths")
NAME = "model"
PLAIN = {"num_speculative_tokens": 0}


def answer(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a POST returns. Raises HTTPError."""
    sent = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=600) as got:
        return json.loads(got.read())


def has_chats(url: str) -> bool:
    """Whether the model has a chat template."""
    try:
        answer(url, "/tokenize", {"messages": [{"role": "user", "content": "Hello"}]})
    except urllib.error.HTTPError:
        return False
    return True


def requests(count: int, chat: bool) -> Iterator[dict[str, Any]]:
    """Bodies of requests, always the same ones. No prompt comes twice. Raises ValueError for more than there are."""
    drawn = random.Random(7)
    prompts = [p for some in zip_longest(*(texts(w, chat, 20) for w in WORKLOADS)) for p in some if p is not None]
    if count > len(prompts):
        raise ValueError(
            f"there are {len(prompts)} prompts, asked for {count}; give --requests {2 * len(prompts)} or less"
        )
    for seed, prompt in enumerate(prompts[:count]):
        yield {
            "model": NAME,
            "messages" if chat else "prompt": prompt.content,
            "max_tokens": drawn.choice([24, 48, 96]),
            "temperature": drawn.choice([0, 0, 0.7, 1.0]),
            "top_p": drawn.choice([1.0, 0.9]),
            "seed": seed,
        }


def compared(url: str, count: int) -> np.ndarray:
    """float [request, 2]: seconds of the request without speculation and as it is. Raises AssertionError if texts differ."""
    chat, rows = has_chats(url), list[list[float]]()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    for n, body in enumerate(requests(count, chat)):
        seconds, said = [0.0, 0.0], ["", ""]
        for way in (0, 1) if n % 2 else (1, 0):
            start = perf_counter()
            [choice] = answer(url, path, body if way else {**body, **PLAIN})["choices"]
            seconds[way] = perf_counter() - start
            said[way] = choice["message"]["content"] if chat else choice["text"]
        assert said[0] == said[1], f"request {n} wrote another text with speculation: {body}"
        rows.append(seconds)
    return np.array(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.default_server", description=headline(__doc__))
    parser.add_argument("model")
    parser.add_argument("more", nargs="*", help="further options of the server, behind --")
    parser.add_argument("--requests", type=int, default=100, help="half of them without speculation")
    parser.add_argument("--out", type=Path, help="a file for the measurement")
    options = parser.parse_args()
    with own_server(options.model, "--served-model-name", NAME, "--log-file", "/dev/null", *options.more) as (url, _):
        rows = compared(url, options.requests // 2)
    found = interval(rows)
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine.facts(),
        "model": Path(options.model).name,
        "requests": 2 * len(rows),
        "ratio": round(found.value, 3),
        "low": round(found.low, 3),
        "high": round(found.high, 3),
        "median": round(statistics.median(rows[:, 0] / rows[:, 1]), 3),
        "plain_seconds": round(float(rows[:, 0].sum()), 2),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(
        f"{made['model']}: {made['requests']} requests, 0 texts differ. Speed of a default server over its own plain decoding: "
        f"by time {made['ratio']} ({made['low']}-{made['high']}), median request {made['median']}"
    )


if __name__ == "__main__":
    main()
