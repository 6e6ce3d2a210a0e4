"""The simulator of `outrider plan` against a real server: throughput and p90 latency over a sweep of loads.

    python -m benchmarks.simulated calibrate --model model.gguf --out costs.json
    python -m benchmarks.simulated sweep --model model.gguf --costs costs.json --loads 0.3 0.6 0.9 1.3 --name simulated

`calibrate` asks a server for the seconds of rounds and prompts, in turns: streams side by side, with and without drafts, and
prompts of several lengths. Then a second server answers texts with the lengths of the sweep, eight at a time. Its trace tells
how many draft tokens there were and how many were accepted. The file is also one for `outrider plan --hardware`.

`sweep` sends other prompts in Poisson arrivals (open loop), and simulates the same arrivals, prompts and answer lengths. Each
load is a share of the simulated capacity. Between two parts of the sweep there is a turn of the calibration, with the same
prompts each time. The costs of the prediction come from these turns, and so does the machine's speed: a part is predicted with
the mean speed of the turns before and after it. Nothing of the sweep is fitted.

The interval of a measured p90 is a bootstrap over its requests; that of a prediction is over seeds of what is accepted.
`others` are the cores that other programs took meanwhile. Above a few hundredths a row tells of them and not of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks import RESULTS, headline
from benchmarks.machine import facts
from benchmarks.prompts import humaneval
from benchmarks.serve import Sample, ask, own_server
from outrider.engine.trace import Trace, read
from outrider.lab.bench.stats import percentile
from outrider.lab.plan.acceptance_curve import AcceptanceCurve, AnswerAcceptance, find_curve
from outrider.lab.plan.serving_costs import MeasuredCosts, by_length
from outrider.lab.plan.serving_plan import ServingPlan
from outrider.lab.plan.simulation import ReplicaLimits, simulate
from outrider.lab.plan.workload import Arrival, Demand, Lengths

SLOTS, CHUNK = 8, 64
SIZES = (1, 2, 4, 8)  # of the batches that are timed
ARMS = {"plain": {"disable_spec_decode": True}, "drafts": {}}
LENGTHS = (16, 96)  # of answers in the sweep
WORDS = (5, 90)  # of prompts in the sweep
CALIBRATION = 1_000_000  # the first seed of its requests
ACCEPTANCE_SHARE = 0.4  # of the seconds of a calibration
SEEDS = 20  # of a prediction


@contextmanager
def server(options: argparse.Namespace, trace: Path) -> Iterator[tuple[str, int]]:
    """A server of the model; yields its address."""
    more = ["--served-model-name", "m", "--max-num-seqs", str(SLOTS), "--prefill-chunk", str(CHUNK), "--prefix-cache", "0",
            "--max-queue", "4096", "--max-connections", "4096", "--max-model-len", "1024", "--log-file", "/dev/null",
            "--trace", str(trace), "--speculative-config", options.config]  # fmt: skip
    with own_server(str(options.model), *more) as (url, _):
        yield "127.0.0.1", int(url.rpartition(":")[2])


async def one(address: tuple[str, int], prompt: str, tokens: int, seed: int, arm: str) -> Sample:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "seed": seed, "ignore_eos": True}
    return await ask(
        *address, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}} | ARMS[arm]
    )


def cut(prompt: str, words: int) -> str:
    """The beginning of a prompt, and a part of it once more: the model goes on to copy it, so lookups find much."""
    some = prompt.split(" ")[:words]
    return " ".join(some) + "\n\n" + " ".join(some[: max(words // 3, 2)])


def warm_up(address: tuple[str, int]) -> None:
    """Full batches, until caches and buffers have grown."""
    for arm in ARMS:
        asyncio.run(together(address, [cut(p, WORDS[1]) for p in humaneval(SLOTS)], 48, 0, arm))


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


@dataclass
class Turns:
    """What the turns of a calibration found, a value for each turn.

    gaps: seconds between two rounds of a stream, by batch size and arm. firsts: seconds to the first token of an answer, alone,
    by prompt tokens. beside: seconds that four streams lose to each request of one token that comes meanwhile. latencies: of
    the streams, by seed.
    """

    count: int = 0
    gaps: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    firsts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    beside: list[float] = field(default_factory=list)
    latencies: dict[int, float] = field(default_factory=dict)

    def take(self, address: tuple[str, int]) -> None:
        """One more turn. Every second turn has the same prompts."""
        seed = CALIBRATION + 1000 * self.count
        for n in SIZES:
            for number, arm in enumerate(ARMS):
                prompts, first = self._prompts(n), seed + 100 * number + 10 * n
                samples = asyncio.run(together(address, prompts, 48 + 8 * n, first, arm))
                self.gaps[n, arm].append(full(samples)[0])
                self.latencies |= {first + i: s.latency for i, s in enumerate(samples)}
        samples, others = asyncio.run(disturbed(address, self._prompts(4), 48 + 8 * 4, seed + 800))
        gap, begin, end = full(samples)
        came = sum(begin <= s.started <= end for s in others)
        self.beside.append((1 - self.gaps[4, "plain"][-1] / gap) * (end - begin) / came)
        for words in (1, 16, 32, 64, 128, 250):
            two = [asyncio.run(one(address, "x" + " x" * (words - 1), 1, seed + 900, "plain")) for _ in range(2)]
            self.firsts[two[0].prompt_tokens].append(statistics.mean(s.ttft for s in two))
        self.count += 1

    def _prompts(self, n: int) -> list[str]:
        some = humaneval(16)
        return [cut(some[(3 * n + i) % len(some)], (8, 60)[self.count % 2]) for i in range(n)]

    def slowness(self) -> list[float]:
        """How much longer each turn took than turns do: the median over all that was timed."""
        found = list[float]()
        for turn in range(self.count):
            same = range(turn % 2, self.count, 2)  # turns with the same prompts
            rows = [*self.gaps.values(), *self.firsts.values()]
            found.append(statistics.median(row[turn] / statistics.median(row[t] for t in same) for row in rows))
        return found

    def costs(self, trace: Trace, name: str) -> tuple[MeasuredCosts, float, dict[str, Any]]:
        """The costs, the seconds of a request outside of the engine that only itself waits for, and how they were found."""
        slow = self.slowness()
        gaps = {key: statistics.median(s / f for s, f in zip(row, slow, strict=True)) for key, row in self.gaps.items()}
        firsts = {
            key: statistics.median(s / f for s, f in zip(row, slow, strict=True)) for key, row in self.firsts.items()
        }
        rounds, fits = fitted(trace, gaps, slow)
        shortest = min(firsts)
        prefills = prefill_table({n - shortest: s - firsts[shortest] for n, s in firsts.items() if n > shortest})
        costs = MeasuredCosts(rounds, prefills, 0.0, f"measured on a server of {name}")
        beside = statistics.median(s / f for s, f in zip(self.beside, slow, strict=True))
        request = max(beside - costs.round(5, 0, 64) + costs.round(4, 0, 64), 0.0)  # it is one more in one round
        inside = {text.request.seed: text.end.seconds or 0.0 for text in trace.texts.values() if text.end is not None}
        outside = statistics.median(latency - inside[seed] for seed, latency in self.latencies.items())
        fits |= {"firsts": firsts, "beside": beside, "outside": outside, "slowness": slow}
        return replace(costs, request=request), max(outside - request, 0.0), fits


async def disturbed(
    address: tuple[str, int], prompts: Sequence[str], tokens: int, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Streams side by side, and one request of one token after the other meanwhile."""
    streams, others = asyncio.create_task(together(address, prompts, tokens, seed, "plain")), list[Sample]()
    while not streams.done():
        others.append(await one(address, "x", 1, seed + 100, "plain"))
    return await streams, others


