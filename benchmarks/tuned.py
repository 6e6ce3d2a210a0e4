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
from outrider.bench.prompts import Prompt
from outrider.bench.tune.race import Candidate, Racer, plain_candidate
from outrider.bench.tune.search import Search
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


def prompts_of(workload: str, tokenizer: Any, count: int) -> tuple[list[Prompt], float]:
    """Prompts, and their temperature."""
    if workload == "code":
        texts: Sequence[str] = humaneval(count)
    elif workload == "edit":
        texts = [tokenizer.decode(prompt) for prompt, _, _ in edit_workload(tokenizer, count)]
    elif workload == "prose":
        texts = PROSE[:count]
    else:
        draw = random.Random(0)
        texts = [tokenizer.decode([draw.randrange(300, tokenizer.vocab_size) for _ in range(24)]) for _ in range(count)]
    return [Prompt(str(n), workload, text) for n, text in enumerate(texts)], 1.5 if workload == "nonsense" else 0.0


def exhaustive(search: Search, repeats: int) -> tuple[list[Candidate], float]:
    """Every chain of every drafter and some trees, measured on all prompts; and the seconds it took."""
    start, found = perf_counter(), list[Candidate]()
    for method in search.methods:
        if method.statistics is None:
            continue
        limit = method.statistics.limit
        trees = [b for b in TREES if limit.width > 1 and b.depth <= limit.depth]
        budgets = [*(Budget(d) for d in range(1, limit.depth + 1)), *trees]
        found += [search.predictor.predict(method, budget) for budget in budgets]
    plain = plain_candidate()
    for repeat in range(repeats):
        for candidate in (plain, *found):
            search.racer.reset([candidate])
            for prompt in search.prompts:
                search.racer.race([candidate], prompt, repeat)
    return [plain, *found], perf_counter() - start


def against(search: Search, chosen: Candidate, best: Candidate, repeats: int) -> tuple[float, float, float]:
    """The choice's speed over the sweep's best, measured again in turns, and the ends of its interval."""
    ours, theirs = (Candidate(c.name, c.config, c.budget, c.method) for c in (chosen, best))
    ours.controller = chosen.controller
    for repeat in range(repeats):
        search.racer.reset([ours, theirs])
        for prompt in search.prompts:
            search.racer.race([ours, theirs], prompt, repeat)
    found = stats.ratio(ours.samples, theirs.samples)
    assert found is not None
    return found.value, found.low, found.high


def compare(target: Loaded, workload: str, prompts: int, tokens: int, repeats: int, seconds: float) -> dict[str, Any]:
    """One workload: tune, then the sweep, then both winners in turns."""
    read, temperature = prompts_of(workload, target.tokenizer, prompts)
    sampling = {"temperature": temperature, "max_tokens": tokens, "seed": 0, "ignore_eos": True}
    start = perf_counter()
    search = Search(Racer(target, sampling), read, candidates(target, None, None, None, False), seconds=seconds)
    for _ in search.run():
        pass
    tuning = perf_counter() - start
    chosen = search.answer
    found, sweeping = exhaustive(search, repeats)
    best = max(found, key=lambda c: c.speed)
    over = (1.0, 1.0, 1.0) if chosen.name == best.name else against(search, chosen, best, repeats + 1)
    return {
        "workload": workload, "prompts": prompts, "repeats": repeats, "settings": len(found),
        "chosen": chosen.name, "best": best.name,
        "over_best": round(over[0], 3), "low": round(over[1], 3), "high": round(min(over[2], 99.0), 3),
        "tune_seconds": round(tuning, 1), "sweep_seconds": round(sweeping, 1),
        "time": round(tuning / sweeping, 3), "over_plain": round(best.speed / found[0].speed, 3),
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
