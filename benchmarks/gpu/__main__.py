"""A GPU in a quarter of an hour: what no other machine can tell of the kernels, graphs and texts of the GPU path.

    python -m benchmarks.gpu --seconds 400 -o FILE        all parts, the most important first
    python -m benchmarks.gpu --only plain drafts -o FILE
    python -m benchmarks.gpu --tiny                       that the code runs, in Triton's interpreter; its figures mean nothing

Weights are random, of true shapes: no time depends on their values. A drafter that knows the text guesses right by a script, with
a given chance. Each part is a process of its own with a limit, so a fault of the card ends no other part, and the result is
written after each. A time is a median.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from time import monotonic

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a process that has asked CUDA itself cannot be forked
if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from benchmarks import ROOT, machine
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts import PARTS
from benchmarks.ruler import markdown, parser, save


def main() -> None:
    names = {part.__name__: part for part in PARTS}
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=400, help="of all parts together")
    options.add_argument("--only", nargs="+", choices=names, default=[*names], metavar="PART", help=", ".join(names))
    options.add_argument("--tiny", action="store_true", help="on the CPU; figures mean nothing")
    options.add_argument("--here", action="store_true", help="all parts in this process, without limits")
    options.add_argument("--commit", help="what runs, where there is no git")
    options.add_argument("-o", "--out", type=Path, help="a file, or a folder")
    given = options.parse_args()
    card = "no card: Triton's interpreter, whose figures mean nothing"
    if given.tiny:
        sys.path.insert(0, str(ROOT / "tests" / "support"))
        import interpreted  # noqa: F401  # pyright: ignore[reportUnusedImport]
    else:
        ask = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        card = subprocess.run(ask, capture_output=True, text=True).stdout.strip() if which(ask[0]) else "unknown"
    import triton

    here = machine.facts()
    facts = {"card": card, "cuda": torch.version.cuda, "triton": triton.__version__}
    facts |= {name: here[name] for name in ("torch", "transformers", "date", "commit")}
    facts |= {"commit": given.commit} if given.commit else {}
    end, lines, file = monotonic() + given.seconds, list[tuple[str, ...]](), Path()
    for name, part in names.items():
        if name not in given.only:
            continue
        began, first = monotonic(), len(lines)
        b = Bench(given.tiny, min(PARTS[part], end - began))
        try:
            for line in part(b) if given.here else b.apart(b.left(), lambda: part(b)):
                lines.append((name, *line))
                print(*lines[-1], sep=" | ", flush=True)
        except Exception as error:  # the other parts are worth having
            lines.append((name, "WRONG", f"{type(error).__name__}: {error}", ""))
            print(*lines[-1], sep=" | ", flush=True)
        file = save("gpu", given.out, **facts, lines=lines)
        print(f"{name}: {len(lines) - first} lines, {monotonic() - began:.0f} s", flush=True)
    print(f"\n{facts}\n{markdown(('part', 'what', 'measured', 'goal'), lines)}\n{file.name}")
    sys.exit(any("WRONG" in word for line in lines for word in line))


if __name__ == "__main__":
    main()
