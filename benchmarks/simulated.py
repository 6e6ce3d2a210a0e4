"""The simulator of `outrider plan` against a real server: throughput and p90 latency over a sweep of loads.

    python -m benchmarks.simulated calibrate --model model.gguf --out costs.json
    python -m benchmarks.simulated sweep --model model.gguf --costs costs.json --loads 0.3 0.6 0.9 --name simulated

`calibrate` asks one server for the seconds of rounds and prompts: streams side by side, with and without drafts, and prompts
of several lengths. A trace tells how many draft tokens the rounds had and how many were accepted. `sweep` sends other prompts
in Poisson arrivals (open loop), and simulates the same arrivals, prompts and answer lengths. Nothing of the sweep is fitted.
Each load is a share of the simulated capacity. The interval of a measured p90 is a bootstrap over its requests; that of a
prediction is over seeds of what is accepted. Several sweeps under one name are put together.

`others` are the cores that other programs took meanwhile. Above a few hundredths a row tells of them and not of the server.
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
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks import RESULTS, ROOT, headline
from benchmarks.machine import facts
from benchmarks.prompts import humaneval
from benchmarks.serve import Sample, ask
from outrider.bench.stats import percentile
from outrider.plan.acceptance_curve import AcceptanceCurve, AnswerAcceptance, find_curve
from outrider.plan.serving_costs import MeasuredCosts, by_length
from outrider.plan.serving_plan import LatencyTargets, ServingPlan
from outrider.plan.simulation import ReplicaLimits, simulate
from outrider.plan.workload import Arrival, Demand, Lengths
from outrider.trace import Trace, read

SLOTS, CHUNK = 8, 64
SIZES = (1, 2, 4, 8)  # of the batches that are timed
ARMS = {"plain": {"disable_spec_decode": True}, "drafts": {}}
LENGTHS = (16, 96)  # of answers in the sweep
SEEDS = 20  # of a prediction


@contextmanager
def server(options: argparse.Namespace, trace: Path) -> Iterator[tuple[str, int]]:
    """A server of the model; yields its address."""
    command = [sys.executable, "-m", "outrider", "serve", str(options.model), "--port", "0", "--served-model-name", "m",
               "--max-num-seqs", str(SLOTS), "--prefill-chunk", str(CHUNK), "--prefix-cache", "0", "--max-queue", "4096",
               "--max-connections", "4096", "--max-model-len", "1024", "--log-file", "/dev/null", "--trace", str(trace),
               "--speculative-config", options.config]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("curl"))
            yield "127.0.0.1", int(line.split()[2].split(":")[2].split("/")[0])
        finally:
            process.terminate()
            process.wait()


async def one(address: tuple[str, int], prompt: str, tokens: int, seed: int, arm: str) -> Sample:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "seed": seed, "ignore_eos": True}
    return await ask(
        *address, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}} | ARMS[arm]
    )


def cut(prompt: str, words: int) -> str:
    """The beginning of a prompt, and a part of it once more: the model goes on to copy it, so lookups find much."""
    some = prompt.split(" ")[:words]
    return " ".join(some) + "\n\n" + " ".join(some[: max(words // 3, 2)])


def others_busy() -> float:
    """CPU seconds of the whole machine so far, less those of this process and of those it has started."""
    busy = sum(map(int, Path("/proc/stat").read_text().split()[1:4])) / os.sysconf("SC_CLK_TCK")
    return busy - _cpu_seconds(os.getpid())


def _cpu_seconds(process: int) -> float:
    """User and system seconds of a process and of its living children."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        children = " ".join(f.read_text() for f in Path(f"/proc/{process}/task").glob("*/children")).split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_cpu_seconds(int(child)) for child in children)


# -- calibration ------------------------------------------------------------------------------------------------------------


async def together(address: tuple[str, int], prompts: Sequence[str], tokens: int, seed: int, arm: str) -> list[Sample]:
    return list(await asyncio.gather(*(one(address, p, tokens, seed + n, arm) for n, p in enumerate(prompts))))


