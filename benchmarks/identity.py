"""The long exactness run: how many tokens differ between speculative and plain decoding. Wanted: none in a million.

    python -m benchmarks.identity                       a million tokens, resumable
    python -m benchmarks.identity --tokens 20000        a short one
    python -m benchmarks.identity --target FILE.gguf --draft FILE.gguf --weights gguf      a model's own file; the draft in int4

A round decodes eight texts plainly, one by one, for every precision and temperature; then every drafter decodes the same
texts with the same seeds, in batches of 1 to 8 (another size each round) and with 1 to 8 draft tokens a step. Every token is
compared. State is written after every round; the same command goes on where it stopped. Ends with 1 if a token differs.
"""

from __future__ import annotations

import json
import sys
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import RESULTS, WORK, machine
from benchmarks.ruler import differing, fingerprint, markdown, parser, save
from benchmarks.texts import humaneval
from outrider.control import Controller, Fixed
from outrider.core.params import SamplingParams
from outrider.drafters import Drafter, ModelDrafter, NoDraft, PlannedDrafter, make_drafters
from outrider.drafters.config import DrafterSetup, SpeculativeConfig
from outrider.drafters.method import lookup_names
from outrider.engine.calibrate import make_planner
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request, Sequence
from outrider.engine.scheduler import Scheduler
from outrider.models.cache import KV_CACHE_DTYPES
from outrider.models.load import Loaded, load
from outrider.testing.stubs import Noisy, Wrong

TEXTS = 8  # a round
LENGTH = 640  # of prompt and text
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "gguf": {},
}
DEFAULT = ("float32", "bfloat16", "int8")
TEMPERATURES = (0.0, 1.0)
BOTH = "suffix and draft_model"
WIDE = ("draft_model, trees", "suffix", "token_recycling", "quantized_self int4")  # trees in two rounds of three


