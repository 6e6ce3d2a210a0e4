"""Drafts with a tokenizer of their own: how many tokens are accepted by either way, beside a draft that shares the target's.

    python -m benchmarks.vocabularies --draft work/other/draft/model    temperatures 0 and 1, HumanEval prompts
    python -m benchmarks.vocabularies --draft ... --prompts 4 --tokens 64   shorter

recipes/README.md has the commands that make such a draft. Counts, no times: under `match` the ways write the same text, so
they are compared at the same positions; `rejection` keeps the law and writes its own.
"""

from __future__ import annotations

import argparse
import json
from collections import abc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS, headline
from benchmarks.prompts import humaneval
from benchmarks.report import markdown
from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.model.cross_tokenizer import CrossTokenizerDrafter, Way
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.vocabulary import Pairing, Vocabulary
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.models.load import Loaded, load

LENGTH = 1024


def pairing(draft: Loaded, target: Loaded) -> Pairing:
    return Pairing(*(Vocabulary(x.tokenizer, x.model.vocab_size, x.end_ids) for x in (target, draft)))


def arms(draft: Loaded, own: Loaded | None, both: Pairing) -> dict[str, tuple[Callable[[], Drafter], str]]:
    """By name: how the drafter is made, and the verifier. own: a draft that shares the target's tokenizer."""

    def translated(way: Way | None) -> Callable[[], Drafter]:
        return lambda: CrossTokenizerDrafter(draft.model, both, 1, way)

    found: dict[str, tuple[Callable[[], Drafter], str]] = {
        "tli, match": (translated("tli"), "match"),
        "slem, match": (translated("slem"), "match"),
        "by temperature, match": (translated(None), "match"),
        "tli, rejection": (translated("tli"), "rejection"),
        "slem, rejection": (translated("slem"), "rejection"),
    }
    if own is not None:
        model = own.model
        found["same tokenizer, match"] = (lambda: ModelDrafter(model, 1, LENGTH), "match")
        found["same tokenizer, rejection"] = (lambda: ModelDrafter(model, 1, LENGTH), "rejection")
    return found


def run(
    name: str, made: tuple[Callable[[], Drafter], str], target: Loaded, prompts: abc.Sequence[list[int]], depth: int,
    tokens: int, temperature: float,
) -> dict[str, Any]:  # fmt: skip
    drafter, verifier = made[0](), made[1]
    engine = Decoder(target.model, drafter, verifier, Fixed(depth), num_slots=1, max_length=LENGTH)
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    requests = [Request(n, list(p), params, seed=n) for n, p in enumerate(prompts)]
    scheduler = Scheduler(engine, raises=True)
    steps = [s for s, _ in scheduler.run(scheduler.add(requests)) if s is not None and s.budgets[0].depth == depth]
    accepted = [int(s.verdict.accepted[0]) for s in steps]
    drafted = [int(s.draft.num_draft_tokens[0]) for s in steps]
    return {
        "arm": name, "temperature": temperature, "depth": depth, "accepted": float(np.mean(accepted)),
        "error": float(np.std(accepted) / len(accepted) ** 0.5), "drafted": float(np.mean(drafted)),
        "first": float(np.mean([a > 0 for a in accepted])), "steps": len(steps), "why": getattr(drafter, "why", ""),
    }  # fmt: skip


def table(records: abc.Sequence[dict[str, Any]]) -> str:
    """Markdown: an arm a line; for each temperature the chance that the first guess stands, and accepted tokens per step."""
    found = {(r["arm"], r["temperature"]): r for r in records}
    heats = sorted({r["temperature"] for r in records})
    head = ["", *(f"T={t:g}: {what}" for t in heats for what in ("first guess stands", "accepted per step"))]
    body = []
    for name in dict.fromkeys(r["arm"] for r in records):
        cells = [c for t in heats for c in _cells(found.get((name, t)))]
        body.append([name, *cells])
    return markdown(head, body)


def _cells(record: dict[str, Any] | None) -> tuple[str, str]:
    return ("", "") if record is None else (f"{record['first']:.0%}", f"{record['accepted']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("--target", default="builtin:code")
    parser.add_argument("--draft", required=True, help="a folder: a model with a tokenizer of its own")
    parser.add_argument("--own", default="builtin:code-draft", help="a draft that shares the tokenizer; '' for none")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target, draft = load(args.target, device="cpu"), load(args.draft, device="cpu")
    own = load(args.own, device="cpu") if args.own else None
    both = pairing(draft, target)
    assert target.tokenizer is not None and draft.tokenizer is not None  # noqa: PT018
    texts = humaneval(args.prompts)
    prompts = [target.tokenizer(p)["input_ids"] for p in texts]
    spelled = sum(len(draft.tokenizer(p)["input_ids"]) for p in texts) / sum(map(len, prompts))
    shared = len(both.shared) / (len(both.draft.ids) + len(both.draft.names))
    within = float(np.mean([t in both.shared for p in prompts for t in p]))
    print(f"{shared:.0%} of the draft's {draft.model.vocab_size} tokens are shared, {within:.0%} of those that the "
          f"prompts are made of; the draft spells them in {spelled:.2f} times as many")  # fmt: skip
    records = []
    for t in args.temperatures:
        for name, made in arms(draft, own, both).items():
            if t > 0 or made[1] == "match":
                records.append(run(name, made, target, prompts, args.depth, args.tokens, t))
                r = records[-1]
                print(f"T={t} {name:28} {r['first']:.3f} {r['accepted']:.3f} ± {r['error']:.3f} "
                      f"({r['drafted']:.1f} drafted) {r['why']}", flush=True)  # fmt: skip
    print(table(records))
    today = datetime.now(UTC).date().isoformat()
    out = args.out or RESULTS / f"{today}-vocabularies.json"
    made = {"date": today, "target": args.target, "depth": args.depth, "tokens": args.tokens, "prompts": args.prompts,
            "coverage": shared, "within": within, "spelled": spelled}  # fmt: skip
    out.write_text(json.dumps({**made, "vocabularies": records}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
