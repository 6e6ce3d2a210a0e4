"""What `outrider tune` chooses, against a long race of the settings that may be better.

    python -m benchmarks.tuned                                        four workloads on synthetic 160M: an hour
    python -m benchmarks.tuned --workloads prose --prompts 3 --repeats 1

Workloads: code (HumanEval), prose and edit (a text, and a file with one change asked for, as prompts of the built-in model),
nonsense (random words, temperature 1.5). The race: plain decoding, "auto", tune's choice and the best of the replay, on all
prompts several times, in turns. Asked: 0.98 of the best of them, and never behind "auto".
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
from benchmarks.pairs import synthetic
from benchmarks.prompts import humaneval
from benchmarks.report import markdown
from outrider.cli.options import own_draft
from outrider.drafters.method import TuneInputs
from outrider.models.load import Loaded, load
from outrider_lab.bench import stats
from outrider_lab.bench.prompts import Prompt
from outrider_lab.cli.tune import candidates
from outrider_lab.tune.race import Candidate, Racer
from outrider_lab.tune.search import Search

RIVALS = 4  # settings of the replay that race beside tune's choice
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


def compare(
    target: Loaded, workload: str, prompts: int, tokens: int, repeats: int, seconds: float, draft: str | None
) -> dict[str, Any]:
    """One workload: tune, then the race."""
    read, temperature = prompts_of(workload, target.tokenizer, prompts)
    sampling = {"temperature": temperature, "max_tokens": tokens, "seed": 0, "ignore_eos": True}
    start = perf_counter()
    methods = candidates(TuneInputs(target.weights, draft or own_draft(target.name), mtp=target.has_mtp), None)
    search = Search(
        Racer(target, sampling),
        read,
        methods,
        whole={"method": "auto"} | ({"model": draft} if draft else {}),
        seconds=seconds,
    )
    for _ in search.run():
        pass
    tuning, chosen = perf_counter() - start, search.answer
    rest = [c for c in search.candidates if c not in (chosen, search.plain, search.default)]
    wanted = dict.fromkeys([search.plain, search.default, chosen, *rest[:RIVALS]])
    race = {c.name: Candidate(c.name, c.config, c.drafters, c.length, c.predicted) for c in wanted if c is not None}
    for repeat in range(repeats):
        search.racer.reset([*race.values()])
        for prompt in read:
            search.racer.race([*race.values()], prompt, repeat)
    plain, ours = race[search.plain.name], race[chosen.name]
    best = max(race.values(), key=lambda c: c.speed)
    found = stats.ratio(ours.samples, best.samples) if best is not ours else None
    over = (1.0, 1.0, 1.0) if found is None else (found.value, found.low, found.high)
    return {
        "workload": workload, "prompts": prompts, "repeats": repeats, "settings": len(search.candidates),
        "chosen": chosen.name, "best": best.name,
        "over_best": round(over[0], 3), "low": round(over[1], 3), "high": round(min(over[2], 99.0), 3),
        "over_auto": round(ours.speed / race["auto"].speed, 3) if "auto" in race else None,
        "tune_seconds": round(tuning, 1), "over_plain": round(best.speed / plain.speed, 3),
        "predicted": round(chosen.predicted or 0.0, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned", description=headline(__doc__))
    parser.add_argument("--model", help="default: builtin:code at the cost of 160 million weights")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="that tune may measure for")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draft = None if args.model else "builtin:code-draft"
    args.model = args.model or str(synthetic("160M"))
    today, records = datetime.now(UTC).date().isoformat(), list[dict[str, Any]]()
    out, target = args.out or RESULTS / f"{today}-tuned.json", load(args.model, device="cpu")
    if out.exists():  # workloads may be measured one by one
        old = json.loads(out.read_text(encoding="utf-8"))["workloads"]
        records = [r for r in old if r["workload"] not in args.workloads]
    for workload in args.workloads:
        records.append(compare(target, workload, args.prompts, args.tokens, args.repeats, args.seconds, draft))
        print(records[-1], flush=True)
        made = {"date": today, "machine": machine.facts(), "model": args.model}
        out.write_text(json.dumps({**made, "workloads": records}, indent=1) + "\n", encoding="utf-8")
    print(table(records))
    print(f"written to {out}")


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: a workload a line."""
    head = [
        "",
        "tune's choice",
        "best of the race",
        "choice / best",
        "95 %",
        "choice / auto",
        "seconds",
        "best / plain",
    ]
    body = [
        [r["workload"], r["chosen"], r["best"], f"{r['over_best']:.3f}", f"{r['low']:.3f}-{r['high']:.3f}",
         "" if r["over_auto"] is None else f"{r['over_auto']:.3f}", f"{r['tune_seconds']:.0f}", f"{r['over_plain']:.2f}"]
        for r in records
    ]  # fmt: skip
    return markdown(head, body)


if __name__ == "__main__":
    main()