class Bench:
    """A target in one precision and everything that drafts for it."""

    def __init__(self, target: str, draft: str, weights: str, kv_cache_dtype: str = "auto") -> None:
        self._drafters: dict[str, Drafter] = {}
        self.target: Loaded = load(target, device="cpu", kv_cache_dtype=kv_cache_dtype, **PRECISIONS[weights])
        draft_model = load(draft, device="cpu", **PRECISIONS["int4" if weights == "gguf" else weights]).model
        vocab = self.target.model.vocab_size
        self.makers: dict[str, Callable[[], Drafter | dict[str, Drafter]]] = {
            "draft_model": lambda: ModelDrafter(draft_model, TEXTS, LENGTH),
            "draft_model, trees": lambda: ModelDrafter(draft_model, TEXTS, LENGTH),
            "wrong": lambda: Wrong(5),
            "noisy": lambda: Noisy(ModelDrafter(draft_model, TEXTS, LENGTH), 0.7, vocab),
        }
        depth = self.target.model.num_layers
        configs: dict[str, dict[str, Any]] = {
            "ngram": {"method": "ngram", "prompt_lookup_min": 1},
            "suffix": {"method": "suffix"},
            "prediction": {"method": "prediction"},
            "token_recycling": {"method": "token_recycling"},
            "layer_skip": {"method": "layer_skip", "layers": list(range(max(1, depth // 2)))},
            "quantized_self int8": {"method": "quantized_self", "quantization": "int8"},
            "quantized_self int4": {"method": "quantized_self", "quantization": "int4"},
        }
        if weights in ("int8", "int4", "gguf"):
            del configs["quantized_self int8"]  # no coarser than the target
        if weights == "int4":
            del configs["quantized_self int4"]
        self.makers |= {name: lambda c=c: self._drafter(c) for name, c in configs.items()}
        self.makers[BOTH] = lambda: {
            "suffix": self._drafter({"method": "suffix"}),
            "draft_model": ModelDrafter(draft_model, TEXTS, LENGTH),
        }

    def _drafter(self, config: dict[str, Any]) -> Drafter:
        key = json.dumps(config)
        if key not in self._drafters:  # rows are released: a drafter may be used again
            setup = DrafterSetup(SpeculativeConfig.of(config), self.target, TEXTS, LENGTH, "cpu")
            [self._drafters[key]] = make_drafters(setup).values()
        return self._drafters[key]

    def decode(
        self,
        drafter: Drafter | dict[str, Drafter],
        drafted: int,
        requests: abc.Sequence[Request],
        batch: int,
        width: int = 1,
    ) -> list[Sequence]:
        """The texts of some requests.

        Args:
            drafter: one, or several by name under a planner.
            drafted: draft tokens of a step.
            requests: what is asked for.
            batch: sequences at once.
            width: children of a node; more than 1 is a tree.
        """
        controller: Controller = Fixed(drafted, width, 2 * drafted if width > 1 else None)
        if isinstance(drafter, dict):
            controller = make_planner(SpeculativeConfig.of(None), self.target, drafter, controller)
            vocab = self.target.model.vocab_size
            drafter = PlannedDrafter(drafter, controller, vocab, lookup_names(drafter), trusted=[*drafter])
        decoder = Decoder(self.target.model, drafter, controller=controller, num_slots=batch, max_length=LENGTH)
        return Scheduler(decoder, raises=True).generate(requests)


def requests_of(prompts: abc.Sequence[list[int]], turn: int, tokens: int, temperature: float) -> list[Request]:
    """The texts of a round: prompts in pairs, so that no two rounds within a thousand begin alike."""
    out = []
    for i in range(TEXTS):
        n = turn * TEXTS + i
        first, second = prompts[n % len(prompts)], prompts[(n // len(prompts) + n) % len(prompts)]
        prompt = first if n < len(prompts) else [*second, *first][-(LENGTH - tokens - 1) :]
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        out.append(Request(n, prompt, params, seed=n))
    return out


def garbled(text: abc.Sequence[int]) -> list[int]:
    """A prediction that is mostly right: every ninth token another one, every twentieth missing."""
    return [t + 1 if i % 9 == 8 and t else t for i, t in enumerate(text) if i % 20 != 19]


def play(
    bench: Bench, prompts: abc.Sequence[list[int]], turn: int, tokens: int
) -> Iterator[tuple[str, int, int, list[Any]]]:
    """One round: (drafter, tokens compared, tokens that differ, where) for every drafter and temperature."""
    for temperature in TEMPERATURES:
        requests = requests_of(prompts, turn, tokens, temperature)
        plain = [bench.decode(NoDraft(), 0, [r], 1)[0].output for r in requests]
        expected = [replace(r, prediction=tuple(garbled(p))) for r, p in zip(requests, plain, strict=True)]
        for k, (name, make) in enumerate(bench.makers.items()):
            batch, drafted = 1 + (turn + k) % TEXTS, 1 + (turn * 3 + k) % 8
            width = 1 + (turn + k) % 3 if name in WIDE else 1
            rows = bench.decode(make(), drafted, expected if name == "prediction" else requests, batch, width)
            bad = [differing(r.output, p) for r, p in zip(rows, plain, strict=True)]
            case = {"round": turn, "temperature": temperature, "batch": batch, "drafted": drafted}
            where = [{**case, "text": i, "differing": n} for i, n in enumerate(bad) if n]
            yield name, sum(map(len, plain)), sum(bad), where


def run(
    benches: dict[str, Bench], prompts: abc.Sequence[list[int]], total: int, tokens: int, state: dict[str, Any],
    after: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:  # fmt: skip
    """Rounds until `total` tokens are compared. `after` sees the state behind every round."""
    while state["tokens"] < total:
        start = perf_counter()
        for weights, bench in benches.items():
            for name, compared, bad, where in play(bench, prompts, state["round"], tokens):
                unit = state["units"].setdefault(f"{weights}/{name}", [0, 0])
                unit[0] += compared
                unit[1] += bad
                state["tokens"] += compared
                state["differing"] += bad
                state["where"] += where
        state["round"] += 1
        state["seconds"] += perf_counter() - start
        after(state)
    return state


def table(units: abc.Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each drafter of each precision."""
    rows = [[u["weights"], u["drafter"], f"{u['tokens']:,}", str(u["differing"])] for u in units]
    return markdown(["weights", "drafter", "tokens", "differing"], rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=1_000_000, help="speculative tokens to compare")
    options.add_argument("--length", type=int, default=128, help="tokens of a text")
    options.add_argument("--target", default="builtin:code")
    options.add_argument("--draft", default="builtin:code-draft")
    options.add_argument("--weights", nargs="+", choices=PRECISIONS, default=list(DEFAULT))
    options.add_argument("--kv-cache-dtype", choices=list(KV_CACHE_DTYPES), default="auto", help="of the target")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options.add_argument("--afresh", action="store_true", help="forget an earlier, unfinished run")
    args = options.parse_args()
    if not 1 <= args.length < LENGTH // 2:
        options.error(f"--length must be in 1..{LENGTH // 2 - 1}")
    mark = [fingerprint(args.target), fingerprint(args.draft), args.length, args.weights, args.kv_cache_dtype]
    mark.append(machine.facts()["commit"])
    path = WORK / "identity.json"
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not args.afresh else {}
    if state.get("mark") != mark or state["tokens"] >= args.tokens:
        state = {"mark": mark, "round": 0, "tokens": 0, "differing": 0, "seconds": 0.0, "units": {}, "where": []}
    elif state["round"]:
        print(f"going on after round {state['round']}, {state['tokens']:,} tokens compared")
    benches = {w: Bench(args.target, args.draft, w, args.kv_cache_dtype) for w in args.weights}
    tokenizer: Any = benches[args.weights[0]].target.tokenizer
    prompts = [tokenizer(p)["input_ids"][: LENGTH - args.length - 1] for p in humaneval(32)]

    def after(s: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(s))
        units = [dict(zip(("weights", "drafter"), key.split("/"), strict=True)) for key in s["units"]]
        units = [u | {"tokens": n, "differing": bad} for u, (n, bad) in zip(units, s["units"].values(), strict=True)]
        sums = {k: s[k] for k in ("tokens", "differing", "round", "seconds", "where")}
        save(
            "identity", args.out, pair=[args.target, args.draft], **sums, units=units
        )  # an interrupted run has its file
        left = max(args.tokens - s["tokens"], 0) * s["seconds"] / s["tokens"] / 60
        print(
            f"round {s['round']}: {s['tokens']:,} tokens, {s['differing']} differ, {left:.0f} minutes left", flush=True
        )

    run(benches, prompts, args.tokens, args.length, state, after)
    print(f"{state['differing']} of {state['tokens']:,} tokens differ from plain decoding")
    sys.exit(1 if state["differing"] else 0)


if __name__ == "__main__":
    main()
