"""What `outrider tune` chooses, against an exhaustive sweep: speed of the choice over the best, and time over the sweep's.

    python -m benchmarks.tuned                                        four workloads on builtin:code-160M: an hour
    python -m benchmarks.tuned --workloads prose --prompts 3 --repeats 1

Workloads: code (HumanEval), prose and edit (a text, and a file with one change asked for, as prompts of the built-in model),
nonsense (random words, temperature 1.5). The sweep measures every setting that tune predicts of chains, and trees of four
sizes, on all prompts; then tune's choice and the sweep's best are measured again in turns, for the best of many measurements is
flattered by its noise. Asked: 0.97 of the best, in a fifth of the time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import RESULTS, headline, machine
from benchmarks.edits import edit_workload
from benchmarks.prompts import humaneval
from benchmarks.report import markdown
from outrider.bench import stats
from outrider.bench.prompts import Ask
from outrider.bench.tune.search import Arm, Search
from outrider.cli.tune import candidates
from outrider.core.types import Budget
from outrider.models.load import Loaded, load

TREES = (Budget(2, 4, 4), Budget(3, 4, 6), Budget(4, 4, 8), Budget(5, 4, 12))
PROSE = (
    "The committee met on Tuesday to discuss the report. It was agreed that",
    "When the train came into the station, nobody on the platform looked up, because",
    "A good recipe says what can go wrong. With bread it is mostly the time, for",
    "There are two kinds of maps. The first kind tells you where you are, and the second",
    "In the spring the river rises over the lower fields, and the people of the village",
    "She opened the letter at last and read it twice. What surprised her was not",
)
WORKLOADS = ("code", "prose", "edit", "nonsense")


def asks_of(workload: str, tokenizer: Any, count: int) -> tuple[list[Ask], float]:
    """Prompts, and the temperature that they are asked at."""
    if workload == "code":
        texts: Sequence[str] = humaneval(count)
    elif workload == "edit":
        texts = [tokenizer.decode(prompt) for prompt, _, _ in edit_workload(tokenizer, count)]
    elif workload == "prose":
        texts = PROSE[:count]
    else:
        draw = random.Random(0)
        texts = [tokenizer.decode([draw.randrange(300, tokenizer.vocab_size) for _ in range(24)]) for _ in range(count)]
    asks = [Ask(str(n), workload, text) for n, text in enumerate(texts)]
    return asks, 1.5 if workload == "nonsense" else 0.0


def exhaustive(search: Search, repeats: int) -> tuple[list[Arm], float]:
    """Every chain of every drafter and some trees, measured on all prompts; and the seconds it took."""
    start, arms = perf_counter(), list[Arm]()
    for method in search.methods:
        if method.seen is None:
            continue
        limit = method.seen.limit
        trees = [b for b in TREES if limit.width > 1 and b.depth <= limit.depth]
        budgets = [*(Budget(d) for d in range(1, limit.depth + 1)), *trees]
        arms += [search.expect(method, budget) for budget in budgets]
    plain = Arm("plain", search.plain.config, Budget(0))
    for repeat in range(repeats):
        for arm in (plain, *arms):
            search.forget([arm])
            for ask in search.asks:
                search.race([arm], ask, repeat)
    return [plain, *arms], perf_counter() - start


def speed(arm: Arm) -> float:
    return sum(s.output_tokens for s in arm.samples) / sum(s.seconds for s in arm.samples)


def against(search: Search, chosen: Arm, best: Arm, repeats: int) -> tuple[float, float, float]:
    """The choice's speed over the sweep's best, measured again in turns, and the ends of its interval."""
    ours, theirs = Arm(chosen.name, chosen.config, chosen.budget), Arm(best.name, best.config, best.budget)
    ours.controller = chosen.controller
    for repeat in range(repeats):
        search.forget([ours, theirs])
        for ask in search.asks:
            search.race([ours, theirs], ask, repeat)
    found = stats.ratio(ours.samples, theirs.samples)
    assert found is not None
    return found.value, found.low, found.high


def compare(target: Loaded, workload: str, prompts: int, tokens: int, repeats: int, seconds: float) -> dict[str, Any]:
    """One workload: tune, then the sweep, then both winners in turns."""
    asks, temperature = asks_of(workload, target.tokenizer, prompts)
    sampling = {"temperature": temperature, "max_tokens": tokens, "seed": 0, "ignore_eos": True}
    start = perf_counter()
    search = Search(target, asks, candidates(target, None, None, None, False), sampling, seconds=seconds)
    for _ in search.run():
        pass
    tuning = perf_counter() - start
    chosen = search.chosen
    arms, sweeping = exhaustive(search, repeats)
    best = max(arms, key=speed)
    over = (1.0, 1.0, 1.0) if chosen.name == best.name else against(search, chosen, best, repeats + 1)
    return {
        "workload": workload, "prompts": prompts, "repeats": repeats, "settings": len(arms),
        "chosen": chosen.name, "best": best.name,
        "over_best": round(over[0], 3), "low": round(over[1], 3), "high": round(min(over[2], 99.0), 3),
        "tune_seconds": round(tuning, 1), "sweep_seconds": round(sweeping, 1),
        "time": round(tuning / sweeping, 3), "over_plain": round(speed(best) / speed(arms[0]), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned", description=headline(__doc__))
    parser.add_argument("--model", default="builtin:code-160M")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="that tune may measure for")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    today, records = datetime.now(UTC).date().isoformat(), list[dict[str, Any]]()
    out, target = args.out or RESULTS / f"{today}-tuned.json", load(args.model, device="cpu")
    if out.exists():  # workloads may be measured one by one
        old = json.loads(out.read_text(encoding="utf-8"))["workloads"]
        records = [r for r in old if r["workload"] not in args.workloads]
    for workload in args.workloads:
        records.append(compare(target, workload, args.prompts, args.tokens, args.repeats, args.seconds))
        print(records[-1], flush=True)
        made = {"date": today, "machine": machine.facts(), "model": args.model}
        out.write_text(json.dumps({**made, "workloads": records}, indent=1) + "\n", encoding="utf-8")
    print(table(records))
    print(f"written to {out}")


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: a workload a line."""
    head = ["", "tune's choice", "best of the sweep", "choice / best", "95 %", "time / sweep's", "best / plain"]
    body = [
        [r["workload"], r["chosen"], r["best"], f"{r['over_best']:.3f}", f"{r['low']:.3f}-{r['high']:.3f}",
         f"{r['time']:.2f}", f"{r['over_plain']:.2f}"]
        for r in records
    ]  # fmt: skip
    return markdown(head, body)


if __name__ == "__main__":
    main()
