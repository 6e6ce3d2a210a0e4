"""Every drafter on every kind of text: acceptance length, tokens/s, speed-up and efficiency.

    python -m benchmarks.workloads       0.5B and 1.1B, bfloat16: some three hours; columns may be measured one by one:
    python -m benchmarks.workloads --sizes 0.5B --workloads code edits --temperatures 0 --prompts 1
    python -m benchmarks.workloads --sizes 1.1B:6 --workloads code  the 1.1B shape with six layers, for layer_skip

The targets are the built-in model inflated (benchmarks.inflate), the draft model is the built-in draft as trained. Workloads:
`code` (HumanEval), four categories of Spec-Bench, and `edits` (benchmarks.edits: the answer is forced, the forwards are
paid). For each prompt plain decoding and the methods take turns, a few tokens each (outrider_lab.tune.race), after a text
that warms up and is not counted; texts are the same under all of them, which is checked. Drafters see their own request alone.
`auto` measures costs for a second, as it does when an LLM is first made, and keeps what its planner learns. efficiency: time of
the two models' forwards over the whole time. Only edits come with a prediction. layer_skip drafts with the layers that a search
finds on other HumanEval prompts, and only where the target has no more layers than its source: those that inflation adds do
nothing, to skip them would be cheating.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, RESULTS, headline, machine
from benchmarks.edits import ForcedTarget, edit_workload
from benchmarks.pairs import PRECISIONS, pair, source_folder
from benchmarks.prompts import humaneval
from benchmarks.report import markdown
from benchmarks.stretches import TimedRun, interleave
from outrider.control import Fixed
from outrider.core.intervals import interval
from outrider.core.params import SamplingParams
from outrider.drafters import NoDraft, make_drafters
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.model.self_speculation import LayerSearch, search_layers
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.engine.runtime import build
from outrider.models.load import Loaded, load

LENGTH = 2048
LONGER = 4  # times the tokens of the others: the answer to an edit is a file
CATEGORIES = ("translation", "summarization", "qa", "rag")
WORKLOADS = ("code", *CATEGORIES, "edits")

# what is compared; the draft's folder is filled in. Lengths are what pays on two cores, found by trying.
METHODS: dict[str, dict[str, Any]] = {
    "draft_model, chain 4": {"method": "draft_model", "num_speculative_tokens": 4},
    "draft_model, tree 8": {"method": "draft_model", "num_speculative_tokens": 5, "tree_width": 4, "tree_nodes": 8},
    "quantized_self 3": {"method": "quantized_self", "num_speculative_tokens": 3},
    "layer_skip": {"method": "layer_skip"},  # layers and length as searched
    "suffix 7": {"method": "suffix", "num_speculative_tokens": 7},
    "suffix 16": {"method": "suffix", "num_speculative_tokens": 16},
    "ngram 8": {"method": "ngram", "num_speculative_tokens": 8},
    "token_recycling, tree 8": {"method": "token_recycling", "num_speculative_tokens": 4, "tree_width": 4, "tree_nodes": 8},
    "prediction 7": {"method": "prediction", "num_speculative_tokens": 7},
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

    @cached_property
    def layers(self) -> LayerSearch:
        """What to draft with, by prompts that are not measured."""
        ids = [text.prompt for text in texts("code", self.target.tokenizer, 24)[16:]]
        return search_layers(self.target.model, ids, progress=lambda line: print(line, file=sys.stderr, flush=True))

    def decoder(self, method: str, forced: bool) -> Decoder:
        if (method, forced) not in self._made:
            given = {} if method == "plain" else {**METHODS[method], "suffix_shared_tokens": 0}
            if given.get("method") in ("draft_model", "auto"):
                given["model"] = self.draft
            if given.get("method") == "layer_skip":
                given |= {"layers": self.layers.layers, "num_speculative_tokens": self.layers.depth}
            config = SpeculativeConfig.of(given)
            roster = None
            if method == "auto":
                roster = build(self.target, config, num_slots=1, max_length=LENGTH, device="cpu").roster
            if roster is not None:
                drafter, controller = roster, roster.planner
            else:
                drafters = make_drafters(config, self.target, num_slots=1, max_length=LENGTH, device="cpu")
                drafter, controller = next(iter(drafters.values()), NoDraft()), Fixed(*config.budget.parts)
            model = self.forced if forced else self.target.model
            self._made[method, forced] = Decoder(model, drafter, controller=controller, num_slots=1, max_length=LENGTH)
        return self._made[method, forced]

    def run(
        self, methods: abc.Sequence[str], text: Text, tokens: int, temperature: float, seed: int
    ) -> Mapping[str, TimedRun]:
        forced = text.answer is not None
        if text.answer is not None:
            self.forced.text, tokens = text.prompt + text.answer, min(LONGER * tokens, len(text.answer))
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        request = Request(0, text.prompt, params, seed, prediction=text.prediction)
        return interleave({m: TimedRun(self.decoder(m, forced), request) for m in methods})


def measure(
    runner: Runner, workload: str, methods: abc.Sequence[str], count: int, tokens: int, temperature: float
) -> Iterator[dict[str, Any]]:
    """A record per method: speed against plain decoding's, with its interval of 95 % over the stretches of all texts; for
    `auto` also against the fastest single method, plain decoding among them."""
    names, work = ["plain", *methods], texts(workload, runner.target.tokenizer, count)
    runner.run(names, work[-1], tokens // 2, temperature, count)  # a warm-up
    runs = [runner.run(names, text, tokens, temperature, seed) for seed, text in enumerate(work)]
    differing = sum(done[m].row.output != done["plain"].row.output for done in runs for m in methods)
    taken = {m: np.array([s for done in runs for s in done[m].seconds]) for m in names}
    single = fastest({m: taken[m] for m in names if m != "auto"})
    for method in names:
        done = [d[method] for d in runs]
        steps, seconds = sum(d.steps for d in done), sum(d.total for d in done)
        written = sum(len(d.row.output) for d in done)
        yield {
            "workload": workload, "temperature": temperature, "method": method,
            "tokens_per_second": round(written / seconds, 2),
            **against("speedup", taken["plain"], taken[method]),
            **(against("over_best", single, taken[method]) if method == "auto" else {}),
            "acceptance_length": round(written / steps, 3),
            "drafted_per_step": round(sum(d.drafted for d in done) / steps, 2),
            "efficiency": round(sum(d.forwards for d in done) / seconds, 3),
            "texts": count, "tokens": written, "differing_texts": differing if method == "plain" else None,
        }  # fmt: skip


def fastest(taken: dict[str, Any]) -> Any:
    """Seconds of the best single method, stretch by stretch. The smallest of many noisy sums flatters its owner, so each half of
    the stretches (by fours, in turns) counts for the method that is fastest on the other half."""
    halves = np.arange(len(next(iter(taken.values())))) // 4 % 2
    best = np.empty(len(halves))
    for half in (0, 1):
        method = min(taken, key=lambda m: taken[m][halves != half].sum())
        best[halves == half] = taken[method][halves == half]
    return best


def against(name: str, base: Any, ours: Any) -> dict[str, Any]:
    """How many times faster, and the interval of 95 %; stretches are resampled by fours, as neighbours resemble each other."""
    sums = np.add.reduceat(np.stack([base, ours], axis=1), np.arange(0, len(base), 4))
    found = interval(sums)
    return {name: round(found.value, 3), f"{name}_95": [round(found.low, 3), round(min(found.high, 99.0), 3)]}


def table(records: abc.Sequence[dict[str, Any]]) -> str:
    """Markdown: a method a line, a workload and temperature a column; times plain decoding (acceptance length, efficiency)."""
    columns = sorted({(r["workload"], r["temperature"]) for r in records}, key=lambda c: (WORKLOADS.index(c[0]), c[1]))
    cells = {(r["method"], r["workload"], r["temperature"]): r for r in records}
    made = {r["method"] for r in records}
    names = [name for name in ("plain", *METHODS) if name in made]
    body = [[name, *(_cell(cells.get((name, *c))) for c in columns)] for name in names]
    if "auto" in names:
        body.append(["auto over the best single one", *(_over(cells.get(("auto", *c))) for c in columns)])
    body.append(["texts x tokens", *(_length(cells["plain", *c]) for c in columns)])
    return markdown(["", *(f"{w}, T={t:g}" for w, t in columns)], body)


def _layers(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    if record["method"] == "plain":
        return f"{record['tokens_per_second']:.1f} tokens/s"
    return f"{record['speedup']:.2f} ({record['acceptance_length']:.1f}, {100 * record['efficiency']:.0f}%)"


def _over(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    low, high = record["over_best_95"]
    return f"{record['over_best']:.2f} ({low:.2f}-{high:.2f})"


def _length(record: dict[str, Any]) -> str:
    return (
        f"{record['texts']} x {record['tokens'] / record['texts']:.0f}" if "texts" in record else f"{record['tokens']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workloads", description=headline(__doc__))
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "1.1B"], help="1.1B:6: that shape, six layers")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--source", default="builtin:code")
    parser.add_argument("--draft", default="builtin:code-draft")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    today, how = datetime.now(UTC).date().isoformat(), PRECISIONS[args.precision]
    out = args.out or RESULTS / f"{today}-workloads.json"
    result: dict[str, Any] = {"date": today, "machine": machine.facts(), "targets": {}}
    if out.exists():  # columns may be measured one by one
        result["targets"] = json.loads(out.read_text(encoding="utf-8"))["targets"]
    for size in args.sizes:
        models = pair(size, how["stored"], args.source, trained=args.draft)
        target = load(str(models.target), dtype=how["dtype"], device="cpu", quantization=how["quantization"])
        runner = Runner(target, str(models.drafts["trained"]))
        bare = _layers(models.target) == _layers(source_folder(args.source))  # no layers that do nothing
        records = result["targets"].setdefault(f"{size} {args.precision}", [])
        for workload in args.workloads:
            without = () if workload == "edits" else ("prediction 7", "prediction 16")
            methods = [m for m in args.methods if m not in without and (bare or m != "layer_skip")]
            for temperature in args.temperatures if workload != "edits" else [0.0]:
                records[:] = [r for r in records if (r["workload"], r["temperature"]) != (workload, temperature)]
                for record in measure(runner, workload, methods, args.prompts, args.tokens, temperature):
                    records.append(record | {"commit": result["machine"]["commit"]})
                    print({k: v for k, v in record.items() if k != "tokens"}, file=sys.stderr, flush=True)
                # what is cut off keeps what it has
                out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\n{size} {args.precision}: times plain decoding (acceptance length, efficiency)\n")
        print(table(records))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
