"""`auto` without a clock: guesses recorded at every position of real texts, replayed on simulated costs.

    python -m benchmarks.replayed                 minutes of recording, which is kept under work/bench; then half a minute
    python -m benchmarks.replayed --swing 1 --jitter 0      a machine that keeps its pace
    python -m benchmarks.replayed --learned --out FILE      with costs learned from the steps alone, as "controller": "adaptive"

What the built-in draft and a suffix lookup guess at each position of the built-in model's texts is recorded once, up to sixteen
tokens. A run then needs no model: the router and the controller that `auto` has decide as ever, what they hear of time is
simulated, and what would have been kept is known. Costs are calibrated beforehand, each wrong by some hundredths, as in a quick
calibration. So `auto` is told from the best fixed drafter to a hundredth, where measured columns tell it to a tenth
(benchmarks.workloads). The controller hears noisy seconds, and everything is judged without noise.
Costs are those that calibrations found: of a machine on which a few nodes are cheap, and of one on which a third row is dear.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import abc
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from outrider.control.cost_model import interpolate
from outrider.drafters.combine.router import DrafterRouter

from benchmarks import RESULTS, WORK, headline
from benchmarks.pairs import fingerprint
from benchmarks.report import markdown
from benchmarks.workloads import texts
from outrider.calibrate import QUICK
from outrider.config import SpeculativeConfig
from outrider.control import Adaptive, Calibrated, Controller, CostModel, Fixed
from outrider.core.types import Budget, Commit, Draft, Step, Verdict
from outrider.decode import Decoder, Sequence
from outrider.drafters import Drafter, make_drafter
from outrider.drafters.base import BaseDrafter, DraftContext, TargetPass, chains
from outrider.drafters.combine.merge import NodeList, own_commit
from outrider.engine.scheduler import Scheduler
from outrider.models.load import load
from outrider.params import SamplingParams

DEEPEST, RECORDED = 16, 160
WORKLOADS = {"code": 12, "translation": 4, "summarization": 4, "qa": 4}  # texts
GROUP = 4  # texts that one engine writes after another
FIXED = (*(("draft_model", k) for k in (2, 3, 4, 5, 6, 8)), ("suffix", 7), ("suffix", 16))


@dataclass(frozen=True)
class Costs:
    """Of a machine, in plain steps. sizes: of a forward by its rows. level: of a drafted level. bytes: the draft's weights over
    the target's."""

    sizes: dict[int, float]
    level: float
    bytes: float

    def calibrated(self, swing: float, wrong: float, seed: int) -> CostModel:
        """What a quick calibration finds, in both phases. wrong: the standard error of each size, in parts of it."""
        draw = random.Random(seed)
        mean = {n: (self.forward(n) + max(swing, self.forward(n))) / 2 for n in range(DEEPEST + 1)}
        target = [[1, n, 0, mean[n - 1] * draw.lognormvariate(0, wrong)] for n in QUICK.nodes]
        draft = [
            [1, 1, d, 0, self.level * d * draw.lognormvariate(0, wrong)]
            for d in (0, *(d or DEEPEST for d in QUICK.depths))
        ]
        return CostModel({}, target, draft, prefill=0.0, fixed=0.0)

    def forward(self, nodes: int) -> float:
        return interpolate(self.sizes, 1 + nodes)


MACHINES = {  # bfloat16 on two cores of two hosts
    "0.5B": Costs({1: 1.0, 8: 1.84, 9: 2.24, 17: 3.84}, 0.035, 0.05),
    "1.1B": Costs({1: 1.0, 8: 1.42, 9: 1.72, 17: 2.92}, 0.02, 0.025),
    "1.1B, dear": Costs({1: 1.0, 2: 1.12, 3: 1.54, 5: 1.64, 8: 1.88, 9: 2.15, 17: 3.5}, 0.01, 0.025),
}


@dataclass
class Recorded:
    """A text, and by drafter what it guessed after each of its tokens (before the first: after the prompt)."""

    prompt: int  # tokens
    text: list[int]
    guesses: dict[str, list[list[int]]]


class _Recorder(BaseDrafter):
    """Asks drafters at every position and guesses nothing itself."""

    def __init__(self, drafters: dict[str, Drafter]) -> None:
        self.drafters = drafters
        self.guesses: dict[str, list[list[int]]] = {name: [] for name in drafters}
        self.proposals: list[NodeList] = []

    def propose(self, context: DraftContext) -> Draft:
        self.proposals = []
        for name, drafter in self.drafters.items():
            made = drafter.propose(replace(context, budgets=[Budget(DEEPEST)]))
            self.proposals.append(made.host[0])
            self.guesses[name].append(made.tokens[0, 1:].tolist())
        return chains(context, [[]])

    def update(self, context: DraftContext, commits: abc.Sequence[Commit], target: TargetPass) -> None:
        for drafter, proposal in zip(self.drafters.values(), self.proposals, strict=True):
            drafter.update(context, [own_commit(commits[0], proposal)], target)

    def release(self, slot: int) -> None:
        for drafter in self.drafters.values():
            drafter.release(slot)