async def mixed(address: tuple[str, int], seconds: float) -> None:
    """Answers with drafts, with the lengths of the sweep, from prompts that it does not have; a new one when one is done."""
    draw, prompts, end = random.Random(0), humaneval(16), perf_counter() + seconds

    async def stream() -> None:
        while perf_counter() < end:
            sample = await one(
                address, cut(draw.choice(prompts), draw.randint(*WORDS)), draw.randint(*LENGTHS), 0, "drafts"
            )
            assert not sample.error, sample.error

    await asyncio.gather(*(stream() for _ in range(SLOTS)))


def calibrate(options: argparse.Namespace) -> None:
    """Measure the costs and the acceptance, and write them."""
    with tempfile.TemporaryDirectory() as folder:
        turns, trace = Turns(), Path(folder) / "trace.jsonl"
        with server(options, trace) as address:
            warm_up(address)
            before, started = others_busy(), perf_counter()
            while perf_counter() - started < (1 - ACCEPTANCE_SHARE) * options.seconds or turns.count < 2:
                turns.take(address)
            others = (others_busy() - before) / (perf_counter() - started)
        costs, outside, fits = turns.costs(read(trace), options.model.name)
        trace = Path(folder) / "drafts.jsonl"
        with server(options, trace) as address:
            asyncio.run(mixed(address, ACCEPTANCE_SHARE * options.seconds))
        curve = find_curve(str(trace))
    made = {
        **json.loads(costs.to_json()),
        "outside": outside,
        "curve": asdict(curve),
        "config": options.config,
        "fits": fits,
        "others": others,
    }
    options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    told(costs, outside, fits)
    print(f"other programs {others:.2f} cores")
    print("survival", [round(s, 3) for s in curve.survival], "available", [round(a, 3) for a in curve.available])