def calibrate(options: argparse.Namespace) -> None:
    """Measure the costs and the acceptance, and write them."""
    some, gaps, first = (
        humaneval(16),
        defaultdict[tuple[int, str], list[float]](list),
        defaultdict[int, list[float]](list),
    )
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        with server(options, trace) as address:
            asyncio.run(together(address, some[:4], 16, 0, "drafts"))  # a warm-up
            before, started, turn = others_busy(), perf_counter(), 0
            while perf_counter() - started < options.seconds:
                for n in SIZES:
                    for arm in ARMS:
                        prompts = [cut(some[(turn + i) % len(some)], (8, 60)[turn % 2]) for i in range(n)]
                        samples = asyncio.run(together(address, prompts, 48 + 8 * n, 1000 * turn, arm))
                        assert not any(s.error for s in samples), samples
                        end = min(s.started + s.latency for s in samples)
                        gaps[n, arm] += [gap for gap in [full(samples, end)] if gap is not None]
                for words in (1, 12, 60, 150, 250):
                    sample = asyncio.run(one(address, ("x " * words).strip() or "x", 1, turn, "plain"))
                    first[sample.prompt_tokens].append(sample.ttft)
                turn += 1
            others = (others_busy() - before) / (perf_counter() - started)
        found = read(trace)
        rounds, fits = fitted(found, gaps)
        firsts = {n: statistics.median(values) for n, values in first.items()}
        shortest = min(firsts)
        prefills = prefill_table({n - shortest: s - firsts[shortest] for n, s in firsts.items() if n > shortest})
        curve = find_curve(str(trace))
        drafted = [
            [(s.depth, s.accepted) for s in text.steps]
            for text in found.texts.values()
            if any(s.depth for s in text.steps)
        ]
    costs = MeasuredCosts(rounds, prefills, 0.0, f"measured on a server of {options.model.name}")
    overhead = max(firsts[shortest] - costs.round(1, 0, shortest), 0.0)
    curve = only_drafted(drafted, curve)
    made = {
        **json.loads(costs.to_json()),
        "overhead": overhead,
        "curve": asdict(curve),
        "config": options.config,
        "fits": fits,
        "others": others,
    }
    options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{turn} turns, other programs {others:.2f} cores; rounds (size, depth, context, ms):")
    for n, k, c, s in rounds:
        print(f"  {n:.0f} {k:.0f} {c:.0f} {1000 * s:.2f}")
    print("prefills", [(n, c, round(1000 * s, 2)) for n, c, s in prefills], f"request {1000 * overhead:.2f} ms")
    print("survival", [round(s, 3) for s in curve.survival], "available", [round(a, 3) for a in curve.available])


def prefill_table(alone: dict[int, float]) -> list[list[float]]:
    """Seconds of a piece of a prompt, [tokens, context, seconds]: a + b * tokens + c * tokens * mean context.

    alone: tokens of a prompt that was read in one piece, and its seconds.
    """
    x = np.array([[1.0, t, t * t / 2] for t in alone])
    (a, b, c), _ = nnls(x, np.array([*alone.values()]))
    return [
        [t, at, float(a + b * t + c * t * (at + t / 2)) if t else 0.0]
        for t in (0, 1, 32, 64, 128, 256)
        for at in (0, 512)
    ]


def full(samples: Sequence[Sample], end: float) -> float | None:
    """Mean seconds between events of streams while all of them write; None if that was too short."""
    begin = max(s.started + s.ttft for s in samples)
    each = list[float]()
    for s in samples:
        at, times = s.started + s.ttft, list[float]()
        for gap in s.itls:
            at += gap
            if begin <= at <= end:
                times.append(at)
        if len(times) > 4:
            each.append((times[-1] - times[0]) / (len(times) - 1))
    return statistics.mean(each) if each else None


