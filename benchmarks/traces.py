"""Record what drafters would have proposed at every position of real texts, for replays without a clock.

    python -m benchmarks.traces record --target TARGET.gguf --draft DRAFT.gguf --part held --out FILE
    python -m benchmarks.traces record --target builtin:smollm2-135m --method eagle --draft HEAD --part ours --out FILE
    python -m benchmarks.traces priors sibling=FILE head=FILE small=FILE self=FILE

The part `held` is what replays are judged by, the part `ours` is what the priors of the package come from. No text is in both.
A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
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
from outrider.control.beliefs import PRIORS, match_cell
from outrider.core.params import SamplingParams
from outrider.drafters import make_drafter
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.model.confidence import SCALES
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.lab.tune.recorded import STATED, DraftRecorder, RecordedText, record
from outrider.models.load import load

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
        name: make_drafter(SpeculativeConfig.of(config), target, rows=TOGETHER, max_length=LENGTH, device="cpu")
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
                rows=TOGETHER,
                max_length=LENGTH,
                end_ids=target.end_ids,
                tokenizer=target.tokenizer,
            )
            have += record(decoder, recorder, some)
            save(have, options.out)
            print(f"{len(have)} texts, {len(left)} left at T={temperature:g}", file=sys.stderr, flush=True)


def make_priors(options: argparse.Namespace) -> None:
    """Write the priors that ship, from recordings of the part `ours`."""
    chains, cells = dict[str, list[list[int]]](), dict[tuple[int, int], list[int]]()
    for given in options.recordings:
        kind, _, path = given.partition("=")
        texts = read(Path(path))
        scale = fitted(texts)
        print(f"{kind}: the error of the logits is about {scale}", file=sys.stderr)
        chains[kind] = [
            [round(100 * at_scale(chance, scale)) for chance in chain]
            for text in texts
            for chain in taken(text, kind_name(text), scale)
        ]
        for text in texts:
            if text.kind not in COPIES and kind == "sibling":
                count(text, cells)
    for kind, every in chains.items():
        step = max(1, len(every) // KEPT)
        chains[kind] = every[::step][:KEPT]
    lookups = [[*key, *(round(x * min(1, TRIES / (tries + 1)), 2) for x in (hits + 0.5, tries + 1))]
               for key, (hits, tries) in sorted(cells.items())]  # fmt: skip
    made = {"chains": chains, "lookups": lookups}
    PRIORS.write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{PRIORS}: { ({kind: len(c) for kind, c in chains.items()}) } chains, {len(lookups)} cells")


def kind_name(text: RecordedText) -> str:
    """The drafter of a recording that is no lookup."""
    return next(name for name in text.drafts if name not in LOOKUPS)


def at_scale(chance: float, scale: float) -> float:
    """A recorded chance, as it is stated with another scale of the error."""
    chance = min(max(chance, 1e-4), 1 - 1e-4)
    return 1 / (1 + math.exp(-math.log(chance / (1 - chance)) * STATED / scale))


def fitted(texts: Sequence[RecordedText]) -> float:
    """The scale of the error that makes the accepted tokens likeliest."""

    def loss(scale: float) -> float:
        total = 0.0
        for text in texts:
            for draft in text.drafts[kind_name(text)]:
                for level, chance in enumerate(draft.chances[: draft.accepted + 1]):
                    p = at_scale(chance, scale)
                    total -= math.log(p if level < draft.accepted else 1 - p)
        return total

    return min(SCALES, key=loss)


def taken(text: RecordedText, name: str, scale: float) -> list[list[float]]:
    """The chains that a policy meets on its way through a text: at every position they would be too easy."""
    found, at = list[list[float]](), 1
    while at < len(text.output):
        draft, alive, length = text.drafts[name][at], 1.0, 0
        for chance in draft.chances:
            alive *= at_scale(chance, scale)
            length += 1
            if alive < STOP:
                break
        found.append([*draft.chances[:8]])
        at += min(draft.accepted, length) + 1
    return found


def count(text: RecordedText, cells: dict[tuple[int, int], list[int]]) -> None:
    """Count hits and tries of lookups, by match and mass."""
    for name in LOOKUPS:
        for draft in text.drafts[name]:
            for level, chance in enumerate(draft.chances[: min(draft.accepted + 1, 4)]):
                cell = cells.setdefault((match_cell(draft.match + level), min(int(chance * 5), 4)), [0, 0])
                cell[0] += level < draft.accepted
                cell[1] += 1


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
    two = parts.add_parser("priors", help="write the priors that ship")
    two.add_argument("recordings", nargs="+", metavar="KIND=FILE")
    two.set_defaults(run=make_priors)
    options = parser.parse_args(words)
    options.run(options)


if __name__ == "__main__":
    main()
