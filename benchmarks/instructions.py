"""How many instructions the kernels for ARM take for a weight. This is a count, not a speed: nothing is run.

    python -m benchmarks.instructions                  every quantised format, one row and five
    python -m benchmarks.instructions --formats Q4_K Q6_K Q8_0

Compiles the kernels for aarch64 (apt-get install g++-aarch64-linux-gnu) and counts the innermost loop of each tile in its
disassembly. A block is 8 outputs times 32 inputs, which takes 16 products of bytes for a row of activations in 8 bits, and
16 (2 rows + 1) for rows in 16 bits.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from benchmarks import ROOT, headline
from outrider.kernels.cpu import FORMATS, KINDS

SOURCE = ROOT / "outrider/kernels/cpu/src"
COMPILER, DISASSEMBLER = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump"
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-tree-reassoc", "-Wno-psabi", "-fPIC")
BLOCK = 256  # weights
PRODUCTS = 16  # of bytes, for a block and a row in 8 bits


def disassembly() -> str:
    """The kernels as this machine's cross compiler makes them. Raises FileNotFoundError without one."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "variants.o"
        subprocess.run([COMPILER, *FLAGS, "-c", str(SOURCE / "variants.cpp"), "-o", str(made)], check=True)
        command = [DISASSEMBLER, "-d", "-C", "--no-show-raw-insn", str(made)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def innermost(body: str) -> list[str]:
    """The instructions of the loop that has the products of bytes, and no other loop with them inside."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s*([0-9a-f]+):\s+(.*)$", body, re.MULTILINE)]
    place = {at: i for i, (at, _) in enumerate(lines)}
    loops: list[list[str]] = []
    for i, (at, text) in enumerate(lines):
        back = re.match(r"(?:b\.\w+|cbn?z|tbn?z|b)\s.*?\b([0-9a-f]+) <", text)
        if back and int(back[1], 16) <= at and int(back[1], 16) in place:
            loops.append([line for _, line in lines[place[int(back[1], 16)] : i + 1]])
    return min((loop for loop in loops if any(line.startswith("sdot") for line in loop)), key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    names = [name for name in FORMATS if name not in KINDS]
    parser.add_argument("--formats", nargs="+", default=names, choices=names)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 5], choices=range(1, 7))
    args = parser.parse_args()
    text = disassembly()
    functions = dict(re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)+)", text, re.MULTILINE))
    print(f"{'format':8}{'rows':>5}{'instructions for a block':>26}{'for a weight':>14}{'for a multiply-add':>20}")
    for name in args.formats:
        for rows in args.rows:
            tile = rf"outrider::neon::tile(8|16)<{FORMATS[name]}, {rows}>\("
            found, body = next((m, body) for function, body in functions.items() if (m := re.search(tile, function)))
            loop = innermost(body)
            products = PRODUCTS * (rows if found[1] == "8" else 2 * rows + 1)
            blocks = sum(line.startswith("sdot") for line in loop) / products
            count = len(loop) / blocks
            print(f"{name:8}{rows:5}{count:26.0f}{count / BLOCK:14.2f}{count / BLOCK / rows:20.2f}")


if __name__ == "__main__":
    main()
