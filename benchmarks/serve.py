"""Load on a server that streams as OpenAI's does, ours or another: throughput and latency by concurrency.

    python -m benchmarks.serve --base-url http://127.0.0.1:8000 --model builtin:code --num-prompts 64
    python -m benchmarks.serve --start builtin:code --config '{"method": "draft_model", ...}' --peer theirs=http://127.0.0.1:9000
        --arm off='{"disable_spec_decode": true}' --arm on='{"num_speculative_tokens": 4}' --arm adaptive='{}'

The names of options and of the results' fields are those of `vllm bench serve`. An arm is what is added to each request; arms
take turns at every concurrency, on the same prompts and seeds, in one server process. A peer is an arm with a server of its own,
which runs. The client reads raw sockets, so that it costs the two cores of a small machine little. Texts of the arms are
compared: with one seed they must be equal; a peer's are its own. Each arm is a user of its own at each concurrency, because a
server remembers a user's texts for its drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks import ROOT
from benchmarks.ruler import parser, save, turns
from benchmarks.texts import humaneval

Prompt = str | list[int]


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens.

    Args:
        url: without a path.
        model: what the server calls its model.
        extra: what each request says beside the usual.
    """

    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One request. Times are in seconds, those of `itls` between the events of its stream."""

    started: float
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    error: str = ""


async def ask(host: str, port: int, path: str, body: dict[str, Any]) -> Sample:
    """Send one request and read its stream."""
    sample, last = Sample(perf_counter()), 0.0
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            raise ValueError(f"{status.strip()}: {(await reader.read()).decode(errors='replace')[-300:]}")
        async for line in reader:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event, now = json.loads(line[6:]), perf_counter()
            if "error" in event:
                raise ValueError(event["error"]["message"])
            for choice in event["choices"]:
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if text:
                    if last:
                        sample.itls.append(now - last)
                    else:
                        sample.ttft = now - sample.started
                    last, sample.text, sample.latency = now, sample.text + text, now - sample.started
            if event.get("usage"):
                sample.tokens, sample.prompt_tokens = (
                    event["usage"]["completion_tokens"],
                    event["usage"]["prompt_tokens"],
                )
        if not last:
            raise ValueError("the stream held no text")
    except (OSError, ValueError, KeyError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return sample


async def load(
    options: argparse.Namespace, end: Endpoint, prompts: Sequence[Prompt], concurrency: int
) -> tuple[list[Sample], float]:
    """Ask for every prompt, so many at once, in Poisson arrivals where a rate is given; the samples and the whole time."""
    at, gate, draw = urlsplit(end.url), asyncio.Semaphore(concurrency), random.Random(options.seed)

    async def one(number: int, prompt: Prompt) -> Sample:
        async with gate:
            body = {"model": end.model, "max_tokens": options.output_len, "temperature": options.temperature}
            body |= {"seed": options.seed + number, "ignore_eos": True, "stream": True}
            body |= {"user": f"{json.dumps(end.extra)} {concurrency}"}
            body |= {"stream_options": {"include_usage": True}, **end.extra}
            body |= (
                {"messages": [{"role": "user", "content": prompt}]}
                if "chat" in options.endpoint
                else {"prompt": prompt}
            )
            return await ask(at.hostname or "127.0.0.1", at.port or 80, options.endpoint, body)

    started, tasks = perf_counter(), []
    for number, prompt in enumerate(prompts):
        tasks.append(asyncio.create_task(one(number, prompt)))
        if options.request_rate < float("inf"):
            await asyncio.sleep(draw.expovariate(options.request_rate))
    samples = await asyncio.gather(*tasks)
    return samples, perf_counter() - started


def counters(base_url: str) -> dict[str, float]:
    """The server's counters of speculation, by vLLM's names without their prefix; empty for a server without them."""
    try:
        with urlopen(base_url + "/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return {}
    sums: dict[str, float] = {}
    for line in lines:
        if ":spec_decode_" in line and not line.startswith("#") and "_created" not in line:
            name, value = line.split(":", 1)[1].rsplit(" ", 1)
            short = name.partition("{")[0].removesuffix("_total")
            if "position=" in name:
                short += "." + name.partition('position="')[2].partition('"')[0]
            sums[short] = sums.get(short, 0.0) + float(value)
    return sums


def summary(samples: list[Sample], seconds: float, grown: dict[str, float]) -> dict[str, Any]:
    """The fields of `vllm bench serve`."""
    good = [s for s in samples if not s.error]
    asked, written = sum(s.prompt_tokens for s in good), sum(s.tokens for s in good)
    out: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": asked,
        "total_output_tokens": written,
        "request_throughput": len(good) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (asked + written) / seconds,
    }
    series = {
        "ttft": [s.ttft for s in good],
        "tpot": [(s.latency - s.ttft) / (s.tokens - 1) for s in good if s.tokens > 1],
        "itl": [x for s in good for x in s.itls],
        "e2el": [s.latency for s in good],
    }
    for name, values in series.items():
        ordered = sorted(1000 * v for v in values)
        if ordered:
            out[f"mean_{name}_ms"], out[f"median_{name}_ms"] = statistics.mean(ordered), statistics.median(ordered)
            out[f"std_{name}_ms"] = statistics.pstdev(ordered)
            for p in (90, 99):
                out[f"p{p}_{name}_ms"] = ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))]
    drafts, drafted = grown.get("spec_decode_num_drafts", 0), grown.get("spec_decode_num_draft_tokens", 0)
    if drafted:
        accepted = grown.get("spec_decode_num_accepted_tokens", 0)
        per = [grown.get(f"spec_decode_num_accepted_tokens_per_pos.{i}", 0) / drafts for i in range(16)]
        out |= {
            "spec_decode_acceptance_rate": 100 * accepted / drafted,  # percent here, a fraction elsewhere: vLLM's habit
            "spec_decode_acceptance_length": 1 + accepted / drafts,
            "spec_decode_num_drafts": int(drafts),
            "spec_decode_draft_tokens": int(drafted),
            "spec_decode_accepted_tokens": int(accepted),
            "spec_decode_per_position_acceptance_rates": [x for x in per if x],
        }
    return out


@contextmanager
def own_server(model: str, *more: str, checkout: Path = ROOT) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`outrider serve MODEL` on a free port: its address and its process. Raises RuntimeError if it does not start.

    Args:
        model: what it serves.
        more: further options.
        checkout: of the repository, whose code runs.
    """
    command = [sys.executable, "-m", "outrider", "serve", model, "--port", "0", *more]
    env = os.environ | {"PYTHONPATH": str(checkout)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout, env=env) as process:
        try:
            assert process.stdout is not None
            urls = (line.split()[2] for line in process.stdout if line.startswith("curl"))
            if (url := next(urls, None)) is None:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            yield url.partition("/v1/")[0], process
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def server(options: argparse.Namespace, more: Sequence[str] = ()):
    """A server of our own around the run, where one is asked for, with further options. Sets the base URL."""
    if options.start is None:
        yield
        return
    flags = ["--served-model-name", options.model, "--max-num-seqs", str(max(options.max_concurrency))]
    flags += ["--prefix-cache", "0", "--speculative-config", options.config]
    flags += ["--max-model-len", str(options.max_model_len), "--log-file", "/dev/null", *more]
    with own_server(options.start, *flags) as (options.base_url, _):
        yield


