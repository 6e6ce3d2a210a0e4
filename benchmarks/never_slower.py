"""Never slower: controllers with drafters that cannot help, against plain decoding, on a model worth speeding up.

    python -m benchmarks.never_slower                                       builtin:code-160M, some minutes
    python -m benchmarks.never_slower --cases wrong noisy --pairs 2 --tokens 512

Each case is measured in pairs A B, B A: a text of plain decoding and the same text with the controller, after the first 256
tokens of each, which are where probing is paid for. Asked: 0.98 of plain. `whole` counts the first 256 tokens too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import RESULTS, headline, machine
from benchmarks.report import markdown
from outrider.calibrate import calibrated
from outrider.config import SpeculativeConfig
from outrider.decode import Decoder, Request
from outrider.drafters.base import Drafter, NoDraft, Noisy, Wrong
from outrider.drafters.model import ModelDrafter
from outrider.llm import costs_of
from outrider.measure.stats import interval
from outrider.models.load import Loaded, load
from outrider.params import SamplingParams
from outrider.tune import Adaptive, Calibrated, Controller
from outrider.types import Budget

FIRST, LENGTH, LIMIT = 256, 2048, Budget(8)
PROMPT = '"""Tools for reading and writing tables."""\n\nimport csv\n\n\ndef read_table(path):\n'


def cases(target: Loaded, draft: str) -> dict[str, tuple[float, Callable[[int], Drafter]]]:
    """Temperature and maker of each drafter, by name."""
    small, size = load(draft, device="cpu").model, target.model.vocab_size
    return {
        "wrong": (0.0, lambda rows: Wrong()),
        "noisy": (0.0, lambda rows: Noisy(ModelDrafter(small, rows, LENGTH), 0.1, size)),
        "as large": (0.0, lambda rows: ModelDrafter(target.model, rows, LENGTH)),
        "temperature 2": (2.0, lambda rows: ModelDrafter(small, rows, LENGTH)),
    }


def write(decoder: Decoder, prompt: list[int], temperature: float, seed: int, tokens: int) -> tuple[float, float]:
    """Seconds per token after the first ones, and of all."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    row = decoder.admit(Request(seed, prompt, params, seed))
    while decoder.waiting:
        decoder.prefill(row)
    start, middle, at = perf_counter(), 0.0, 0
    while row.end is None:
        decoder.round([row])
        if not at and len(row.output) >= FIRST:
            middle, at = perf_counter(), len(row.output)
    end = perf_counter()
    decoder.release(row.slot)
    return (end - middle) / (tokens - at), (end - start) / tokens


def measure(
    target: Loaded, controller: Controller, drafter: Drafter, temperature: float, pairs: int, tokens: int
) -> dict[str, Any]:
    """Pairs in turns. A new text has a new seed and, as at a server, the controller that has seen the ones before."""
    assert target.tokenizer is not None
    prompt = target.tokenizer(PROMPT)["input_ids"]
    plain = Decoder(target.model, NoDraft(), rows=1, max_length=LENGTH)
    fast = Decoder(target.model, drafter, controller=controller, rows=1, max_length=LENGTH)
    write(plain, prompt, temperature, 0, FIRST + 8)
    rows = list[tuple[float, float, float, float]]()
    for pair in range(pairs):
        first, second = (plain, fast) if pair % 2 == 0 else (fast, plain)
        took = {id(d): write(d, prompt, temperature, pair, tokens) for d in (first, second)}
        rows.append((*took[id(plain)], *took[id(fast)]))
    after = interval(np.array(rows), lambda t: t[..., 0] / t[..., 2])
    whole = sum(r[1] for r in rows) / sum(r[3] for r in rows)
    return {
        "after_256": round(after.value, 4), "low": round(after.low, 4), "high": round(min(after.high, 99.0), 4),
        "whole": round(whole, 4), "pairs": pairs, "plain_tokens_per_second": round(pairs / sum(r[1] for r in rows), 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.never_slower", description=headline(__doc__))
    parser.add_argument("--model", default="builtin:code-160M")
    parser.add_argument("--draft", default="builtin:code-draft")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--controllers", nargs="+", choices=("adaptive", "optimal"), default=["adaptive", "optimal"])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target, records = load(args.model, device="cpu"), list[dict[str, Any]]()
    today = datetime.now(UTC).date().isoformat()
    out = args.out or RESULTS / f"{today}-never-slower.json"
    for name, (temperature, make) in cases(target, args.draft).items():
        if args.cases and name not in args.cases:
            continue
        for kind in args.controllers:
            costs = None
            if kind == "optimal":
                names = {**costs_of(SpeculativeConfig.of(None), target), "draft": f"never_slower {name}"}
                costs = Calibrated(calibrated(target.model, make, names, LIMIT))
            found = measure(target, Adaptive(LIMIT, costs), make(1), temperature, args.pairs, args.tokens)
            records.append({"case": name, "controller": kind, **found})
            print(records[-1], flush=True)
            made = {"date": today, "machine": machine.facts(), "model": args.model, "tokens": args.tokens}
            out.write_text(json.dumps({**made, "cases": records}, indent=1) + "\n", encoding="utf-8")
    print(table(records))
    print(f"written to {out}")


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a line for each drafter and controller."""
    body = [
        [r["case"], r["controller"], f"{r['after_256']:.3f}", f"{r['low']:.3f}-{r['high']:.3f}", f"{r['whole']:.3f}"]
        for r in records
    ]
    return markdown(["drafter", "controller", "of plain, after 256 tokens", "95 %", "with the first 256"], body)


if __name__ == "__main__":
    main()
