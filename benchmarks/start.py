"""A command from its start to the first token: wall time, processor time and memory.

    python -m benchmarks.start smollm2-135m.gguf builtin:code
    python -m benchmarks.start smollm2-135m.gguf --peer peer/bin/python

Each command writes one token and ends. Commands take turns, and the first start of each model is not counted: it fills caches.
`beyond` is resident memory at the peak, without a model's GGUF file. With `--peer` llama.cpp's server reads the same file in
the same turns, until it has answered with one token; `--peer` is a `llama-server`, or a Python that has the package xllamacpp.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import psutil

from benchmarks.peers.llama_server import LlamaServer
from benchmarks.real.start import peak
from benchmarks.ruler import markdown, parser, save, turns

PROMPT = "The sky is"
HELP = "--help"


def spent(command: list[str], env: dict[str, str]) -> tuple[float, float, float]:
    """Seconds of the clock and of the processor, and MB of memory at the peak, of a command. Raises RuntimeError if it fails."""
    start = perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}: {said.decode()[-500:]}")
    return perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def spent_by(program: Path, model: str) -> tuple[float, float, float]:
    """The same for llama.cpp's server, until it has answered a prompt of a few tokens with one."""
    start = perf_counter()
    with LlamaServer(program, model) as server:
        server.complete([10, 11, 12, 13], 1)
        seconds, used = perf_counter() - start, psutil.Process(server.process.pid).cpu_times()
        return seconds, used.user + used.system, peak(server.process.pid)["peak_bytes"] / 1e6


def ours(model: str) -> list[str]:
    if model == HELP:
        return [sys.executable, "-m", "outrider", HELP]
    return [sys.executable, "-m", "outrider", "generate", PROMPT, "-m", model, "--max-tokens", "1"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("models", nargs="+", help="files, folders or built-in names")
    options.add_argument("--peer", type=Path)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    sides = [(model, "outrider") for model in (HELP, *args.models)]
    if args.peer:
        sides += [(model, "llama.cpp") for model in args.models if model.endswith(".gguf")]
    figures: dict[tuple[str, str], list[tuple[float, float, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPYCACHEPREFIX": f"{cache}/compiled"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
        for number, (model, who) in turns(sides, args.rounds):
            figure = spent(ours(model), env) if who == "outrider" else spent_by(args.peer, model)
            if number >= 0:
                figures[model, who].append(figure)
    rows = list[list[str]]()
    for (model, who), measured in figures.items():
        wall, processor, memory = (statistics.median(part) for part in zip(*measured, strict=True))
        size = Path(model).stat().st_size / 1e6 if Path(model).is_file() else 0.0
        rows.append([Path(model).name, who, f"{wall:.2f}", f"{processor:.2f}", f"{memory:.0f}", f"{memory - size:.0f}"])
    print(markdown(["model", "program", "wall, s", "processor, s", "peak, MB", "beyond, MB"], rows))
    named = {f"{Path(model).name} {who}": measured for (model, who), measured in figures.items()}
    print(save("start", args.out, figures=named))


if __name__ == "__main__":
    main()
