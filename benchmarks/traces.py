"""Record what drafters would have proposed at every position of real texts, for replays without a clock.

    python -m benchmarks.traces record --target TARGET.gguf --draft DRAFT.gguf --part held --out FILE
    python -m benchmarks.traces record --target builtin:smollm2-135m --method eagle --draft HEAD --part ours --out FILE

The part `held` is what replays are judged by, the part `ours` is what its constants were set on. No text is in both.
A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import DATA, headline
from benchmarks.edits import edits
from benchmarks.prompts import humaneval
from benchmarks.real.texts import CODE, EDIT
from benchmarks.recorded_texts import read, save
from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters import make_drafter
from outrider.drafters.config import SpeculativeConfig
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.models.load import load
from outrider_lab.tune.recorded import DraftRecorder, record

LENGTH, TOGETHER = 2048, 8
LOOKUPS = ("suffix",)
COPIES = ("edit", "retrieval", "summaries")  # kinds whose answers copy their prompts: a prior must not promise that
KEPT, TRIES, STOP = 150, 20, 0.5  # chains of a kind, pseudo-tries of a cell, and the survival at which a chain ends


def prompts(part: str) -> list[tuple[str, str]]:
    """(kind, prompt) of a part: five each of seven kinds for `held`, five to seven for `ours`."""
    spec = [json.loads(line) for line in (DATA / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()]
    chat = [json.loads(line)["prompt"] for line in (DATA / "chat.jsonl").read_text(encoding="utf-8").splitlines()]
    maths = [json.loads(line)["question"] for line in (DATA / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()]
    code = [CODE.format(prompt) for prompt in humaneval(12)]
    changed = [EDIT.format(e.before, e.asked) for e in edits(12, size=900)]

    def of(category: str) -> list[str]:
        return [line["turns"][0] for line in spec if line["category"] == category]

    every = {
        "chat": chat,
        "maths": maths[:12],
        "code": code,
        "short": of("qa"),
        "edit": changed,
        "summaries": of("summarization"),
        "retrieval": of("rag"),
    }
    cut = slice(0, 5) if part == "held" else slice(5, 12)
    return [(kind, text) for kind, texts in every.items() for text in texts[cut]]


def requests(tokenizer: Any, part: str, temperature: float) -> list[tuple[str, Request]]:
    """The requests of a part, with the chat template if there is one."""
    found = list[tuple[str, Request]]()
    for at, (kind, text) in enumerate(prompts(part)):
        if getattr(tokenizer, "chat_template", None):
            asked = [{"role": "user", "content": text}]
            ids = list(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"])
        else:
            ids = list(tokenizer(text)["input_ids"])
        limit = 128 if kind == "edit" else 96
        if len(ids) + limit < LENGTH:
            found.append((kind, Request(at, ids, SamplingParams(temperature=temperature, max_tokens=limit), 11 + at)))
    return found


def record_all(options: argparse.Namespace) -> None:
    target, method = load(options.target, device="cpu"), options.method
    given = {"model": options.draft} if options.draft else {}
    configs = {method: {"method": method, **given}, "suffix": {"method": "suffix", "suffix_shared_tokens": 0}}
    made = {
        name: make_drafter(SpeculativeConfig.of(config), target, num_slots=TOGETHER, max_length=LENGTH, device="cpu")
        for name, config in configs.items()
    }
    have = read(options.out) if options.out.exists() else []
    known = {(text.temperature, tuple(text.prompt)) for text in have}
    for temperature in options.temperatures:
        left = [
            pair
            for pair in requests(target.tokenizer, options.part, temperature)
            if (temperature, tuple(pair[1].prompt)) not in known
        ]
        while left:
            some, left = left[:TOGETHER], left[TOGETHER:]
            recorder = DraftRecorder(made, LOOKUPS)
            decoder = Decoder(
                target.model,
                recorder,
                controller=Fixed(16),
                num_slots=TOGETHER,
                max_length=LENGTH,
                end_ids=target.end_ids,
                tokenizer=target.tokenizer,
            )
            have += record(decoder, recorder, some)
            save(have, options.out)
            print(f"{len(have)} texts, {len(left)} left at T={temperature:g}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description=headline(__doc__))
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("record", help="record a pair")
    one.add_argument("--target", required=True)
    one.add_argument("--draft")
    one.add_argument("--method", default="draft_model")
    one.add_argument("--part", choices=("held", "ours"), required=True)
    one.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(run=record_all)
    options = parser.parse_args(words)
    options.run(options)


if __name__ == "__main__":
    main()
