"""Every drafter on every kind of text: acceptance length, tokens/s, speed-up and efficiency.

    python -m benchmarks.workloads                                  0.5B and 1.1B, bfloat16: about half an hour
    python -m benchmarks.workloads --sizes 0.5B --workloads code edits --temperatures 0 --prompts 1

The targets are the built-in model inflated (benchmarks.inflate), the draft model is the built-in draft as trained. Workloads:
`code` (HumanEval), four categories of Spec-Bench, and `edits` (benchmarks.edits: the answer is forced, the forwards are
paid). For each prompt plain decoding and the methods take turns; texts are the same under all of them, which is checked.
Drafters see their own request alone; `auto` keeps what its controller has learned of costs, as it would in use.
efficiency: time of the two models' forwards over the whole time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import DATA, RESULTS, headline, machine
from benchmarks.edits import ForcedTarget, edit_workload
from benchmarks.pairs import PRECISIONS, pair
from benchmarks.prompts import humaneval
from benchmarks.report import markdown
from outrider.config import SpeculativeConfig
from outrider.decode import Decoder, Request
from outrider.drafters import make_drafter
from outrider.models.load import Loaded, load
from outrider.params import SamplingParams
from outrider.tune import Adaptive, Controller, Fixed

LENGTH = 2048
LONGER = 4  # times the tokens of the others: the answer to an edit is a file
CATEGORIES = ("translation", "summarization", "qa", "rag")
WORKLOADS = ("code", *CATEGORIES, "edits")

# what is compared; the draft's folder is filled in. Lengths are what pays on two cores, found by trying.
METHODS: dict[str, dict[str, Any]] = {
    "draft_model, chain 4": {"method": "draft_model", "num_speculative_tokens": 4},
    "draft_model, tree 8": {"method": "draft_model", "num_speculative_tokens": 5, "tree_width": 4, "tree_nodes": 8},
    "quantized_self 3": {"method": "quantized_self", "num_speculative_tokens": 3},
    "suffix 16": {"method": "suffix", "num_speculative_tokens": 16},
    "ngram 8": {"method": "ngram", "num_speculative_tokens": 8},
    "token_recycling, tree 8": {"method": "token_recycling", "num_speculative_tokens": 4, "tree_width": 4, "tree_nodes": 8},
    "prediction 16": {"method": "prediction", "num_speculative_tokens": 16},
    "auto": {"method": "auto", "num_speculative_tokens": 16},
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A prompt; answer: what a forced target writes, None where the model writes itself; prediction: of the answer."""

    prompt: list[int]
    answer: list[int] | None = None
    prediction: tuple[int, ...] = ()


