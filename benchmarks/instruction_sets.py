"""Whole texts over instruction sets and threads: how many tokens differ. Wanted: none.

    python -m benchmarks.instruction_sets FILE.gguf                       20,000 tokens for each set, thread count and precision
    python -m benchmarks.instruction_sets FILE.gguf --tokens 2000 --precisions gguf

Each combination runs in a process of its own. torch gets the vectors that a processor with that set has
(ATEN_CPU_CAPABILITY). Half of the texts are greedy with a penalty. The others have temperature 0.8, top-p, min-p and penalties.
The portable variant is slow on x86 and writes a tenth of the tokens. Ends with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks import RESULTS, headline, machine
from benchmarks.identity import PRECISIONS, differing
from benchmarks.prompts import humaneval
from outrider import LLM, SamplingParams
from outrider.kernels import cpu as native

TEXTS = 8  # a batch
LENGTH = 250
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "frequency_penalty": 0.3},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.1},
)
CAPABILITIES = {"portable": "default", "avx2": "avx2", "avx_vnni": "avx2"}  # else avx512


def write(model: str, precision: str, batches: int) -> list[list[int]]:
    """The texts, in this process."""
    llm = LLM(model, max_num_seqs=TEXTS, max_model_len=1024, **PRECISIONS[precision])
    prompts = humaneval(TEXTS)
    texts: list[list[int]] = []
    for batch in range(batches):
        params = [
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=TEXTS * batch + i, **PARAMS[(batch + i) % 2])
            for i in range(TEXTS)
        ]
        # greedy texts of another batch begin with another part of the prompt
        texts += [list(o.outputs[0].token_ids) for o in llm.generate([p[batch:] for p in prompts], params)]
    return texts


def elsewhere(model: str, precision: str, isa: str, threads: int, batches: int) -> list[list[int]]:
    """The texts of a process with an instruction set and a number of threads."""
    environment = {
        **os.environ,
        "OUTRIDER_ISA": isa,
        "OMP_NUM_THREADS": str(threads),
        "ATEN_CPU_CAPABILITY": CAPABILITIES.get(isa, "avx512"),
    }
    command = [sys.executable, "-m", "benchmarks.instruction_sets", model, "--child", precision, str(batches)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("model", help="a GGUF file; read also as int8 and as bfloat16")
    parser.add_argument("--tokens", type=int, default=20000, help="for each combination")
    parser.add_argument("--precisions", nargs="+", default=["gguf", "int8", "bfloat16"], choices=list(PRECISIONS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(write(args.model, args.child[0], int(args.child[1]))))
        return 0
    batches = max(1, round(args.tokens / (TEXTS * LENGTH)))
    sets = [isa for isa in native.isas()[::-1] if native.use_isa(isa)]
    found: list[dict[str, Any]] = []
    for precision in args.precisions:
        wanted: list[list[int]] = []
        for isa in sets:
            for threads in args.threads:
                count = batches if isa != "portable" else max(1, batches // 10)
                texts = elsewhere(args.model, precision, isa, threads, count)
                wanted = wanted or texts
                wrong = sum(differing(a, b) for a, b in zip(texts, wanted, strict=False))
                tokens = sum(map(len, texts))
                row = {"precision": precision, "isa": isa, "threads": threads, "tokens": tokens, "differing": wrong}
                found.append(row)
                print(f"{precision:9} {isa:12} {threads} threads: {wrong} of {tokens:,} tokens differ", flush=True)
    total, wrong = (sum(row[key] for row in found) for key in ("tokens", "differing"))
    print(f"{wrong} of {total:,} tokens differ")
    path = RESULTS / f"{machine.facts()['date']}-instruction-sets.json"
    path.write_text(json.dumps({"command": " ".join(sys.argv), "machine": machine.facts(), "rows": found}, indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
