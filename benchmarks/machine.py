"""What is measured on: the machine, the versions, and how fast it reads memory.

python -m benchmarks.machine
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks import ROOT

# Eight sums side by side, so that the adder's latency does not hide the memory.
READ = """
float read_all(const float* x, long n) {
    float s[64] = {0};
    for (long i = 0; i + 64 <= n; i += 64)
        for (int j = 0; j < 64; j++) s[j] += x[i + j];
    float t = 0;
    for (int j = 0; j < 64; j++) t += s[j];
    return t;
}
"""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), "")


def _commit() -> str:
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return out.stdout.strip()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def facts() -> dict[str, Any]:
    """Processor, memory, versions, commit, date. Nothing that names the machine's owner or its folders."""
    flags = set(_field("/proc/cpuinfo", "flags").split())
    known = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
    kib = _field("/proc/meminfo", "MemTotal").removesuffix(" kB")
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "family": "/".join(_field("/proc/cpuinfo", n) for n in ("cpu family", "model")),
        "cores": cores(),
        "isa": [f for f in known if f in flags],
        "cache": _field("/proc/cpuinfo", "cache size"),
        "memory_gib": round(int(kib) / 2**20, 1) if kib.isdigit() else None,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "outrider": version("outrider"),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }


def bandwidth(mib: int = 1024, repeats: int = 5) -> dict[str, float]:
    """GB/s read by one core and by all, from arrays far beyond the caches; the best of some rounds."""
    data = torch.ones(mib * 2**18)
    read, how = _reader()
    out: dict[str, Any] = {"how": how}
    for name, n in (("one", 1), ("all", cores())):
        parts = data.chunk(n)
        best = min(_timed(read, parts) for _ in range(repeats))
        out[name] = round(data.numel() * 4 / best / 1e9, 1)
    return out


def _timed(read: Any, parts: tuple[torch.Tensor, ...]) -> float:
    """Seconds from the moment all threads stand at the line until the last has read its part."""
    line = threading.Barrier(len(parts) + 1)

    def run(part: torch.Tensor) -> None:
        line.wait()
        read(part)
        line.wait()

    threads = [threading.Thread(target=run, args=(p,)) for p in parts]
    for t in threads:
        t.start()
    line.wait()
    start = perf_counter()
    line.wait()
    seconds = perf_counter() - start
    for t in threads:
        t.join()
    return seconds


def _reader() -> tuple[Any, str]:
    """Something that reads a tensor and lets other threads run meanwhile: compiled C, or torch's sum without a compiler."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "read.c"), Path(folder, "read.so")
            source.write_text(READ)
            done = subprocess.run(
                [compiler, "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", str(source), "-o", str(library)],
                capture_output=True,
            )
            if done.returncode == 0:
                function = ctypes.CDLL(str(library)).read_all
                function.restype, function.argtypes = ctypes.c_float, [ctypes.c_void_p, ctypes.c_long]
                return lambda t: function(t.data_ptr(), t.numel()), "compiled loop"
    torch.set_num_threads(1)
    return lambda t: t.sum(), "torch.sum"


def main() -> None:
    print(json.dumps({**facts(), "read_gb_per_second": bandwidth()}, indent=1))


if __name__ == "__main__":
    main()