def told(costs: MeasuredCosts, outside: float, fits: dict[str, Any]) -> None:
    """Print the costs."""
    print(
        f"{len(fits['slowness'])} turns, {' '.join(f'{s:.2f}' for s in fits['slowness'])}; rounds (size, depth, context, ms):"
    )
    print("  " + "  ".join(f"{n:.0f} {k:.0f} {c:.0f} {1000 * s:.2f}" for n, k, c, s in costs.rounds))
    print(
        "prefills",
        [(n, c, round(1000 * s, 2)) for n, c, s in costs.prefills],
        f"request {1000 * costs.request:.2f} + {1000 * outside:.2f} ms",
    )


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


def full(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Mean seconds between events of streams while all of them write, and from when to when that was."""
    assert not any(s.error for s in samples), samples
    begin, end = max(s.started + s.ttft for s in samples), min(s.started + s.latency for s in samples)
    each = list[float]()
    for s in samples:
        times = [at for at in accumulate(s.itls, initial=s.started + s.ttft) if begin <= at <= end]
        if len(times) > 4:
            each.append((times[-1] - times[0]) / (len(times) - 1))
    return statistics.mean(each), begin, end


def fitted(
    trace: Trace, gaps: dict[tuple[int, str], float], slowness: Sequence[float]
) -> tuple[list[list[float]], dict[str, Any]]:
    """Rounds by batch size, depth and context: seconds(size) + a * levels + b * size * levels + c * size * context through
    the traced seconds of the turns, and what the streams wait between two rounds."""
    by_round, of = defaultdict[int, list[Any]](list), dict[int, tuple[int, str]]()
    for text in trace.texts.values():
        if text.request.seed >= CALIBRATION:
            turn, rest = divmod(text.request.seed - CALIBRATION, 1000)
            for step in text.steps:
                by_round[step.round].append(step)
                of[step.round] = turn, "plain" if rest >= 800 else list(ARMS)[rest // 100]
    some = [steps for steps in by_round.values() if steps[0].rows in SIZES]
    arms = np.array([of[steps[0].round][1] == "drafts" for steps in some])
    sizes = np.array([steps[0].rows for steps in some])
    levels = np.array([max(s.depth for s in steps) for steps in some])
    contexts = np.array([statistics.mean(s.position for s in steps) for steps in some])
    y = np.array([sum(steps[0].seconds.values()) / slowness[of[steps[0].round][0]] for steps in some])
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
            between[arm] = max(gaps[n, arm] - float(y[mine].mean()), 0.0)
        between["drafts"] = max(between.values())
        fits[str(n)] = {"between": between, "gaps": {arm: gaps[n, arm] for arm in ARMS}}
        for k in range(int(levels.max()) + 1):
            base = line[i] + line[-3] * k + line[-2] * n * k + between["drafts" if k else "plain"]
            rounds += [[n, k, c, float(base + line[-1] * n * c)] for c in (0, 512)]
    return rounds, fits


# -- the sweep --------------------------------------------------------------------------------------------------------------


def arrivals(options: argparse.Namespace, rate: float, seed: int) -> list[tuple[float, str, int]]:
    """When, which prompt, and tokens of the answer."""
    draw, prompts = random.Random(seed), humaneval(32)[16:]
    found, now = list[tuple[float, str, int]](), 0.0
    while True:
        now += draw.expovariate(rate)
        if now > options.seconds:
            return found
        found.append((now, cut(draw.choice(prompts), draw.randint(*WORDS)), draw.randint(*LENGTHS)))


async def open_loop(address: tuple[str, int], asked: Sequence[tuple[float, str, int]], arm: str) -> list[Sample]:
    start, tasks = perf_counter(), list[asyncio.Task[Sample]]()
    for n, (at, prompt, tokens) in enumerate(asked):
        await asyncio.sleep(max(start + at - perf_counter(), 0.0))
        tasks.append(asyncio.create_task(one(address, prompt, tokens, n, arm)))
    return list(await asyncio.gather(*tasks))


@dataclass
class Part:
    """One part of the sweep: a load for some seconds. turn: the number of the turn before it."""

    load: float
    arm: str
    rate: float
    turn: int
    samples: list[Sample]
    others: float


def sweep(options: argparse.Namespace) -> None:
    """Measure each load in several parts with turns between them, then predict, and write the result."""
    known = json.loads(options.costs.read_text(encoding="utf-8"))
    given = known["curve"]
    answers = tuple(AnswerAcceptance(tuple(a["chances"]), tuple(a["available"])) for a in given["answers"])
    curve = AcceptanceCurve(tuple(given["chances"]), tuple(given["available"]), answers, given["source"])
    options.config, before = known["config"], MeasuredCosts(known["rounds"], known["prefills"])
    turns, parts = Turns(), list[Part]()
    order = [(load, arm) for load in options.loads for arm in options.arms]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        with server(options, trace) as address:
            warm_up(address)
            turns.take(address)
            for lap in range(options.laps):
                for load, arm in order[:: (-1) ** lap]:
                    rate = load * capacity(before, curve, arm)
                    asked = arrivals(options, rate, round(1000 * load) + lap)
                    busy, started = others_busy(), perf_counter()
                    samples = asyncio.run(open_loop(address, asked, arm))
                    others = (others_busy() - busy) / (perf_counter() - started)
                    parts.append(Part(load, arm, rate, turns.count - 1, samples, others))
                    turns.take(address)
        costs, outside, fits = turns.costs(read(trace), options.model.name)
    told(costs, outside, fits)
    result = {
        "machine": facts(),
        "model": options.model.name,
        "seconds": options.seconds,
        "calibration": {**asdict(costs), "outside": outside, "fits": fits, "survival": curve.survival},
        "loads": [
            compared([part for part in parts if (part.load, part.arm) == key], costs, outside, curve, fits["slowness"])
            for key in order
        ],
    }
    for row in result["loads"]:
        print(line(row))
    file = RESULTS / f"{facts()['date']}-{options.name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def depths(curve: AcceptanceCurve, arm: str) -> list[int]:
    return [curve.depth if arm == "drafts" else 0] * (SLOTS + 1)


def capacity(costs: MeasuredCosts, curve: AcceptanceCurve, arm: str) -> float:
    """Requests per second of the server, by simulation."""
    demand = Demand(1.0, Lengths("uniform", 10, 200), Lengths("uniform", *LENGTHS))
    plan = ServingPlan(demand, costs, curve, ReplicaLimits(SLOTS, prefill_chunk=CHUNK))
    return plan.saturated(depths(curve, arm))


def compared(
    parts: Sequence[Part], costs: MeasuredCosts, outside: float, curve: AcceptanceCurve, slowness: Sequence[float]
) -> dict[str, Any]:
    """Throughput and p90 latency of the parts of one load, measured and predicted, with 95 % intervals."""
    arm, failed = parts[0].arm, [s.error for part in parts for s in part.samples if s.error]
    good = [[s for s in part.samples if not s.error] for part in parts]
    starts = [min(s.started for s in some) for some in good]
    tokens = sum(s.tokens for some in good for s in some)
    measured = figures(
        tokens,
        sum(max(s.started + s.latency for s in some) - start for some, start in zip(good, starts, strict=True)),
        [s.latency for some in good for s in some],
        [s.ttft for some in good for s in some],
    )
    rng = np.random.default_rng(0)
    latencies = np.array([s.latency for some in good for s in some])
    boot = [np.percentile(rng.choice(latencies, len(latencies)), 90) for _ in range(2000)]
    speeds = [(slowness[part.turn] + slowness[part.turn + 1]) / 2 for part in parts]
    runs = list[dict[str, float]]()
    for seed in range(SEEDS if arm == "drafts" else 1):
        busy, latency, first = 0.0, list[float](), list[float]()
        for some, start, slow in zip(good, starts, speeds, strict=True):
            mine = slower(costs, slow)
            these = [Arrival(s.started - start, s.prompt_tokens, s.tokens) for s in some]
            limits = ReplicaLimits(SLOTS, prefill_chunk=CHUNK)
            fleet = simulate(these, 1, limits, mine, by_length(mine, curve), depths(curve, arm), curve, seed)
            latency += [r.latency + slow * outside for r in fleet.requests]
            first += [r.time_to_first_token + slow * outside for r in fleet.requests]
            busy += max(r.done or 0.0 for r in fleet.requests) + slow * outside
        runs.append(figures(tokens, busy, latency, first))
    predicted = {name: statistics.mean(run[name] for run in runs) for name in measured}
    p90 = [run["p90_latency"] for run in runs]
    return {
        "load": parts[0].rate / capacity(costs, curve, arm), "arm": arm, "rate": parts[0].rate, "requests": len(latencies),
        "failed": failed[:3], "others": statistics.mean(part.others for part in parts), "slowness": speeds,
        "measured": measured, "predicted": predicted,
        "measured_p90_interval": [float(np.percentile(boot, 2.5)), float(np.percentile(boot, 97.5))],
        "predicted_p90_interval": [min(p90), max(p90)],
        "error": {name: predicted[name] / measured[name] - 1 for name in measured},
    }  # fmt: skip


def figures(tokens: int, seconds: float, latency: list[float], first: list[float]) -> dict[str, float]:
    return {
        "throughput": tokens / seconds,
        "p90_latency": percentile(latency, 90),
        "p90_ttft": percentile(first, 90),
        "median_latency": percentile(latency, 50),
    }


def slower(costs: MeasuredCosts, factor: float) -> MeasuredCosts:
    """The same costs on a machine that takes so many times as long."""
    rounds = [[n, k, c, factor * s] for n, k, c, s in costs.rounds]
    prefills = [[n, c, factor * s] for n, c, s in costs.prefills]
    return MeasuredCosts(rounds, prefills, costs.read, costs.source, factor * costs.request)


def line(row: dict[str, Any]) -> str:
    m, p, e = row["measured"], row["predicted"], row["error"]
    low, high = row["measured_p90_interval"]
    return (
        f"{row['load']:.2f} {row['arm']:<7} {row['requests']:>4} requests: tokens/s {m['throughput']:.1f} / "
        f"{p['throughput']:.1f} ({e['throughput']:+.1%}), p90 {m['p90_latency']:.2f} ({low:.2f}-{high:.2f}) / "
        f"{p['p90_latency']:.2f} s ({e['p90_latency']:+.1%}), ttft {e['p90_ttft']:+.1%}, median {e['median_latency']:+.1%}, "
        f"other programs {row['others']:.2f} cores, slowness {min(row['slowness']):.2f}-{max(row['slowness']):.2f}"
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
    second.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.3])
    second.add_argument("--laps", type=int, default=2)
    second.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    second.add_argument("--name", default="simulated")
    second.set_defaults(run=sweep)
    for one_parser, seconds in ((first, 120.0), (second, 15.0)):
        one_parser.add_argument("--model", type=Path, required=True)
        one_parser.add_argument(
            "--seconds", type=float, default=seconds, help="of the calibration, or of a part of the sweep"
        )
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
