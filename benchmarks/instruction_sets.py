"""Whole texts over instruction sets and threads: how many tokens differ. Wanted: none.

    python -m benchmarks.instruction_sets FILE.gguf                       a million tokens over all combinations, resumable
    python -m benchmarks.instruction_sets FILE.gguf --tokens 50000 --precisions gguf
    python -m benchmarks.instruction_sets FILE.gguf --record FILE.json    2,080 tokens, to compare with another machine
    python -m benchmarks.instruction_sets FILE.gguf --against FILE.json   the same there, perhaps emulated (packaging/aarch64.py)

A combination is an instruction set, a thread count and a precision. In each wave, each one writes the same texts in a process
of its own. The first one of a precision is its reference: its tokens are not counted, and those of the others are compared with
them. The batch size and the order of the texts differ by combination, so each text has other company. torch gets the vectors
that a processor with that set has (ATEN_CPU_CAPABILITY). Half of the texts are greedy with a penalty, so they do not repeat
themselves. A quarter has temperature 0.8, and a quarter also top-p, min-p and penalties. The portable variant is 40 times slower
on x86 or more, and writes a part of the wave. The texts are kept after each process, and the same command goes on where it
stopped. A million tokens take some hours of one core. Ends with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import WORK, machine
from benchmarks.identity import PRECISIONS
from benchmarks.ruler import differing, fingerprint, parser, save
from benchmarks.texts import humaneval
from outrider import LLM, SamplingParams
from outrider.kernels import cpu as native

TEXTS, LENGTH = 64, 256  # a wave; four make a million tokens
FEW = 4  # texts of a wave that the portable variant writes, one for each kind of parameters
PROMPTS, CHARACTERS = 32, 60
# For another machine: texts of each precision (an emulator is slow with floats), tokens of a text, characters of a prompt
RECORDED, SHORT, BEGINNING = {"int8": 12, "gguf": 12, "bfloat16": 2}, 80, 24
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "frequency_penalty": 0.3},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.8},
)
CAPABILITIES = {"portable": "default", "avx2": "avx2", "avx_vnni": "avx2"}  # else avx512
Texts = list[list[int]]


def write(
    model: str,
    precision: str,
    wave: int,
    slots: int,
    count: int = TEXTS,
    length: int = LENGTH,
    characters: int = CHARACTERS,
) -> Texts:
    """The first texts of a wave, in this process.

    Args:
        model: a GGUF file.
        precision: one of `PRECISIONS`.
        wave: which texts.
        slots: of a batch. An odd number takes the texts from the last on.
        count: of texts.
        length: tokens of a text.
        characters: of a prompt.
    """
    llm = LLM(model, max_num_seqs=slots, max_model_len=1024, **PRECISIONS[precision])
    prompts, asked = humaneval(PROMPTS), list[tuple[str, SamplingParams]]()
    for n in range(TEXTS * wave, TEXTS * wave + count):
        # a greedy text begins with a part of a prompt that no other one has
        prompt = prompts[n % PROMPTS][5 * (n // PROMPTS) :][:characters]
        asked.append((prompt, SamplingParams(max_tokens=length, ignore_eos=True, seed=n, **PARAMS[n % len(PARAMS)])))
    order = asked[:: -1 if slots % 2 else 1]
    texts = [list(o.outputs[0].token_ids) for o in llm.generate(*map(list, zip(*order, strict=True)))]
    return texts[:: -1 if slots % 2 else 1]


def elsewhere(isa: str, threads: int, *command: object) -> Texts:
    """The texts of a process with an instruction set and a number of threads."""
    environment = {
        **os.environ,
        "OUTRIDER_ISA": isa,
        "OMP_NUM_THREADS": str(threads),
        "ATEN_CPU_CAPABILITY": CAPABILITIES.get(isa, "avx512"),
    }
    child = [sys.executable, "-m", "benchmarks.instruction_sets", "--child", *map(str, command)]
    done = subprocess.run(child, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def combinations(precisions: list[str], threads: list[int]) -> Iterator[tuple[int, str, str, int, int]]:
    """(wave, precision, instruction set, threads, slots of a batch), without an end."""
    sets = [isa for isa in native.isas()[::-1] if native.use_isa(isa)]
    for wave in itertools.count():
        for k, (precision, isa, count) in enumerate(itertools.product(precisions, sets, threads)):
            yield wave, precision, isa, count, (16, 27, 24, 33, 40)[(k + wave) % 5]


def recorded(model: str, file: Path, against: bool) -> int:
    """Write a few texts of each precision to a file, or compare them with it."""
    wanted: dict[str, Texts] = json.loads(file.read_text())["texts"] if against else {}
    texts, total, wrong = dict[str, Texts](), 0, 0
    for name, count in RECORDED.items():
        slots = count // 2 if against else count  # a text has other company there
        texts[name] = write(model, name, 0, slots, count, SHORT, BEGINNING)
        total += sum(map(len, texts[name]))
        wrong += sum(differing(a, b) for a, b in zip(texts[name], wanted.get(name, texts[name]), strict=True))
        print(f"{native.isa()}, {name}: {wrong} of {total:,} tokens differ", flush=True)
    if not against:
        file.write_text(json.dumps({"machine": machine.facts(), "isa": native.isa(), "texts": texts}))
    return int(wrong > 0)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("model", help="a GGUF file; read also as int8 and as bfloat16")
    options.add_argument("--tokens", type=int, default=1_000_000, help="to compare, over all combinations")
    options.add_argument("--precisions", nargs="+", default=["gguf", "int8", "bfloat16"], choices=list(PRECISIONS))
    options.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    options.add_argument("--texts", type=int, default=TEXTS, help="of a wave")
    options.add_argument("--length", type=int, default=LENGTH, help="tokens of a text")
    options.add_argument("--out", type=Path, help="a file for the result, or its folder")
    options.add_argument("--afresh", action="store_true", help="forget an earlier, unfinished run")
    options.add_argument("--record", type=Path, help="write the texts of this machine")
    options.add_argument("--against", type=Path, help="compare with the recorded texts of another machine")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args, rest = options.parse_known_args()
    if args.child:
        print(json.dumps(write(args.model, rest[0], *map(int, rest[1:]))))
        return 0
    if file := args.record or args.against:
        return recorded(args.model, file, args.record is None)
    path = WORK / "instruction-sets.jsonl"
    mark = [fingerprint(args.model), args.texts, args.length, machine.facts()["commit"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() and not args.afresh else []
    written: dict[str, Texts] = dict(json.loads(line) for line in lines[1:]) if lines[:1] == [json.dumps(mark)] else {}
    path.write_text("".join(json.dumps(line) + "\n" for line in (mark, *written.items())))
    units: dict[str, dict[str, Any]] = {}
    wanted: dict[tuple[int, str], Texts] = {}
    total = wrong = 0
    for wave, precision, isa, threads, slots in combinations(args.precisions, args.threads):
        if total >= args.tokens:
            break
        key = f"{precision} {isa} {threads} {wave}"
        if key not in written:
            count = min(FEW, args.texts) if isa == "portable" else args.texts
            written[key] = elsewhere(isa, threads, args.model, precision, wave, slots, count, args.length)
            with path.open("a") as file:
                file.write(json.dumps([key, written[key]]) + "\n")
        texts = written[key]
        if (reference := wanted.setdefault((wave, precision), texts)) is texts:
            continue
        bad = sum(differing(a, b) for a, b in zip(texts, reference, strict=False))
        unit = {"precision": precision, "isa": isa, "threads": threads, "tokens": 0, "differing": 0}
        unit = units.setdefault(f"{precision} {isa} {threads}", unit)
        unit["tokens"], unit["differing"] = unit["tokens"] + sum(map(len, texts)), unit["differing"] + bad
        total, wrong = (sum(row[name] for row in units.values()) for name in ("tokens", "differing"))
        print(
            f"wave {wave}, {precision:9} {isa:12} {threads} threads: {bad} differ; in all {wrong} of {total:,}",
            flush=True,
        )
    for row in units.values():
        print("{precision:9} {isa:12} {threads} threads: {differing} of {tokens:,} tokens differ".format(**row))
    print(f"{wrong} of {total:,} tokens differ")
    save("instruction_sets", args.out, rows=list(units.values()))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
