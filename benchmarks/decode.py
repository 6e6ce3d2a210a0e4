"""Tokens per second of methods and peers: same weights, precision, prompts and number of tokens, interleaved A B A B.

    python -m benchmarks.decode --size 0.5B --precision float32 --methods plain draft:4 draft:8 ngram:5

The baseline of every speedup is the same side's plain decoding, in the same process and the same round. Every text is
compared with it. Efficiency is the measured speedup over the one that the measured acceptance and the measured costs of
the two forwards allow: plain tokens x T(1), against the sum over steps of T(1 + guesses) + guesses x D(1).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks import headline
from benchmarks.side import Run


class Generates(Protocol):
    """A side, or a worker in this process."""

    def forward(self, rows: int, context: int, repeats: int, which: str = "target") -> list[float]: ...

    def generate(self, method: str, prompt: list[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> Run: ...


Runs = dict[tuple[str, str], list[list[Run]]]  # by side and method: for each round, a run for each prompt


def interleave(
    sides: Mapping[str, tuple[Generates, Sequence[str]]],
    prompts: Sequence[list[int]],
    tokens: int,
    rounds: int,
    temperature: float = 0.0,
) -> Runs:
    """sides: by name, who is asked and for which methods. Every method sees every prompt in turn; a warm-up is discarded."""
    contestants = [(name, method, side) for name, (side, methods) in sides.items() for method in methods]
    for _, method, side in contestants:
        side.generate(method, prompts[0], min(tokens, 16), temperature, 0)
    runs: Runs = {(name, method): [] for name, method, _ in contestants}
    for turn in range(rounds):
        for collected in runs.values():
            collected.append([])
        for at, prompt in enumerate(prompts):
            for name, method, side in contestants if (turn + at) % 2 == 0 else contestants[::-1]:
                runs[name, method][-1].append(side.generate(method, prompt, tokens, temperature, at))
    return runs


def per_token(runs: Sequence[Run]) -> float:
    """Seconds a token, over a whole set."""
    return sum(r.seconds for r in runs) / sum(r.timed for r in runs)


def guesses(run: Run) -> list[float]:
    """Guesses of each step; spread evenly where a side tells the sum alone."""
    if len(run.drafted) == run.steps:
        return [float(d) for d in run.drafted]
    return [sum(run.drafted) / run.steps] * run.steps if run.steps else []


def allowed(runs: Sequence[Run], target: Mapping[int, float], draft: float) -> float:
    """The speedup that this acceptance and these costs allow. target: seconds by M; draft: seconds a guess."""
    rows = sorted(target)
    steps = np.array([d for r in runs for d in guesses(r)])
    cost = np.interp(1 + steps, rows, [target[m] for m in rows]) + steps * draft
    return sum(r.timed for r in runs) * target[1] / float(cost.sum())


def summary(runs: list[list[Run]], plain: list[list[Run]], ideal: float | None = None) -> dict[str, Any]:
    """One record of a method. plain: the same side's plain runs, round by round."""
    every = [r for turn in runs for r in turn]
    speed = [1 / per_token(turn) for turn in runs]
    gain = [per_token(p) / per_token(r) for p, r in zip(plain, runs, strict=True)]
    seconds, steps = sum(r.seconds for r in every), sum(r.steps for r in every)
    drafted, accepted = (sum(map(sum, (getattr(r, n) for r in every))) for n in ("drafted", "accepted"))
    parts = {k: sum(r.parts.get(k, 0.0) for r in every) for k in {k for r in every for k in r.parts}}
    texts, own = ([[r.tokens for r in turn] for turn in side] for side in (runs, plain))
    out: dict[str, Any] = {
        "tokens_per_second": round(statistics.median(speed), 2),
        "spread": [round(min(speed), 2), round(max(speed), 2)],
        "speedup": round(statistics.median(gain), 3),
        "acceptance_length": round(sum(r.timed for r in every) / steps, 3) if steps else None,
        "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
        "conditional_rate": _conditional(every),
        "draft_share": round(parts["draft"] / seconds, 3) if drafted and "draft" in parts else None,
        "overhead_share": round(1 - (parts["draft"] + parts["target"]) / seconds, 3) if "target" in parts else None,
        "identical_texts": sum(a == b for x, y in zip(texts, own, strict=True) for a, b in zip(x, y, strict=True)),
        "texts": len(every),
    }
    if ideal is not None:
        out |= {"allowed_speedup": round(ideal, 3), "efficiency": round(out["speedup"] / ideal, 3)}
    return out


