"""Measure what docs/performance.md reports, on this machine: make bench.

    python -m benchmarks                        0.5B targets in three precisions, about a quarter of an hour
    python -m benchmarks --quick                0.28B, fewer rounds, a few minutes
    python -m benchmarks --full                 0.28B, 0.5B and 1.1B
Peers that are not built are said and left out. Keep the machine quiet meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, decode, forward, machine
from benchmarks.figures import HEAD, figures
from benchmarks.pairs import BYTES, PRECISIONS, pair, weight_count
from benchmarks.prompts import encoded
from benchmarks.report import console, decode_table, forward_table, rich_table
from benchmarks.sides import PEERS, open_sides

Methods = dict[str, list[str]]
GREEDY: Methods = {
    "outrider": ["plain", "draft:4", "draft:8"],
    "transformers": ["plain", "draft:4", "draft:8"],
    "llama.cpp": ["plain", "draft:4", "draft:8"],
}
OWN: Methods = {"outrider": ["plain", "own:4", "own:8"], "llama.cpp": ["plain", "own:4", "own:8"]}
TEXT: Methods = {
    "outrider": ["plain", "ngram:5", "suffix:5"],
    "transformers": ["plain", "lookup:5"],
    "llama.cpp": ["plain", "ngram-simple"],
}
KINDS: dict[str, tuple[float, Methods]] = {"draft": (0.0, GREEDY), "own": (1.0, OWN), "text": (1.0, TEXT)}


class Bench:
    """Collects results and writes the file after every part, so that an interrupted run keeps what it has."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        command = " ".join(["python -m benchmarks", *sys.argv[1:]])
        self.result: dict[str, Any] = {"name": args.name, "command": command, "machine": machine.facts()}
        self.result["machine"]["read_gb_per_second"] = machine.bandwidth()
        self.result |= {"forward": [], "decode": [], "missing": []}
        self.path: Path = args.out / f"{self.result['machine']['date']}-{args.name}.json"
        if args.add and self.path.exists():
            old = json.loads(self.path.read_text())
            self.result |= {part: old[part] for part in ("forward", "decode", "missing")}
            self.result["command"] = f"{old['command']}; {command}"

    @property
    def read(self) -> float:
        return self.result["machine"]["read_gb_per_second"]["all"]

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def put(self, part: str, measured: dict[str, Any]) -> None:
        """A measurement, in the place of an earlier one of the same thing."""
        same = ("kind", "size", "precision")
        others = [m for m in self.result[part] if any(m.get(k) != measured.get(k) for k in same)]
        self.result[part] = [*others, measured]

    def size(self, size: str, precision: str, kinds: Sequence[str]) -> None:
        """One target in one precision: forwards, then texts of every kind, the sides' processes shared by all."""
        args = self.args
        models = pair(size, PRECISIONS[precision]["stored"], args.source, args.rate)
        weight_bytes = BYTES[precision] * weight_count(models.target)
        with open_sides(models, precision, args.peers) as (sides, missing):
            self.missed(missing)
            times = forward.measure(sides, rounds=args.rounds + 2)
            records = forward.table(times, weight_bytes, self.read)
            self.put("forward", {"size": size, "precision": precision, "context": 256, "records": records})
            console.print(forward_table(f"{size} {precision}: forwards at context 256", records))
            self.write()
            prompts = encoded(models.target, args.prompts)
            for kind in kinds:
                temperature, methods = KINDS[kind]
                asked = {s.name: (s, methods[s.name]) for s in sides if s.name in methods}
                self.texts(kind, size, precision, weight_bytes, asked, prompts, temperature)

    def trained(self, size: str, precision: str) -> None:
        """The built-in pair as trained: the target inflated, its draft as it is."""
        models = pair(size, PRECISIONS[precision]["stored"], "builtin:code", self.args.rate, "builtin:code-draft")
        with open_sides(models, precision, self.args.peers) as (sides, missing):
            self.missed(missing)
            prompts = encoded(models.target, self.args.prompts)
            asked = {s.name: (s, ["plain", "trained:4", "trained:8"]) for s in sides}
            self.texts("trained", size, precision, BYTES[precision] * weight_count(models.target), asked, prompts, 0.0)

    def texts(
        self, kind: str, size: str, precision: str, weight_bytes: float, asked: Any, prompts: Any, temperature: float
    ) -> None:
        args = self.args
        records = decode.compare(asked, prompts, tokens=args.tokens, rounds=args.rounds, temperature=temperature)
        told = {
            "kind": kind,
            "size": size,
            "precision": precision,
            "temperature": temperature,
            "weight_bytes": weight_bytes,
        }
        told |= {"prompts": args.prompts, "tokens": args.tokens, "rounds": args.rounds}
        self.put("decode", {**told, "records": records})
        console.print(decode_table(f"{size} {precision}: {kind}, temperature {temperature:g}", records))
        self.write()

    def missed(self, missing: list[str]) -> None:
        for reason in missing:
            if reason not in self.result["missing"]:
                self.result["missing"].append(reason)
                console.print(f"[yellow]left out: {reason}[/]")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="0.28B and fewer rounds")
    parser.add_argument("--full", action="store_true", help="0.28B, 0.5B and 1.1B, more rounds")
    parser.add_argument("--sizes", nargs="+", help="instead: these sizes (see benchmarks.inflate)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="texts to decode")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--no-trained", action="store_true", help="leave the built-in pair out")
    parser.add_argument(
        "--source", default="builtin:code-draft", help="the small model whose function the targets compute"
    )
    parser.add_argument("--rate", type=float, default=0.8, help="how often the draft's guess is right")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--name", default="bench")
    parser.add_argument("--add", action="store_true", help="keep what today's file holds of other sizes and precisions")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    args = parser.parse_args()
    args.sizes = args.sizes or (["0.28B"] if args.quick else ["0.28B", "0.5B", "1.1B"] if args.full else ["0.5B"])
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.prompts = args.prompts or (2 if args.quick else 3)
    bench = Bench(args)
    console.print(f"[bold]{bench.result['machine']['cpu']}[/], reads {bench.read} GB/s on {machine.cores()} cores")
    try:
        if not args.add:
            bench.size("15M", "float32", [])
        for size in args.sizes:
            for precision in args.precisions:
                bench.size(size, precision, args.kinds)
        if not args.no_trained:
            bench.trained(args.sizes[-1], args.precisions[0])
    except KeyboardInterrupt:
        console.print("[yellow]stopped; what was measured so far follows[/]")
    bench.write()
    console.print(rich_table("figures", HEAD, figures(bench.result)))
    console.print(f"written to {bench.path}; python -m benchmarks.table puts it into docs/performance.md")


if __name__ == "__main__":
    main()