def fitted(trace: Trace, gaps: dict[tuple[int, str], list[float]]) -> tuple[list[list[float]], dict[str, Any]]:
    """Rounds by batch size, depth and context: seconds(size) + a * levels + b * size * levels + c * size * context through
    the traced seconds, and what the streams wait between two rounds."""
    by_round = defaultdict[int, list[Any]](list)
    for text in trace.texts.values():
        for step in text.steps:
            by_round[step.round].append(step)
    drafted = {text.id for text in trace.texts.values() if any(step.depth for step in text.steps)}
    some = [steps for steps in by_round.values() if steps[0].rows in SIZES]
    arms = np.array([any(step.request in drafted for step in steps) for steps in some])
    sizes = np.array([steps[0].rows for steps in some])
    levels = np.array([max(s.depth for s in steps) for steps in some])
    contexts = np.array([statistics.mean(s.position for s in steps) for steps in some])
    y = np.array([sum(steps[0].seconds) for steps in some])
    x = np.column_stack([sizes[:, None] == np.array(SIZES), levels, sizes * levels, sizes * contexts]).astype(float)
    usual = {n: np.median(y[sizes == n]) for n in SIZES}
    keep = y < np.array([3 * usual[n] for n in sizes.tolist()])  # the machine pauses now and then
    line, _ = nnls(x[keep], y[keep])
    fits: dict[str, Any] = {"rounds": len(some), "line": line.tolist()}
    rounds = list[list[float]]()
    for i, n in enumerate(SIZES):
        between = dict[str, float]()
        for arm in ARMS:
            mine = keep & (sizes == n) & (arms == (arm == "drafts"))
            between[arm] = max(statistics.median(gaps[n, arm]) - y[mine].mean(), 0.0) if gaps[n, arm] else 0.0
        between["drafts"] = max(between.values())
        fits[str(n)] = {"between": between, "gaps": {arm: statistics.median(gaps[n, arm] or [0.0]) for arm in ARMS}}
        for k in range(int(levels.max()) + 1):
            base = line[i] + line[-3] * k + line[-2] * n * k + between["drafts" if k else "plain"]
            rounds += [[n, k, c, float(base + line[-1] * n * c)] for c in (0, 512)]
    return rounds, fits


def only_drafted(answers: list[list[tuple[int, int]]], curve: AcceptanceCurve) -> AcceptanceCurve:
    """The curve over answers that were drafted for: those of the plain arm say nothing of what a lookup finds."""
    steps = [step for answer in answers for step in answer]
    available = tuple(sum(d > j for d, _ in steps) / len(steps) for j in range(curve.depth))
    single = tuple(
        AnswerAcceptance(curve.chances, tuple(sum(d > j for d, _ in a) / len(a) for j in range(curve.depth)))
        for a in answers
    )
    return AcceptanceCurve(curve.chances, available, single, curve.source, curve.model)


# -- the sweep --------------------------------------------------------------------------------------------------------------


def arrivals(options: argparse.Namespace, rate: float, seed: int) -> list[tuple[float, str, int]]:
    """When, which prompt, and tokens of the answer."""
    draw, prompts = random.Random(seed), humaneval(32)[16:]
    found, now = list[tuple[float, str, int]](), 0.0
    while True:
        now += draw.expovariate(rate)
        if now > options.seconds:
            return found
        found.append((now, cut(draw.choice(prompts), draw.randint(5, 90)), draw.randint(*LENGTHS)))


async def open_loop(address: tuple[str, int], asked: Sequence[tuple[float, str, int]], arm: str) -> list[Sample]:
    start, tasks = perf_counter(), list[asyncio.Task[Sample]]()
    for n, (at, prompt, tokens) in enumerate(asked):
        await asyncio.sleep(max(start + at - perf_counter(), 0.0))
        tasks.append(asyncio.create_task(one(address, prompt, tokens, n, arm)))
    return list(await asyncio.gather(*tasks))


def sweep(options: argparse.Namespace) -> None:
    """Measure and predict each load, and add them to the result."""
    known = json.loads(options.costs.read_text(encoding="utf-8"))
    costs = MeasuredCosts(known["rounds"], known["prefills"], known["read"], known["source"])
    given = known["curve"]
    answers = tuple(AnswerAcceptance(tuple(a["chances"]), tuple(a["available"])) for a in given["answers"])
    curve = AcceptanceCurve(tuple(given["chances"]), tuple(given["available"]), answers, given["source"])
    options.config = known["config"]
    file = RESULTS / f"{facts()['date']}-{options.name}.json"
    result = (
        json.loads(file.read_text())
        if file.exists()
        else {"machine": facts(), "model": options.model.name, "loads": []}
    )
    result["calibration"] = {k: v for k, v in known.items() if k != "curve"} | {"survival": curve.survival}
    with tempfile.TemporaryDirectory() as folder, server(options, Path(folder) / "trace.jsonl") as address:
        asyncio.run(together(address, humaneval(4), 16, 0, "drafts"))  # a warm-up
        for load in options.loads:
            for arm in options.arms:
                rate = load * capacity(costs, curve, arm)
                asked = arrivals(options, rate, round(1000 * load))
                before, started = others_busy(), perf_counter()
                samples = asyncio.run(open_loop(address, asked, arm))
                others = (others_busy() - before) / (perf_counter() - started)
                row = {
                    "load": load,
                    "arm": arm,
                    "rate": rate,
                    "others": others,
                    **compared(samples, asked, costs, curve, known["overhead"], arm),
                }
                result["loads"].append(row)
                print(line(row), flush=True)
                file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def depths(curve: AcceptanceCurve, arm: str) -> list[int]:
    return [curve.depth if arm == "drafts" else 0] * (SLOTS + 1)


