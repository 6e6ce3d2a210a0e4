"""What a draft model's precision and the tokens of its head cost, and what they are worth.

    python -m benchmarks.draft_vocab --target big.gguf --draft small.gguf
    python -m benchmarks.draft_vocab --target big --draft small --quantizations none int8 int4 --sizes 0

The target writes each text once. Under `match` it is the text of every draft model, so the drafts are then compared along the
same text without the target's steps. They take turns step by step, and a forward of the target over as many tokens as a step
has takes its turn, too. Sizes are tokens of the head; 0 is the whole vocabulary. Times are means over steps. The last column
is tokens for the time of draft and target, over the first row's.
"""

from __future__ import annotations

import argparse
import json
from collections import abc
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks import RESULTS, headline
from benchmarks.known_text import KnownTextTarget
from benchmarks.real.texts import texts
from benchmarks.report import markdown
from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters.model.draft_model import DraftReduction, ModelDrafter
from outrider.engine.decoder import Decoder
from outrider.engine.llm import LLM
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.models.load import Loaded, load
from outrider.models.nodes import Nodes

LENGTH = 2048
WORKLOADS = ("code", "chat", "summary", "translation")


class Row:
    """One draft model: a row of the table."""

    def __init__(
        self, draft: str, quantization: str, size: int, corpus: list[str] | None, target: Loaded, depth: int
    ) -> None:
        given = quantization if quantization in ("int8", "int4") else None
        reduce = DraftReduction(quantization == "auto", size, corpus if size else None)
        self.loaded = load(draft, quantization=given, reduce=reduce)
        self.name = f"{self.loaded.weights}, {size or 'all'}"
        self.known = KnownTextTarget(target.model)
        drafter = ModelDrafter(self.loaded.model, 1, LENGTH)
        self.decoder = Decoder(self.known, drafter, controller=Fixed(depth), num_slots=1, max_length=LENGTH)
        self.accepted: dict[tuple[str, float], list[int]] = {}
        self.seconds: list[float] = []

    def admit(self, request: Request, text: list[int]) -> None:
        self.known.text = text
        left = replace(request.params, max_tokens=len(text) - len(request.prompt), ignore_eos=True)
        self.row = self.decoder.start(Request(request.id, request.prompt, left, request.seed))
        for _ in self.decoder.run([self.row], 0):  # reads the prompt
            pass

    def step(self, key: tuple[str, float], depth: int) -> bool:
        """One step, unless the text has ended. Steps at its end, with shorter drafts, are not counted."""
        if self.row.finish is not None:
            return False
        first = not self.row.output
        step = next(self.decoder.run([self.row]))
        if step.budgets[0].depth == depth and not first:  # the first step reads the prompt
            self.accepted.setdefault(key, []).append(int(step.verdict.accepted[0]))
            self.seconds.append(step.seconds["draft"])
        if self.row.finish is not None:
            self.decoder.release(self.row.slot)
        return True


def written(target: Loaded, row: Row, request: Request, depth: int) -> list[int]:
    """Prompt and answer: the text that plain decoding writes."""
    decoder = Decoder(target.model, row.decoder.drafter, controller=Fixed(depth), num_slots=1, max_length=LENGTH,
                      end_ids=target.end_ids)  # fmt: skip
    [made] = Scheduler(decoder, raises=True).generate([request])
    return made.tokens


def forward(target: Loaded, tokens: int) -> float:
    """Seconds of one forward."""
    cache, ids = target.model.new_cache(1, 64), torch.arange(5, 5 + tokens)[None]
    began = perf_counter()
    target.model.forward(Nodes(ids, cache, [0]))
    return perf_counter() - began


def table(rows: abc.Sequence[Row], seconds: abc.Sequence[float]) -> tuple[list[dict[str, Any]], str]:
    """The records, and a Markdown table of them."""
    target, records = float(np.mean(seconds)), list[dict[str, Any]]()
    for row in rows:
        lengths = {f"{work}, T={heat:g}": 1 + float(np.mean(a)) for (work, heat), a in row.accepted.items()}
        steps = [a for found in row.accepted.values() for a in found]
        draft, length = float(np.mean(row.seconds)), 1 + float(np.mean(steps))
        record = {"draft": row.name, "bytes": row.loaded.model.weight_bytes, "draft_seconds": draft,
                  "target_seconds": target, "tokens_a_step": lengths, "steps": len(steps),
                  "length": length, "pace": length / (draft + target)}  # fmt: skip
        records.append(record)
    first = records[0]
    head = ["weights, tokens of the head", "MB read", "draft, ms", *first["tokens_a_step"], "speed"]
    body = [
        [r["draft"], f"{r['bytes'] / 1e6:.0f}", f"{1000 * r['draft_seconds']:.1f}",
         *(f"{n:.2f}" for n in r["tokens_a_step"].values()), f"{r['pace'] / first['pace']:.3f}"]
        for r in records
    ]  # fmt: skip
    return records, markdown(head, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target-quantization")
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 8192, 16384, 32768, 65536])
    parser.add_argument("--quantizations", nargs="+", default=["none"], choices=["none", "int8", "int4", "auto"])
    parser.add_argument("--corpus", nargs="+", help="files and folders in which tokens are counted")
    parser.add_argument("--workloads", nargs="+", default=["code", "chat"], choices=WORKLOADS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = load(args.target, quantization=args.target_quantization)
    rows = [
        Row(args.draft, quantization, size, args.corpus, target, args.depth)
        for quantization in args.quantizations
        for size in args.sizes
    ]
    llm, seconds = LLM(target), list[float]()
    chat = bool(getattr(target.tokenizer, "chat_template", None))
    for work in args.workloads:
        for number, prompt in enumerate(texts(work, chat, args.texts)):
            for heat in args.temperatures:
                params = SamplingParams(temperature=heat, max_tokens=args.tokens)
                request = Request(number, llm.encode(prompt.content), params, seed=number)
                text = written(target, rows[0], request, args.depth)
                for row in rows:
                    row.admit(request, text)
                while sum(row.step((work, heat), args.depth) for row in rows):
                    seconds.append(forward(target, args.depth + 1))
            print(table(rows, seconds)[1], flush=True)
    records, shown = table(rows, seconds)
    print(shown)
    today = datetime.now(UTC).date().isoformat()
    out = args.out or RESULTS / f"{today}-draft-vocab.json"
    told = {k: v for k, v in vars(args).items() if k != "out"}
    told |= {key: Path(told[key]).name for key in ("target", "draft")}
    told["corpus"] = [Path(path).name for path in args.corpus or ()]
    out.write_text(json.dumps({"date": today, **told, "draft_vocab": records}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