def _conditional(runs: Sequence[Run]) -> float | None:
    """How often a guess that is judged is right: guesses behind a wrong one are not judged."""
    pairs = [(d, a) for r in runs if len(r.drafted) == r.steps for d, a in zip(r.drafted, r.accepted, strict=True)]
    accepted = sum(a for _, a in pairs)
    judged = accepted + sum(a < d for d, a in pairs)
    return round(accepted / judged, 3) if judged else None


def costs(
    side: Generates, methods: Sequence[str], context: int, longest: int
) -> tuple[dict[int, float], dict[str, float]]:
    """Seconds of the target's forward by M, and of a guess of each method whose drafter is a model: medians of interleaved
    rounds, as the texts beside them are a mean over good and bad moments too."""
    rows = [m for m in sorted({1, 2, 3, 5, 9, 17, 1 + longest}) if m <= 1 + longest]
    for m in rows:
        side.forward(m, context, 1)
    target: dict[int, list[float]] = {m: [] for m in rows}
    guess: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(5):
        for m in rows:
            target[m] += side.forward(m, context, 2)
        for method in methods:
            try:
                guess[method] += side.forward(1, context, 4, which=method)
            except (RuntimeError, ValueError, KeyError):
                guess[method] = [0.0]  # looks text up, or is plain
    median = statistics.median
    return {m: median(t) for m, t in target.items()}, {method: median(t) for method, t in guess.items()}


def compare(
    sides: Mapping[str, tuple[Generates, Sequence[str]]],
    prompts: Sequence[list[int]],
    *,
    tokens: int,
    rounds: int,
    temperature: float = 0.0,
    context: int = 256,
) -> list[dict[str, Any]]:
    """Runs everything; one record for each side and method. Each side's methods must contain plain."""
    known = {}
    for name, (side, methods) in sides.items():
        longest = max((int(m.partition(":")[2] or 0) for m in methods), default=0)
        known[name] = costs(side, [m for m in methods if m != "plain"], context, longest)
    runs = interleave(sides, prompts, tokens, rounds, temperature)
    records = []
    for (name, method), collected in runs.items():
        target, drafts = known[name]
        ideal = None
        if method != "plain" and any(r.drafted for turn in collected for r in turn):
            ideal = allowed([r for turn in collected for r in turn], target, drafts[method])
        record = summary(collected, runs[name, "plain"], ideal)
        records.append({"side": name, "method": method, **record, "draft_ms": round(1e3 * drafts.get(method, 0.0), 3)})
    return records


def main() -> None:
    from benchmarks.pairs import PRECISIONS, pair
    from benchmarks.prompts import encoded
    from benchmarks.report import console, decode_table
    from benchmarks.sides import open_sides

    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=headline(__doc__))
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument(
        "--source", default="builtin:code-draft", help="the small model whose function the target computes"
    )
    parser.add_argument("--trained", help="another small model as a draft named trained")
    parser.add_argument("--rate", type=float, default=0.8, help="how often a guess of the draft named draft is right")
    parser.add_argument("--methods", nargs="+", default=["plain", "draft:4", "draft:8"], help="of outrider")
    parser.add_argument("--transformers", nargs="*", default=["plain", "draft:4", "draft:8"], help="none: leave it out")
    parser.add_argument("--llama-cpp", nargs="*", default=["plain", "draft:4", "draft:8"], help="none: leave it out")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    models = pair(args.size, PRECISIONS[args.precision]["stored"], args.source, args.rate, args.trained)
    methods = {"outrider": args.methods, "transformers": args.transformers, "llama.cpp": args.llama_cpp}
    with open_sides(models, args.precision, [n for n, m in methods.items() if m and n != "outrider"]) as (
        sides,
        missing,
    ):
        records = compare(
            {s.name: (s, methods[s.name]) for s in sides},
            encoded(models.target, args.prompts),
            tokens=args.tokens,
            rounds=args.rounds,
            temperature=args.temperature,
        )
    console.print(decode_table(f"{args.size} {args.precision}, temperature {args.temperature:g}", records))
    for reason in missing:
        console.print(f"[yellow]{reason}[/]")


if __name__ == "__main__":
    main()
