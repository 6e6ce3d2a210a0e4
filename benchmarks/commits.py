"""Two checkouts of outrider against each other, interleaved: did a change make anything slower?

    git worktree add ../old COMMIT        # and build it: copy or compile its native kernels
    python -m benchmarks.commits ../old .

Each checkout has a process of its own. They write the same texts in turns, so the machine's pace is the same for both. The
texts must be equal. A ratio above 1 says that the second checkout is faster; the standard error is that of the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import headline
from benchmarks.pairs import synthetic

WORKER = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
from outrider import LLM, SamplingParams
made, prompts = {}, [f"def f{n}(x):\\n" for n in range(8)]
for line in sys.stdin:
    size, drafts, batch, tokens = json.loads(line)
    if (size, drafts, batch) not in made:
        for key in [k for k in made if k[0] != size]:
            del made[key]
        config = {"method": "draft_model", "model": "builtin:code-draft", "num_speculative_tokens": 4, "controller": "fixed"}
        made[size, drafts, batch] = LLM(size, speculative_config=config if drafts else None,
                                        max_num_seqs=batch, max_model_len=256)
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)] * batch
    start = time.perf_counter()
    out = made[size, drafts, batch].generate(prompts[:batch], params)
    print(json.dumps([time.perf_counter() - start, [o.outputs[0].token_ids for o in out]]), flush=True)
"""
CASES = [  # size, with a draft model, batch size, tokens, repeats
    ("160M", False, 1, 48, 9), ("160M", True, 1, 96, 9), ("160M", False, 8, 16, 7), ("160M", True, 8, 32, 7),
    ("0.5B", False, 1, 20, 5), ("0.5B", True, 1, 40, 7), ("0.5B", False, 8, 8, 5), ("0.5B", True, 8, 16, 5),
]  # fmt: skip


class Checkout:
    """A process that writes texts with the outrider of a folder."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(folder.resolve())}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-c", WORKER], text=True, env=env, cwd=folder, **pipes)

    def write(self, *case: object) -> tuple[float, list[list[int]]]:
        """(seconds, token ids). Raises RuntimeError if the process has died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a checkout does not run; try its `python -m outrider generate` by hand")
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("old", type=Path, help="folder of a checkout")
    parser.add_argument("new", type=Path, help="folder of another")
    args = parser.parse_args()
    models = {size: str(synthetic(size)) for size, *_ in CASES}
    old, new = Checkout(args.old), Checkout(args.new)
    for size, drafts, batch, tokens, repeats in CASES:
        for side in (old, new):
            side.write(models[size], drafts, batch, 6)
        ratios = list[float]()
        for turn in range(repeats):
            sides = (old, new) if turn % 2 else (new, old)
            found = {side: side.write(models[size], drafts, batch, tokens) for side in sides}
            if found[old][1] != found[new][1]:
                sys.exit(f"{size}, batch {batch}: the texts differ")
            ratios.append(found[old][0] / found[new][0])
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        name = f"{size} {'draft' if drafts else 'plain'} batch {batch}"
        print(f"{name:20} median {statistics.median(ratios):.3f}  mean {statistics.fmean(ratios):.3f} +- {error:.3f}")


if __name__ == "__main__":
    main()
