"""Two builds of the native library against each other: is one of them slower?

    python -m benchmarks.libraries OLD.so NEW.so                                     a matrix that lies in the caches
    python -m benchmarks.libraries OLD.so NEW.so --inputs 8960 --outputs 16384       one that comes from the memory

Both are loaded into one process and take turns on linears of one row (decoding), five (a draft) and 64 (a prompt), on one thread.
Prints the best time of each. The best of many turns is stable also on a machine that does other work.
"""

from __future__ import annotations

import argparse
import ctypes
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks import headline
from outrider.kernels import cpu as native
from outrider.kernels.cpu import FORMATS
from outrider.kernels.cpu.library import PackedStruct


def aligned(size: int) -> np.ndarray:
    """uint8 [size], on a line of the cache."""
    room = np.zeros(size + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][:size]


def opened(path: Path) -> ctypes.CDLL:
    """A library, of this version or of an older one, which may lack functions."""
    library = ctypes.CDLL(str(path.resolve()))
    library.outrider_panel_bytes.restype = c_int64
    library.outrider_panel_bytes.argtypes = [c_int32, c_int64]
    library.outrider_pack.argtypes = [c_void_p, c_void_p, c_int32, *[c_int64] * 4, c_int32]
    library.outrider_linear.argtypes = [c_void_p, c_void_p, c_void_p, *[c_int64] * 3]
    return library


def weights(library: ctypes.CDLL, name: str, inputs: int, outputs: int) -> tuple[PackedStruct, np.ndarray]:
    """A matrix of a format, and the memory that it needs to stay."""
    rng, number = np.random.default_rng(0), FORMATS[name]
    size = library.outrider_panel_bytes(number, inputs)
    data = aligned(size * outputs // 16)
    packed = PackedStruct(data.ctypes.data, None, outputs, inputs, size, number, outputs // 16, None, 0, 0)
    if name in ("float32", "bfloat16", "float16"):
        floats = rng.standard_normal((outputs, inputs), dtype=np.float32)
        library.outrider_pack(ctypes.byref(packed), floats.ctypes.data, 0, outputs, inputs, 1, 0, 0)
    else:
        data[:] = rng.integers(0, 60, len(data))  # small scales and any weights
    return packed, data


def main() -> None:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
    parser.add_argument("--inputs", type=int, default=1536)
    parser.add_argument("--outputs", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 64])
    args = parser.parse_args()
    libraries = [opened(args.old), opened(args.new)]
    for isa in native.isas()[::-1]:
        if isa == "portable" or not all(library.outrider_select_isa(isa.encode()) for library in libraries):
            continue
        for library in libraries:
            library.outrider_set_threads(
                1
            )  # here, because one may be the package's own, which was just loaded with more
        for name in args.formats:
            packed, _memory = weights(libraries[1], name, args.inputs, args.outputs)
            for rows in args.rows:
                x = np.random.default_rng(1).standard_normal((rows, args.inputs), dtype=np.float32)
                y = np.empty((rows, args.outputs), np.float32)
                best, repeats = [float("inf")] * 2, max(1, 24 // rows)
                for turn in range(args.turns):
                    for side in (0, 1) if turn % 2 else (1, 0):
                        start = perf_counter()
                        for _ in range(repeats):
                            libraries[side].outrider_linear(
                                ctypes.byref(packed), x.ctypes.data, y.ctypes.data, rows, args.inputs, args.outputs
                            )
                        best[side] = min(best[side], (perf_counter() - start) / repeats)
                old, new = (1e6 * seconds for seconds in best)
                print(
                    f"{isa:12} {name:9} {rows:3} rows: {old:8.1f} us, {new:8.1f} us, old / new {old / new:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
