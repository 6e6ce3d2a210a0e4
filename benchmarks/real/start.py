"""A new process: seconds from its start to the first token, and the memory it had at its peak.

    python -m benchmarks.real.start MODEL [--weights int8] [--tokens 32]

This is the measured process itself. It prints one line of JSON; `measure` starts it and holds the clock.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import cores
from benchmarks.peers.llama_server import LlamaServer, pinned
from benchmarks.ruler import parser

PROMPT = "def fibonacci(n):"


def peak(pid: int | str = "self") -> dict[str, int]:
    """Bytes of memory of a process: at its peak (with the pages of mapped files), and now in memory of its own."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        name: 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[1])  # pyright: ignore[reportOptionalSubscript]
        for name, field in (("peak_bytes", "VmHWM"), ("anonymous_bytes", "RssAnon"))
    }


def measure(model: str, weights: str, tokens: int = 32) -> list[dict[str, Any]]:
    """The first and the second start: what the first one keeps in the user's cache folder, the second one finds."""
    command = [sys.executable, "-m", "benchmarks.real.start", model, "--weights", weights, "--tokens", str(tokens)]
    starts = []
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, **pinned(cores()), "XDG_CACHE_HOME": cache}
        for start in ("first", "second"):
            began = time.perf_counter()
            with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                seconds, rest = time.perf_counter() - began, process.stdout.read()
            if process.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
            starts.append({"start": start, "seconds": round(seconds, 3), **json.loads(rest)})
    return starts


def measure_llama(program: Path, model: str, tokens: int = 32) -> dict[str, Any]:
    """The same for llama.cpp's server: until it has answered a prompt of a few tokens with one."""
    prompt = list(range(10, 16))
    began = time.perf_counter()
    with LlamaServer(program, model) as server:
        server.complete(prompt, 1)
        seconds = time.perf_counter() - began
        server.complete(prompt, tokens)
        return {"start": "any", "seconds": round(seconds, 3), **peak(server.process.pid)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("--weights", default="file")
    options.add_argument("--tokens", type=int, default=32)
    args = options.parse_args()
    from benchmarks.real.sides import WEIGHTS
    from outrider.core.params import SamplingParams
    from outrider.engine.llm import LLM

    before = peak()["peak_bytes"]
    llm = LLM(args.model, device="cpu", max_model_len=512, max_num_seqs=1, **WEIGHTS[args.weights])
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    for number, _ in enumerate(llm.stream(PROMPT, params)):
        if number == 0:
            print("first token", flush=True)
    print(json.dumps({"imports_bytes": before, **peak()}))


if __name__ == "__main__":
    main()
