"""Two checkouts of outrider against each other, in turns: did a change make anything slower? Or two builds of the kernels.

    git worktree add ../old COMMIT        # and build it: copy or compile its native kernels
    python -m benchmarks.commits ../old .
    python -m benchmarks.commits ../old . --model large.gguf --draft-model small.gguf
    python -m benchmarks.commits OLD.so NEW.so                                   a matrix that lies in the caches
    python -m benchmarks.commits OLD.so NEW.so --inputs 8960 --outputs 16384     one that comes from the memory

Each checkout has a process of its own. They write the same texts in turns, so the machine's pace is the same for both. The
texts must be equal. A ratio above 1 says that the second checkout is faster; it is a median with its interval.

Two files of kernels are loaded into one process. They take turns on linears of one row (decoding), five (a draft) and 64 (a
prompt), on one thread. Of each the best time is shown, which is stable also on a machine that does other work.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.ruler import median_interval, parser, shown, turns
from outrider.kernels import cpu as native
from outrider.kernels.cpu import FORMATS
from outrider.kernels.cpu.library import PackedStruct

WORKER = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
from outrider import LLM, SamplingParams
engines, prompts = {}, [f"def f{n}(x):\\n" for n in range(8)]
for line in sys.stdin:
    model, config, batch, tokens = json.loads(line)
    key = json.dumps([model, config, batch])
    if key not in engines:
        for other in [k for k in engines if json.loads(k)[0] != model]:
            del engines[other]
        engines[key] = LLM(model, speculative_config=config, max_num_seqs=batch, max_model_len=256)
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)] * batch
    start = time.perf_counter()
    out = engines[key].generate(prompts[:batch], params)
    print(json.dumps([time.perf_counter() - start, [o.outputs[0].token_ids for o in out]]), flush=True)
"""
SIZES = {
    "160M": (48, 16),
    "0.5B": (20, 8),
}  # tokens of plain decoding, alone and eight at once; drafts write twice as many


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

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def checkouts(args: argparse.Namespace) -> None:
    """Texts of one and of eight sequences, plainly and with a draft model."""
    draft = {"method": "draft_model", "model": args.draft_model, "num_speculative_tokens": 4, "controller": "fixed"}
    models = {Path(args.model).name: (args.model, SIZES["160M"])} if args.model else {}
    if not models:
        from benchmarks.scale_up import synthetic

        models = {size: (str(synthetic(size)), tokens) for size, tokens in SIZES.items()}
    sides = [Checkout(args.old), Checkout(args.new)]
    for name, (model, lengths) in models.items():
        for batch, count in zip((1, 8), lengths, strict=True):
            for method, config, tokens in (("plain", None, count), ("draft", draft, 2 * count)):
                seconds, texts = [list[float](), list[float]()], dict[int, list[list[int]]]()
                for number, side in turns((0, 1), args.rounds):
                    took, text = sides[side].write(model, config, batch, tokens if number >= 0 else 6)
                    if text != texts.setdefault(number, text):
                        sys.exit(f"{name}, batch {batch}: the texts differ")
                    if number >= 0:
                        seconds[side].append(took)
                ratio = median_interval([old / new for old, new in zip(*seconds, strict=True)])
                print(f"{name} {method}, batch {batch}: {shown(ratio)}", flush=True)
    for side in sides:
        side.close()


def open_library(path: Path) -> ctypes.CDLL:
    """A file of kernels, of this version or of an older one, which may lack functions."""
    library = ctypes.CDLL(str(path.resolve()))
    library.outrider_panel_bytes.restype = c_int64
    library.outrider_panel_bytes.argtypes = [c_int32, c_int64]
    library.outrider_pack.argtypes = [c_void_p, c_void_p, c_int32, *[c_int64] * 4, c_int32]
    library.outrider_linear.argtypes = [c_void_p, c_void_p, c_void_p, *[c_int64] * 3]
    return library


def weights(library: ctypes.CDLL, name: str, inputs: int, outputs: int) -> tuple[PackedStruct, np.ndarray]:
    """A matrix of a format, and the memory that it needs to stay."""
    rng, number = np.random.default_rng(0), FORMATS[name]
    panel = library.outrider_panel_bytes(number, inputs)
    room = np.zeros(panel * outputs // 16 + 64, np.uint8)
    data = room[-room.ctypes.data % 64 :][: panel * outputs // 16]  # on a line of the cache
    packed = PackedStruct(data.ctypes.data, None, outputs, inputs, panel, number, outputs // 16, None, 0, 0)
    if name in ("float32", "bfloat16", "float16"):
        floats = rng.standard_normal((outputs, inputs), dtype=np.float32)
        library.outrider_pack(ctypes.byref(packed), floats.ctypes.data, 0, outputs, inputs, 1, 0, 0)
    else:
        data[:] = rng.integers(0, 60, len(data))  # small scales and any weights
    return packed, room


def libraries(args: argparse.Namespace) -> None:
    """Linears of each format, instruction set and number of rows."""
    sides = [open_library(args.old), open_library(args.new)]
    for isa in native.isas()[::-1]:
        if isa == "portable" or not all(side.outrider_select_isa(isa.encode()) for side in sides):
            continue
        for side in sides:  # here, because one may be the package's own, which was just loaded with more
            side.outrider_set_threads(1)
        for name in args.formats:
            packed, _memory = weights(sides[1], name, args.inputs, args.outputs)
            for rows in args.rows:
                x = np.random.default_rng(1).standard_normal((rows, args.inputs), dtype=np.float32)
                y = np.empty((rows, args.outputs), np.float32)
                operands = ctypes.byref(packed), x.ctypes.data, y.ctypes.data, rows, args.inputs, args.outputs
                best, repeats = [float("inf")] * 2, max(1, 24 // rows)
                for _, side in turns((0, 1), args.rounds, warm=0):
                    start = perf_counter()
                    for _ in range(repeats):
                        sides[side].outrider_linear(*operands)
                    best[side] = min(best[side], (perf_counter() - start) / repeats)
                old, new = (1e6 * seconds for seconds in best)
                print(
                    f"{isa:12} {name:9} {rows:3} rows: {old:8.1f} us, {new:8.1f} us, old / new {old / new:.3f}",
                    flush=True,
                )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("old", type=Path, help="folder of a checkout, or a file of kernels")
    options.add_argument("new", type=Path, help="another one")
    options.add_argument("--rounds", type=int, help="9 of checkouts and 100 of kernels, if not given")
    options.add_argument(
        "--model", help="of checkouts: the built-in code model at the cost of larger ones, if not given"
    )
    options.add_argument("--draft-model", default="builtin:code-draft")
    options.add_argument("--formats", nargs="+", default=["bfloat16", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
    options.add_argument("--inputs", type=int, default=1536)
    options.add_argument("--outputs", type=int, default=1024)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 5, 64])
    args = options.parse_args()
    kernels = args.old.is_file()
    args.rounds = args.rounds or (100 if kernels else 9)
    (libraries if kernels else checkouts)(args)


if __name__ == "__main__":
    main()