def take_turns(
    options: argparse.Namespace, arms: Mapping[str, Endpoint], every: Sequence[Prompt], peers: Collection[str]
) -> tuple[list[dict[str, Any]], int, int]:
    """The load on each arm in turn, at every concurrency.

    Args:
        options: of the command.
        arms: servers by name.
        every: the prompts.
        peers: arms whose texts are their own.

    Returns:
        A record for each, how many texts differ between the other arms, and how many were compared.
    """
    runs, texts = list[dict[str, Any]](), dict[int, list[list[str]]]()
    print(f"{'':>4} {'':<18} {'tokens/s':>9} {'TTFT ms':>9} {'TPOT ms':>9} {'p99 ITL':>9} {'length':>7}  failed")
    for turn, (name, end) in turns([*arms.items()], len(options.max_concurrency), warm=0):
        concurrency = options.max_concurrency[turn]
        prompts = [every[i % len(every)] for i in range(options.num_prompts or max(4, 2 * concurrency))]
        before = counters(end.url)
        samples, seconds = asyncio.run(load(options, end, prompts, concurrency))
        run = summary(samples, seconds, {k: v - before.get(k, 0) for k, v in counters(end.url).items()})
        if name not in peers:
            texts.setdefault(turn, []).append([s.text for s in samples])
        runs.append({"arm": name, "extra_body": end.extra, "max_concurrency": concurrency, **run})
        print(
            f"{concurrency:>4} {name:<18} {run['output_throughput']:>9.1f} {run.get('median_ttft_ms', 0):>9.0f} "
            f"{run.get('median_tpot_ms', 0):>9.1f} {run.get('p99_itl_ms', 0):>9.0f} "
            f"{run.get('spec_decode_acceptance_length', 1):>7.2f}  {run['failed']}",
            flush=True,
        )
        for error in sorted({s.error for s in samples if s.error})[:3]:
            print(f"     {error}", file=sys.stderr)
    same = [len({*some}) == 1 for arms in texts.values() for some in zip(*arms, strict=True)]
    return runs, same.count(False), len(same)


def arm(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=JSON of the command line."""
    name, _, body = text.partition("=")
    return name, json.loads(body or "{}")


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--base-url", default="http://127.0.0.1:8000")
    args.add_argument("--endpoint", default="/v1/completions")
    args.add_argument("--model", default="builtin:code")
    args.add_argument("--start", help="a model to serve for the run, in place of --base-url")
    args.add_argument("--config", default='{"method": "auto"}', help="its speculative_config")
    args.add_argument("--max-model-len", type=int, default=1024)
    args.add_argument("--num-prompts", type=int, help="at each concurrency; two a client, at least four, if not given")
    args.add_argument("--output-len", type=int, default=64)
    args.add_argument("--max-concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args.add_argument("--request-rate", type=float, default=float("inf"))
    args.add_argument("--temperature", type=float, default=0.0)
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--num-warmups", type=int, default=1)
    args.add_argument("--arm", type=arm, action="append", help="NAME=JSON, added to each request; may be repeated")
    args.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="a server of others that runs")
    args.add_argument("--save-result", type=Path)
    options = args.parse_args()
    bodies = options.arm or [("off", {"disable_spec_decode": True}), ("on", {})]
    peers, every = dict(peer.split("=", 1) for peer in options.peer), humaneval(32)
    with server(options):
        arms = {name: Endpoint(options.base_url, options.model, extra) for name, extra in bodies}
        arms |= {name: Endpoint(url, options.model) for name, url in peers.items()}
        for end in arms.values():
            asyncio.run(load(options, end, every[: options.num_warmups], 1))
        runs, differ, compared = take_turns(options, arms, every, set(peers))
    print(f"texts that differ between arms: {differ} of {compared}")
    if options.save_result:
        fields = {k: v for k, v in vars(options).items() if k not in ("arm", "save_result", "request_rate")}
        save("serve", options.save_result, options=fields, texts_that_differ=differ, runs=runs)


if __name__ == "__main__":
    main()
