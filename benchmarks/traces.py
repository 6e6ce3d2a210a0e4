"""Record what drafters would have proposed at every position of real texts, for replays without a clock.

    python -m benchmarks.traces --target TARGET.gguf --draft DRAFT.gguf --part held --out FILE
    python -m benchmarks.traces --target builtin:smollm2-135m --method eagle --draft HEAD --part ours --out FILE

The part `held` is what replays are judged by, the part `ours` is what its constants were set on. No text is in both. A file has
compressed JSON lines, one for each text. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ruler import parser
from benchmarks.texts import lines, texts
from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters import make_drafters
from outrider.drafters.config import DrafterSetup, SpeculativeConfig
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.models.load import load
from outrider_lab.tune.recorded import DraftRecorder, RecordedDraft, RecordedText, record

LENGTH, TOGETHER = 2048, 8
LOOKUPS = ("suffix",)
# Kind of a text -> its workload. Maths has the problems that `texts` leaves out.
KINDS = {
    "chat": "chat", "maths": "", "code": "code", "short": "qa", "edit": "edit", "summaries": "summary", "retrieval": "retrieval",
}  # fmt: skip


def save(recorded: Sequence[RecordedText], path: Path) -> None:
    """Write texts. Chances are kept to a thousandth."""
    every = list[str]()
    for text in recorded:
        drafts = {
            name: [[d.accepted, d.match, d.length, *(round(1000 * c) for c in d.chances)] for d in some]
            for name, some in text.drafts.items()
        }
        every.append(json.dumps({**vars(text), "drafts": drafts}, separators=(",", ":")))
    path.write_bytes(gzip.compress(("\n".join(every) + "\n").encode(), mtime=0))


def read(path: Path) -> list[RecordedText]:
    """Read what `save` wrote."""
    recorded = list[RecordedText]()
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        fields: dict[str, Any] = json.loads(line)
        drafts = {
            name: [RecordedDraft(a, m, [min(c / 1000, 0.9999) for c in stated], n) for a, m, n, *stated in some]
            for name, some in fields.pop("drafts").items()
        }
        recorded.append(RecordedText(**fields, drafts=drafts))
    return recorded


def prompts(part: str) -> list[tuple[str, str]]:
    """(kind, prompt) of a part: five each of seven kinds for `held`, five to seven for `ours`."""
    cut = slice(0, 5) if part == "held" else slice(5, 12)
    chosen = list[tuple[str, str]]()
    for kind, workload in KINDS.items():
        if workload:
            every = [prompt.content[0]["content"] for prompt in texts(workload, True, 12)]  # type: ignore[index]
        else:
            every = [line["question"] for line in lines("gsm8k")[:12]]
        chosen += [(kind, text) for text in every[cut]]
    return chosen


def requests(tokenizer: Any, part: str, temperature: float) -> list[tuple[str, Request]]:
    """The requests of a part, with the chat template if there is one."""
    chosen = list[tuple[str, Request]]()
    for at, (kind, text) in enumerate(prompts(part)):
        if getattr(tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": text}]
            ids = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        else:
            ids = list(tokenizer(text)["input_ids"])
        limit = 128 if kind == "edit" else 96
        if len(ids) + limit < LENGTH:
            chosen.append((kind, Request(at, ids, SamplingParams(temperature=temperature, max_tokens=limit), 11 + at)))
    return chosen


def main(words: Sequence[str] | None = None) -> None:
    args = parser(__doc__)
    args.add_argument("--target", required=True)
    args.add_argument("--draft")
    args.add_argument("--method", default="draft_model")
    args.add_argument("--part", choices=("held", "ours"), required=True)
    args.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    args.add_argument("--texts", type=int, help="at each temperature; all, if not given")
    args.add_argument("--out", type=Path, required=True)
    options = args.parse_args(words)
    target, method = load(options.target, device="cpu"), options.method
    model = {"model": options.draft} if options.draft else {}
    configs = {method: {"method": method, **model}, "suffix": {"method": "suffix", "suffix_shared_tokens": 0}}
    drafters = {
        name: drafter
        for name, config in configs.items()
        for drafter in make_drafters(
            DrafterSetup(SpeculativeConfig.of(config), target, TOGETHER, LENGTH, "cpu")
        ).values()
    }
    have = read(options.out) if options.out.exists() else []
    past = {(text.temperature, tuple(text.prompt)) for text in have}
    for temperature in options.temperatures:
        every = requests(target.tokenizer, options.part, temperature)[: options.texts]
        left = [(kind, one) for kind, one in every if (temperature, tuple(one.prompt)) not in past]
        while left:
            some, left = left[:TOGETHER], left[TOGETHER:]
            recorder = DraftRecorder(drafters, LOOKUPS)
            decoder = Decoder(
                target.model, recorder, controller=Fixed(16), num_slots=TOGETHER, max_length=LENGTH, end_ids=target.end_ids,
                tokenizer=target.tokenizer,
            )  # fmt: skip
            have += record(decoder, recorder, some)
            save(have, options.out)
            print(f"{len(have)} texts, {len(left)} left at T={temperature:g}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
