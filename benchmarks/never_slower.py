"""Never slower: the planner with drafters that cannot help, against plain decoding, on a model worth speeding up.

    python -m benchmarks.never_slower                                       synthetic 160M, some minutes
    python -m benchmarks.never_slower --cases wrong noisy --texts 2 --tokens 512

In each case plain decoding and the planner write the same texts, in turns of a few tokens.
Costs are measured as at load. Asked: 0.99 of plain. `after_256` leaves out the first 256 tokens of each text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ruler import markdown, parser, save
from benchmarks.stretches import TimedRun, interleave
from outrider.control import Costs, Planner
from outrider.core.intervals import interval
from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters import PlannedDrafter
from outrider.drafters.base import Drafter, NoDraft
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.engine.calibrate import measure as measure_costs
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.models.load import Loaded, load
from outrider.testing.stubs import Noisy, Wrong

CASES = ("wrong", "noisy", "as large", "temperature 2")
FIRST, STRETCH, LENGTH, LIMIT = 256, 16, 2048, Budget(8)
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


def measure(
    target: Loaded, make: Callable[[int], Drafter], temperature: float, texts: int, tokens: int
) -> dict[str, Any]:
    """Texts written by both. A new text has a new seed and, as at a server, the planner that has seen the ones before.

    Args:
        target: writes them.
        make: the drafter for a number of slots.
        temperature: of all texts.
        texts: how many.
        tokens: of each.
    """
    assert target.tokenizer is not None
    prompt = target.tokenizer(PROMPT)["input_ids"]
    plain = Decoder(target.model, NoDraft(), num_slots=1, max_length=LENGTH)
    drafter = make(1)
    planner = Planner(LIMIT, Costs(measure_costs(target.model, {"draft": drafter}, {})))
    drafting = PlannedDrafter({"draft": drafter}, planner, target.model.vocab_size, trusted=["draft"])
    fast = Decoder(target.model, drafting, controller=planner, num_slots=1, max_length=LENGTH)
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    interleave({"plain": TimedRun(plain, Request(0, prompt, replace(params, max_tokens=STRETCH)))})
    groups, whole = list[Any](), np.zeros(2)
    for seed in range(texts):
        request = Request(seed, prompt, params, seed)
        done = interleave({"plain": TimedRun(plain, request), "fast": TimedRun(fast, request)}, STRETCH)
        if done["plain"].row.output != done["fast"].row.output:
            raise AssertionError("a text is not plain decoding's")
        seconds = np.array([done["plain"].seconds, done["fast"].seconds]).T
        whole += seconds.sum(0)
        after = seconds[FIRST // STRETCH :]
        groups += [after[n : n + 4].sum(0) for n in range(0, len(after), 4)]
    ratio = interval(np.array(groups or [whole]))
    return {
        "after_256": round(ratio.value, 4), "low": round(ratio.low, 4), "high": round(min(ratio.high, 99.0), 4),
        "whole": round(float(whole[0] / whole[1]), 4), "texts": texts,
        "plain_tokens_per_second": round(texts * tokens / float(whole[0]), 1),
    }  # fmt: skip


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a line for each drafter."""
    body = [
        [r["case"], f"{r['whole']:.3f}", f"{r['after_256']:.3f}", f"{r['low']:.3f}-{r['high']:.3f}"] for r in records
    ]
    return markdown(["drafter", "of plain", "after 256 tokens", "95 %"], body)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", help="default: builtin:code at the cost of 160 million weights")
    options.add_argument("--draft", default="builtin:code-draft")
    options.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    options.add_argument("--texts", type=int, default=4)
    options.add_argument("--tokens", type=int, default=768)
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    model = args.model
    if not model:
        from benchmarks.scale_up import synthetic

        model = str(synthetic("160M"))
    target, records = load(model, device="cpu"), list[dict[str, Any]]()
    every = cases(target, args.draft)
    for name in args.cases:
        temperature, make = every[name]
        records.append({"case": name, **measure(target, make, temperature, args.texts, args.tokens)})
        print(records[-1], flush=True)
        path = save("never_slower", args.out, model=Path(model).name, tokens=args.tokens, cases=records)
        print(f"written to {path}")
    print(table(records))


if __name__ == "__main__":
    main()
