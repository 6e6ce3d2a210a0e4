"""The time around a draft: what a step takes beside the target's forward, the verification and the calls of draft models.

    python -m benchmarks.around builtin:smollm2-135m                      its default, with its head
    python -m benchmarks.around large.gguf --draft-model small.gguf

Plain decoding and the default write the same texts of chat and code, greedy and sampled, in turns of a few tokens. A step is one
of five kinds: `plain`; `rest`, which asks nothing; `asked`, which asks lookups and verifies no draft; `lookup` and `model`, which
draft. Steps that ask a draft model or head are `model`, whatever comes of it. Lookups are in the time around a draft, and alone
beside it. Times are medians and quartiles in microseconds of this thread's processor, which other programs lengthen less than
those of a clock. `benchmarks.replays` charges the medians.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

from benchmarks.ruler import parser, save, turns
from benchmarks.texts import texts
from outrider import LLM, SamplingParams
from outrider.drafters.base import Drafter
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request, Sequence
from outrider.models.base import LanguageModel
from outrider.models.load import load

KINDS = ("plain", "rest", "asked", "lookup", "model")
TURN = 8  # tokens that one side writes before the other
TEMPERATURES = (0.0, 0.7)


class Meter:
    """The seconds of calls, in the running step. A call within another one does not count again."""

    def __init__(self) -> None:
        self.seconds, self._inside = dict[str, float](), False

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return call(*args, **options)
            self._inside, began = True, thread_time()
            try:
                return call(*args, **options)
            finally:
                self._inside = False
                self.seconds[part] = self.seconds.get(part, 0.0) + thread_time() - began

        return timed

    def watch(self, drafter: Drafter, lookup: bool) -> None:
        for name in ("propose", "start", "read", "update"):
            part = "lookup" if lookup else "asked" if name == "propose" else "model"
            vars(drafter)[name] = self.timed(part, getattr(drafter, name))


def write(meter: Meter, decoder: Decoder, text: Sequence, tokens: int) -> list[tuple[str, float, float]]:
    """Kind of each step, microseconds around its draft, and those of lookups, until the text has so many tokens, or ends."""
    steps = list[tuple[str, float, float]]()
    while text.finish is None and len(text.output) < tokens:
        meter.seconds.clear()
        began = thread_time()
        step = next(decoder.run([text]))
        whole, parts = thread_time() - began, dict(meter.seconds)
        lookup = parts.pop("lookup", 0.0)
        if decoder.plain:
            kind = "plain"
        elif "asked" in parts:
            kind = "model"
        elif len(step.draft.host[0]) > 1:
            kind = "lookup"
        else:
            kind = "asked" if lookup else "rest"
        steps.append((kind, 1e6 * (whole - sum(parts.values())), 1e6 * lookup))
    return steps


def measure(model: str, draft: str | None, count: int, tokens: int) -> dict[str, dict[str, Any]]:
    """For each kind of step: how many, and quartiles of microseconds, around a draft and of lookups.

    Args:
        model: the target.
        draft: a draft model or head; None is the target's default.
        count: texts of each workload.
        tokens: of a text, at most.
    """
    target, meter = load(model), Meter()
    config = {"method": "auto"} | ({"model": draft} if draft else {})
    sides = [LLM(target, speculative_config=c, max_num_seqs=1) for c in ({"method": "none"}, config)]
    vars(target.model)["forward"] = meter.timed("target", target.model.forward)
    vars(target.model)["step"] = partial(
        LanguageModel.step, target.model
    )  # which asks forward, and draws apart from it
    for llm in sides:
        verifier = llm.decoder.verifier
        llm.decoder.verifier = replace(verifier, function=meter.timed("verify", verifier.function))
    roster = sides[1].runtime.roster
    assert roster is not None
    for name, drafter in roster.drafters.items():
        meter.watch(drafter, name in roster.lookups)
    steps = list[tuple[str, float, float]]()
    chat = getattr(sides[0].tokenizer, "chat_template", None) is not None
    prompts = [p for some in zip(*(texts(w, chat, count) for w in ("chat", "code")), strict=True) for p in some]
    for n, prompt in enumerate(prompts):
        params = SamplingParams(temperature=TEMPERATURES[n // 2 % 2], max_tokens=tokens)
        request = Request(n, sides[0].encode(prompt.content), params, seed=n)
        running = [llm.decoder.start(request) for llm in sides]
        for llm, text in zip(sides, running, strict=True):
            for _ in llm.decoder.run([text], 0):  # reads the prompt
                pass
        for _, (llm, text) in turns([*zip(sides, running, strict=True)], -(-tokens // TURN), warm=0):
            steps += write(meter, llm.decoder, text, len(text.output) + TURN)
        if running[0].output != running[1].output:
            raise AssertionError(f"text {n} is not plain decoding's")
        for llm, text in zip(sides, running, strict=True):
            llm.decoder.release(text.slot)
    return {kind: _quartiles([step[1:] for step in steps if step[0] == kind]) for kind in KINDS}


def _quartiles(rows: list[tuple[float, ...]]) -> dict[str, Any]:
    around, lookup = np.percentile(rows or [(0.0, 0.0)], (25, 50, 75), axis=0).T.round().tolist()
    return {"steps": len(rows), "around": around, "lookup": lookup}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("--draft-model", help="a draft model, or the folder of a head")
    options.add_argument("--texts", type=int, default=8, help="of each workload")
    options.add_argument("--tokens", type=int, default=96, help="of a text, at most")
    options.add_argument("--out", type=Path, help="a file for the measurement")
    args = options.parse_args()
    kinds = measure(args.model, args.draft_model, args.texts, args.tokens)
    for kind, row in kinds.items():
        (low, middle, high), over = row["around"], row["around"][1] - kinds["plain"]["around"][1]
        print(
            f"{kind:7} {row['steps']:5} steps: {middle:4.0f} us ({low:.0f}-{high:.0f}), {over:4.0f} over plain, "
            f"lookups {row['lookup'][1]:.0f} us"
        )
    if args.out:
        save("around", args.out, model=Path(args.model).name, draft=args.draft_model, steps=kinds)


if __name__ == "__main__":
    main()