def capacity(costs: MeasuredCosts, curve: AcceptanceCurve, arm: str) -> float:
    """Requests per second of the server, by simulation."""
    demand = Demand(1.0, Lengths("uniform", 10, 200), Lengths("uniform", *LENGTHS))
    plan = ServingPlan(demand, costs, curve, ReplicaLimits(SLOTS, prefill_chunk=CHUNK), LatencyTargets())
    return plan.saturated(depths(curve, arm))


def compared(
    samples: Sequence[Sample], asked: Sequence[tuple[float, str, int]], costs: MeasuredCosts, curve: AcceptanceCurve,
    overhead: float, arm: str,
) -> dict[str, Any]:  # fmt: skip
    """Throughput and p90 latency, measured and predicted, with 95 % intervals."""
    failed = [s.error for s in samples if s.error]
    good = [s for s in samples if not s.error]
    start = min(s.started for s in good)
    tokens = sum(s.tokens for s in good)
    measured = {
        "throughput": tokens / (max(s.started + s.latency for s in good) - start),
        "p90_latency": percentile([s.latency for s in good], 90),
        "p90_ttft": percentile([s.ttft for s in good], 90),
        "median_latency": percentile([s.latency for s in good], 50),
    }
    rng = np.random.default_rng(0)
    latencies = np.array([s.latency for s in good])
    boot = [np.percentile(rng.choice(latencies, len(latencies)), 90) for _ in range(2000)]
    these = [Arrival(s.started - start, s.prompt_tokens, s.tokens) for s in good]
    runs = defaultdict[str, list[float]](list)
    seconds = by_length(costs, curve)
    for seed in range(SEEDS if arm == "drafts" else 1):
        limits = ReplicaLimits(SLOTS, prefill_chunk=CHUNK)
        fleet = simulate(these, 1, limits, costs, seconds, depths(curve, arm), curve, seed)
        latency = [r.latency + overhead for r in fleet.requests]
        runs["throughput"].append(tokens / (max(r.done or 0.0 for r in fleet.requests) + overhead))
        runs["p90_latency"].append(percentile(latency, 90))
        runs["p90_ttft"].append(percentile([r.time_to_first_token + overhead for r in fleet.requests], 90))
        runs["median_latency"].append(percentile(latency, 50))
    predicted = {name: statistics.mean(values) for name, values in runs.items()}
    return {
        "requests": len(good), "failed": failed[:3], "measured": measured, "predicted": predicted,
        "measured_p90_interval": [float(np.percentile(boot, 2.5)), float(np.percentile(boot, 97.5))],
        "predicted_p90_interval": [min(runs["p90_latency"]), max(runs["p90_latency"])],
        "error": {name: predicted[name] / measured[name] - 1 for name in measured},
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    m, p, e = row["measured"], row["predicted"], row["error"]
    low, high = row["measured_p90_interval"]
    return (
        f"{row['load']:.2f} {row['arm']:<7} {row['requests']:>4} requests: tokens/s {m['throughput']:.1f} / "
        f"{p['throughput']:.1f} ({e['throughput']:+.1%}), p90 {m['p90_latency']:.2f} ({low:.2f}-{high:.2f}) / "
        f"{p['p90_latency']:.2f} s ({e['p90_latency']:+.1%}), ttft {e['p90_ttft']:+.1%}, median {e['median_latency']:+.1%}, "
        f"other programs {row['others']:.2f} cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("calibrate")
    first.add_argument("--config", default='{"method": "ngram", "num_speculative_tokens": 4, "controller": "fixed"}')
    first.add_argument("--out", type=Path, required=True)
    first.set_defaults(run=calibrate)
    second = commands.add_parser("sweep")
    second.add_argument("--costs", type=Path, required=True)
    second.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    second.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    second.add_argument("--name", default="simulated")
    second.set_defaults(run=sweep)
    for one_parser in (first, second):
        one_parser.add_argument("--model", type=Path, required=True)
        one_parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
