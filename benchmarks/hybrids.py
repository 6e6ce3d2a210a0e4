"""A hybrid of about 0.5B weights: what kept states cost, V(M) beside llama.cpp's, and the speed of a prefill.

    python -m benchmarks.hybrids [--rounds 5] [--layers 36] [--bench FILE] [--json OUT]

The weights are random, in the shape of Falcon-H1-0.5B: Mamba 2 beside attention in each layer. Sides take turns in a round, and
a ratio is taken within it. llama.cpp reads the same weights through llama-bench (`-p M -d context`), which keeps only the last
state; it is left out if `--bench` names no such program. "one by one" is a prefill with transformers' function for each token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import PEERS, WORK, headline
from benchmarks.machine import cores
from benchmarks.peers.ours import some_tokens
from outrider.models import states
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.hf import recurrent
from outrider.models.hf.model import HFModel
from outrider.models.nodes import Nodes

ROWS = (1, 2, 4, 8)
SHAPE: dict[str, Any] = {
    "model_type": "falcon_h1", "vocab_size": 32784, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def folder_of(layers: int) -> Path:
    """The model with random weights in bfloat16, made now unless it is there."""
    folder = WORK / "models" / f"hybrid-{layers}"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**SHAPE, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(builtin_folder("builtin:code") / name, folder / name)
    return folder


class Hybrid:
    """Our side. context: tokens before what is timed."""

    def __init__(self, folder: Path, context: int) -> None:
        raw = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model, self.context = HFModel(raw.eval(), own=True, weights="bfloat16"), context
        self._cache = self.model.new_cache(2, 2 * context + 64)
        self._feed(0, context)
        self._cache.commit([0], [range(context)])

    def _feed(self, slot: int, count: int) -> float:
        start = perf_counter()
        self.model.forward(
            Nodes(some_tokens(count, self.model.vocab_size), self._cache, [slot]), want="last" if slot else "all"
        )
        return perf_counter() - start

    def forward(self, rows: int, kept: int) -> float:
        """Seconds of a chain. kept: states after nodes that stay in memory."""
        before, states.KEPT = states.KEPT, kept
        try:
            return min(self._feed(0, rows) for _ in range(5))
        finally:
            states.KEPT = before

    def prefill(self, native: bool) -> float:
        """Seconds for `context` tokens of another text."""
        before = {**recurrent.STEPS}
        try:
            if not native:
                recurrent.STEPS.update(dict.fromkeys(before, _nothing))
            return self._feed(1, self.context)
        finally:
            recurrent.STEPS.update(before)
            self._cache.release(1)


def _nothing(_: dict[str, Any]) -> None:
    """In place of a kernel: there is none."""


def llama_bench(program: Path, folder: Path, context: int) -> dict[int, float]:
    """Seconds of a forward over so many tokens behind a context, in llama.cpp."""
    file = folder / "bf16.gguf"
    if not file.exists():
        tree = next(p for p in (PEERS / "llama.cpp", program.resolve().parents[2] / "llama.cpp") if p.exists())
        command = [
            sys.executable,
            "-m",
            "benchmarks.peers.convert",
            tree,
            folder,
            "--outtype",
            "bf16",
            "--outfile",
            file,
        ]
        subprocess.run([*map(str, command)], check=True, stdout=sys.stderr)
    options = ["-m", file, "-p", ",".join(map(str, ROWS)), "-n", 0, "-d", context, "-t", cores(), "-r", 3, "-o", "json"]
    out = subprocess.run([program, *map(str, options)], check=True, capture_output=True, text=True).stdout
    return {test["n_prompt"]: min(test["samples_ns"]) / 1e9 for test in json.loads(out)}


def measure(ours: Hybrid, theirs: Callable[[], dict[int, float]] | None, rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, by round. The first round is a warm-up and left out."""
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        found = {f"kept {m}": ours.forward(m, 16) for m in ROWS}
        found["last state only 8"] = ours.forward(8, 1)
        found["prefill"] = ours.prefill(native=True)
        if turn == 1:  # slow, and far from the other
            found["prefill one by one"] = ours.prefill(native=False)
        if theirs is not None:
            found |= {f"llama.cpp {m}": seconds for m, seconds in theirs().items()}
        for name, seconds in found.items():
            times.setdefault(name, []).extend([seconds] if turn else [])
    return times


def summary(times: dict[str, list[float]], context: int) -> dict[str, Any]:
    """Medians: milliseconds, ratios within a round, and tokens/s."""

    def ratio(name: str, base: str) -> list[float]:
        each = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
        return [round(x, 3) for x in (statistics.median(each), each[0], each[-1])]

    out: dict[str, Any] = {"ms": {name: round(1e3 * statistics.median(ts), 1) for name, ts in times.items()}}
    out["cost of kept states at 8"] = ratio("kept 8", "last state only 8")
    out["V"] = {m: ratio(f"kept {m}", "kept 1") for m in ROWS}
    if "llama.cpp 1" in times:
        out["V of llama.cpp"] = {m: ratio(f"llama.cpp {m}", "llama.cpp 1") for m in ROWS}
    for name in ("prefill", "prefill one by one"):
        out[f"{name}, tokens/s"] = round(context / statistics.median(times[name]), 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrids", description=headline(__doc__))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--bench", type=Path, default=PEERS / "llama.cpp" / "build" / "bin" / "llama-bench")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = folder_of(args.layers)
    theirs = None
    if args.bench.exists():
        theirs = lambda: llama_bench(args.bench, folder, args.context)  # noqa: E731
    else:
        print(f"no llama.cpp: {args.bench} is not there", file=sys.stderr)
    found = summary(measure(Hybrid(folder, args.context), theirs, args.rounds), args.context)
    text = json.dumps({"layers": args.layers, "context": args.context, **found}, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