def texts(workload: str, tokenizer: Any, count: int) -> list[Text]:
    """The first `count` texts of a workload."""
    if workload == "code":
        return [Text(tokenizer(p)["input_ids"]) for p in humaneval(count)]
    if workload == "edits":
        work = edit_workload(tokenizer, count)
        return [Text(p, a, tuple(tokenizer(t, add_special_tokens=False)["input_ids"])) for p, a, t in work]
    lines = (DATA / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()
    found = [r["turns"][0] for r in map(json.loads, lines) if r["category"] == workload][:count]
    if len(found) < count:
        raise ValueError(f"there are {len(found)} prompts of {workload!r}, asked for {count}; see {WORKLOADS}")
    return [Text(tokenizer(p)["input_ids"]) for p in found]


class Runner:
    """One target, and a decoder for each method, made when it is first asked for."""

    def __init__(self, target: Loaded, draft: str) -> None:
        self.target, self.draft = target, draft
        self.forced = ForcedTarget(target.model)
        self._made: dict[tuple[str, bool], Decoder] = {}

    def decoder(self, method: str, forced: bool) -> Decoder:
        if (method, forced) not in self._made:
            given = {} if method == "plain" else {**METHODS[method], "suffix_shared_tokens": 0}
            if given.get("method") in ("draft_model", "auto"):
                given["model"] = self.draft
            config = SpeculativeConfig.of(given)
            drafter = make_drafter(config, self.target, rows=1, max_length=LENGTH, device="cpu")
            controller: Controller = Adaptive(config.budget) if method == "auto" else Fixed(*config.budget.parts)
            model = self.forced if forced else self.target.model
            self._made[method, forced] = Decoder(model, drafter, controller=controller, rows=1, max_length=LENGTH)
        return self._made[method, forced]

    def run(self, method: str, text: Text, tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        decoder = self.decoder(method, text.answer is not None)
        if text.answer is not None:
            self.forced.text, tokens = text.prompt + text.answer, min(LONGER * tokens, len(text.answer))
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        row = decoder.admit(Request(0, text.prompt, params, seed, prediction=text.prediction))
        out: dict[str, Any] = {"steps": 0, "drafted": 0, "seconds": 0.0, "forwards": 0.0}
        while row.end is None:
            reading, started = bool(decoder.waiting), perf_counter()
            step = decoder.step()
            if step is None:
                continue
            spent = sum(step.seconds.values())
            out["steps"] += 1
            out["drafted"] += int(step.draft.drafted)
            out["seconds"] += spent if reading else perf_counter() - started
            out["forwards"] += step.seconds["draft"] + step.seconds["target"]
        decoder.release(row.slot)
        return {**out, "text": row.output}


def measure(
    runner: Runner, workload: str, methods: Sequence[str], count: int, tokens: int, temperature: float
) -> Iterator[dict[str, Any]]:
    """A record per method. For each prompt all of them take turns, twice, and each is taken at its faster turn: what else
    the machine does can only add."""
    runs: dict[str, list[dict[str, Any]]] = {m: [] for m in ("plain", *methods)}
    differing = 0
    for seed, text in enumerate(texts(workload, runner.target.tokenizer, count)):
        turns = [{m: runner.run(m, text, tokens, temperature, seed) for m in runs} for _ in range(2)]
        for method, done in runs.items():
            done.append(min((turn[method] for turn in turns), key=lambda r: r["seconds"]))
            differing += sum(turn[method]["text"] != turns[0]["plain"]["text"] for turn in turns)
    base = sum(r["seconds"] for r in runs["plain"])
    for method, done in runs.items():
        total = {k: sum(r[k] for r in done) for k in ("steps", "drafted", "seconds", "forwards")}
        written = sum(len(r["text"]) for r in done)
        yield {
            "workload": workload, "temperature": temperature, "method": method,
            "tokens_per_second": round(written / total["seconds"], 2),
            "speedup": round(base / total["seconds"], 3),
            "acceptance_length": round(written / total["steps"], 3),
            "drafted_per_step": round(total["drafted"] / total["steps"], 2),
            "efficiency": round(total["forwards"] / total["seconds"], 3),
            "tokens": written, "differing_texts": differing if method == "plain" else None,
        }  # fmt: skip


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: a method a line, a workload and temperature a column; times plain decoding, and the acceptance length."""
    columns = list(dict.fromkeys((r["workload"], r["temperature"]) for r in records))
    cells = {(r["method"], r["workload"], r["temperature"]): r for r in records}
    names = list(dict.fromkeys(r["method"] for r in records))
    body = [[name, *(_cell(cells.get((name, *c))) for c in columns)] for name in names]
    return markdown(["", *(f"{w}, T={t:g}" for w, t in columns)], body)


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    if record["method"] == "plain":
        return f"{record['tokens_per_second']:.1f} tokens/s"
    return f"{record['speedup']:.2f} ({record['acceptance_length']:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workloads", description=headline(__doc__))
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "1.1B"])
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--source", default="builtin:code")
    parser.add_argument("--draft", default="builtin:code-draft")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    today, how = datetime.now(UTC).date().isoformat(), PRECISIONS[args.precision]
    out = args.out or RESULTS / f"{today}-workloads.json"
    result: dict[str, Any] = {"date": today, "machine": machine.facts(), "precision": args.precision, "sizes": {}}
    if out.exists() and (old := json.loads(out.read_text(encoding="utf-8")))["precision"] == args.precision:
        result["sizes"] = old["sizes"]  # sizes may be measured one by one
    for size in args.sizes:
        models = pair(size, how["stored"], args.source, trained=args.draft)
        target = load(str(models.target), dtype=how["dtype"], device="cpu", quantization=how["quantization"])
        runner, records = Runner(target, str(models.drafts["trained"])), []
        for workload in args.workloads:
            for temperature in args.temperatures if workload != "edits" else [0.0]:
                for record in measure(runner, workload, args.methods, args.prompts, args.tokens, temperature):
                    records.append(record)
                    print({k: v for k, v in record.items() if k != "tokens"}, file=sys.stderr, flush=True)
        result["sizes"][size] = records
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # a run that is cut off keeps what it has
        print(f"\n{size} {args.precision}: times plain decoding (acceptance length)\n")
        print(table(records))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