def record() -> dict[tuple[str, float], list[Recorded]]:
    """By workload and temperature."""
    target, found = load("builtin:code", device="cpu"), dict[tuple[str, float], list[Recorded]]()
    for workload, count in WORKLOADS.items():
        for temperature in (0.0, 1.0):
            configs = (
                {"method": "suffix", "suffix_shared_tokens": 0},
                {"method": "draft_model", "model": "builtin:code-draft"},
            )
            drafters = {
                c["method"]: make_drafter(SpeculativeConfig.of(c), target, rows=1, max_length=2048, device="cpu")
                for c in configs
            }
            params = SamplingParams(temperature=temperature, max_tokens=RECORDED + 1, ignore_eos=True)
            for seed, text in enumerate(texts(workload, target.tokenizer, count)):
                recorder = _Recorder(drafters)
                decoder = Decoder(target.model, recorder, controller=Fixed(DEEPEST), rows=1, max_length=2048)
                [row] = Scheduler(decoder, raises=True).generate([Sequence(0, text.prompt, params, seed)])
                found.setdefault((workload, temperature), []).append(
                    Recorded(len(text.prompt), row.output, recorder.guesses)
                )
    return found


def recorded() -> dict[tuple[str, float], list[Recorded]]:
    """Recorded now, unless that was done with this pair."""
    path = WORK / f"replayed-{fingerprint('builtin:code')}-{fingerprint('builtin:code-draft')}.json"
    if not path.exists():
        print("recording what is guessed at every position: some minutes", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [[*key, [asdict(text) for text in every]] for key, every in record().items()]
        path.write_text(json.dumps(lines), encoding="utf-8")
    lines = json.loads(path.read_text(encoding="utf-8"))
    return {(workload, temperature): [Recorded(**text) for text in every] for workload, temperature, every in lines}


class _Replayed(BaseDrafter):
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name

    def propose(self, context: DraftContext) -> Draft:
        draft = chains(context, [self.machine.now.guesses[self.name][self.machine.at]])
        self.machine.levels += (draft.nodes - 1) * (self.name == "draft_model")
        return draft


class Machine:
    """Only keeps time. swing: how many times as long reading the target's weights takes in slow phases, which come and go about
    every 25 steps (then nodes cost nothing until they take longer than that); jitter: of single steps, of which one in a
    hundred takes three times as long. Judged is the mean of both phases without jitter."""

    def __init__(self, costs: Costs, method: str, swing: float = 1.0, jitter: float = 0.0, seed: int = 0) -> None:
        self.costs, self.swing, self.jitter = costs, swing, jitter
        self.random, self.slow = random.Random(seed), False
        self.at, self.levels = 0, 0  # written tokens of the text, and levels that the draft model drafted in this step
        self.now: Recorded
        self.drafter: Drafter = _Replayed(self, method)
        if method == "auto":
            some = {name: _Replayed(self, name) for name in ("suffix", "draft_model")}
            self.drafter = DrafterRouter(some, {"draft_model": costs.bytes})

    def write(self, controller: Controller, group: abc.Sequence[Recorded], tokens: int) -> float:
        """Plain steps that so many tokens of each text take."""
        total = 0.0
        for self.now in group:
            self.at, written = 0, [0] * self.now.prompt
            while self.at < tokens:
                budget = controller.budgets([0])[0].clipped(tokens - self.at - 1)
                total += self._step(controller, budget, written)
            controller.release(0)
            self.drafter.release(0)
        return total

    def _step(self, controller: Controller, budget: Budget, written: list[int]) -> float:
        self.levels = 0
        view: Any = {"warp": None, "noise": None, "stream": None}  # nobody here draws
        context = DraftContext([0], [written], [budget], **view, needs_probs=False, prompt_lengths=[self.now.prompt])
        draft = self.drafter.propose(context) if budget.depth else chains(context, [[]])
        guesses = draft.tokens[0, 1:].tolist()
        right = next((n for n, t in enumerate(guesses) if t != self.now.text[self.at + n]), len(guesses))
        kept = Commit(self.now.text[self.at : self.at + right + 1], list(range(right + 1)), right)
        position = len(written)
        written += kept.tokens
        if budget.depth:
            self.drafter.update(context, [kept], TargetPass(draft, torch.empty(0)))
        self.at += len(kept.tokens)
        target, drafting = self.costs.forward(len(guesses)), self.costs.level * self.levels
        self.slow ^= self.random.random() < 1 / 25
        slow = max(self.swing, target)
        noise = self.random.lognormvariate(0, self.jitter)
        noise *= 3 if self.jitter and self.random.random() < 0.01 else 1
        seconds = {
            "draft": drafting * noise,
            "target": (slow if self.slow else target) * noise,
            "verify": 0.0,
            "commit": 0.0,
        }
        none = torch.zeros(1, dtype=torch.long)
        verdict = Verdict(draft.tokens, none, none)
        controller.observe(Step(draft, verdict, [kept], [0], [position], [budget], seconds))
        return (target + slow) / 2 + drafting


def fixed(costs: Costs, group: abc.Sequence[Recorded], tokens: int, swing: float = 1.0) -> dict[str, float]:
    """Plain steps of the fast phases by fixed drafter."""
    every = (("plain", "suffix", 0), *((f"{method} {k}", method, k) for method, k in FIXED))
    return {name: Machine(costs, method, swing).write(Fixed(k), group, tokens) for name, method, k in every}


def measure(
    machine: str,
    workload: str,
    temperature: float,
    every: abc.Sequence[Recorded],
    tokens: int,
    swing: float,
    jitter: float,
    seeds: int,
    wrong: float | None,
) -> dict[str, Any]:
    """`auto` on groups of texts, warmed up by half of another text, as benchmarks.workloads has it. wrong: how far its
    calibration is off; None: it has none."""
    costs, groups, auto = MACHINES[machine], [every[at : at + GROUP] for at in range(0, len(every), GROUP)], 0.0
    known = fixed(costs, every, tokens, swing)
    for group in groups:
        runs = list[float]()
        for seed in range(seeds):
            one = Machine(costs, "auto", swing, jitter, seed)
            told = None if wrong is None else Calibrated(costs.calibrated(swing, wrong, seed))
            controller = Adaptive(Budget(DEEPEST), costs=told)
            one.write(controller, every[-1:], tokens // 2)
            runs.append(one.write(controller, group, tokens))
        auto += mean(runs)
    plain, best = known["plain"], min(known, key=known.__getitem__)
    return {
        "machine": machine,
        "workload": workload,
        "temperature": temperature,
        "texts": len(every),
        "tokens": tokens,
        "method": best,
        "best": round(plain / known[best], 3),
        "auto": round(plain / auto, 3),
    }


def table(records: abc.Sequence[dict[str, Any]]) -> str:
    head = ["costs of", "text", "texts x tokens", "best fixed", "over plain", "auto", "auto / best"]
    rows = [
        [
            r["machine"],
            f"{r['workload']}, T={r['temperature']:g}",
            f"{r['texts']} x {r['tokens']}",
            r["method"],
            f"{r['best']:.2f}",
            f"{r['auto']:.2f}",
            f"{r['auto'] / r['best']:.3f}",
        ]
        for r in records
    ]
    return markdown(head, [*rows, ["mean", "", "", "", "", "", f"{mean(r['auto'] / r['best'] for r in records):.3f}"]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replayed", description=headline(__doc__))
    parser.add_argument("--tokens", type=int, default=64, help=f"of each text, {RECORDED} at most")
    parser.add_argument(
        "--swing", type=float, default=1.6, help="how many times as long reading weights takes in slow phases"
    )
    parser.add_argument("--jitter", type=float, default=0.08, help="of single steps")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--wrong", type=float, default=0.05, help="standard error of each calibrated cost, in parts of it"
    )
    parser.add_argument("--learned", action="store_true", help="nothing is calibrated")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not 1 <= args.tokens <= RECORDED:
        raise SystemExit(f"--tokens is 1 to {RECORDED}, got {args.tokens}")
    every, wrong = recorded(), None if args.learned else args.wrong
    records = [
        measure(machine, *key, every[key], args.tokens, args.swing, args.jitter, args.seeds, wrong)
        for machine in MACHINES
        for key in every
    ]
    today = datetime.now(UTC).date().isoformat()
    out = args.out or RESULTS / f"{today}-replayed.json"
    told = {
        "date": today,
        "swing": args.swing,
        "jitter": args.jitter,
        "seeds": args.seeds,
        "wrong": wrong,
        "records": records,
    }
    out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(table(records))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
