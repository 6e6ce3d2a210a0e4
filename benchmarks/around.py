"""The time around a draft: what a step takes beside the target's forward, and beside the calls of draft models.

    python -m benchmarks.around builtin:smollm2-135m                      its default, with its head
    python -m benchmarks.around large.gguf --draft-model small.gguf

Plain decoding and the default write the same texts of chat and code, greedy and sampled, in turns of a few tokens. A step is one
of five kinds: `plain`; `rest`, which asks nothing; `asked`, which asks lookups and verifies no draft; `lookup` and `model`, which
draft. Steps that ask a draft model or head are `model`, whatever comes of it. Each kind has three figures:

* `python`: the whole step without its native calls, those of a draft included;
* `around`: the whole step without the target and the calls of draft models. Lookups are in it;
* `lookups`: their calls alone.

Times are medians, with their intervals, in microseconds of this thread's processor, which other programs lengthen less than
those of a clock. Native forwards leave nothing of Python in the caches, so the same code takes several times as long beside them
as alone. `benchmarks.replays` charges `around`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any

from benchmarks.ruler import median_interval, parser, save, turns
from benchmarks.texts import texts
from outrider import LLM, SamplingParams
from outrider.drafters.base import Drafter
from outrider.engine.request import Sequence
from outrider.kernels.cpu import library
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

    def watch(self, holder: object, names: dict[str, str]) -> None:
        """Count these functions of an object from now on. names: the part that each belongs to."""
        for name, part in names.items():
            vars(holder)[name] = self.timed(part, getattr(holder, name))


def watch_drafter(meter: Meter, drafter: Drafter, lookup: bool) -> None:
    """Count the calls of a drafter."""
    part = "lookup" if lookup else "model"
    meter.watch(drafter, {"propose": part if lookup else "asked", "start": part, "read": part, "update": part})


def write(parts: Meter, native: Meter, llm: LLM, text: Sequence, tokens: int) -> list[tuple[str, float, float, float]]:
    """Kind of each step, and its microseconds of Python, around its draft, and of lookups, until the text has so many tokens, or
    ends."""
    steps = list[tuple[str, float, float, float]]()
    while text.finish is None and len(text.output) < tokens:
        for meter in (parts, native):
            meter.seconds.clear()
        began = thread_time()
        step, _ = llm.scheduler.step()
        whole, seconds = thread_time() - began, dict(parts.seconds)
        if step is None:  # it has read the prompt
            continue
        lookup = seconds.pop("lookup", 0.0)
        if llm.decoder.plain:
            kind = "plain"
        elif "asked" in seconds:
            kind = "model"
        elif len(step.draft.host[0]) > 1:
            kind = "lookup"
        else:
            kind = "asked" if lookup else "rest"
        python = whole - sum(native.seconds.values())
        steps.append((kind, 1e6 * python, 1e6 * (whole - sum(seconds.values())), 1e6 * lookup))
    return steps


def measure(model: str, draft: str | None, count: int, tokens: int) -> dict[str, dict[str, Any]]:
    """For each kind of step: how many, and microseconds of its Python, around a draft, and of lookups.

    Args:
        model: the target.
        draft: a draft model or head; None is the target's default.
        count: texts of each workload.
        tokens: of a text, at most.
    """
    parts, native, functions = Meter(), Meter(), library()
    native.watch(functions, {name: "native" for name, f in vars(functions).items() if hasattr(f, "argtypes")})
    target = load(model)
    config = {"method": "auto"} | ({"model": draft} if draft else {})
    sides = [LLM(target, speculative_config=c, max_num_seqs=1) for c in ({"method": "none"}, config)]
    parts.watch(target.model, {"forward": "target", "step": "target"})
    roster = sides[1].runtime.roster
    assert roster is not None
    for name, drafter in roster.drafters.items():
        watch_drafter(parts, drafter, name in roster.lookups)
    steps = list[tuple[str, float, float, float]]()
    chat = getattr(sides[0].tokenizer, "chat_template", None) is not None
    prompts = [p for some in zip(*(texts(w, chat, count) for w in ("chat", "code")), strict=True) for p in some]
    for n, prompt in enumerate(prompts):
        params = SamplingParams(temperature=TEMPERATURES[n // 2 % 2], max_tokens=tokens, seed=n)
        running = [llm.scheduler.add(llm.requests(sides[0].encode(prompt.content), params))[0] for llm in sides]
        for _, (llm, text) in turns([*zip(sides, running, strict=True)], -(-tokens // TURN), warm=0):
            steps += write(parts, native, llm, text, len(text.output) + TURN)
        if running[0].output != running[1].output:
            raise AssertionError(f"text {n} is not plain decoding's")
    return {kind: _medians([step[1:] for step in steps if step[0] == kind]) for kind in KINDS}


def _medians(rows: list[tuple[float, ...]]) -> dict[str, Any]:
    columns = zip(("python", "around", "lookups"), zip(*rows, strict=True), strict=True) if rows else ()
    middle = {name: median_interval(column) for name, column in columns}
    return {"steps": len(rows), **{name: [round(x) for x in (m.low, m.value, m.high)] for name, m in middle.items()}}


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
        if row["steps"]:
            told = (
                f"{part} {row[part][1]} us ({row[part][0]}-{row[part][2]})" for part in ("python", "around", "lookups")
            )
            print(f"{kind:7} {row['steps']:5} steps: {', '.join(told)}")
    if args.out:
        save("around", args.out, model=Path(args.model).name, draft=args.draft_model, steps=kinds)


if __name__ == "__main__":
    main()
