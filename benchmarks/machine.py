"""What is measured on: the machine and the versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT

FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far. Linux; see clock_getcpuclockid."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def version(package: str) -> str:
    """The version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def facts() -> dict[str, Any]:
    """Processor, memory, versions, commit, date. Nothing that names the machine's owner or its folders."""
    flags = set(_field("/proc/cpuinfo", "flags").split())
    kib = _field("/proc/meminfo", "MemTotal").removesuffix(" kB")
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "family": "/".join(_field("/proc/cpuinfo", n) for n in ("cpu family", "model")),
        "cores": cores(),
        "isa": [flag for flag in FLAGS if flag in flags],
        "cache": _field("/proc/cpuinfo", "cache size"),
        "memory_gib": round(int(kib) / 2**20, 1) if kib.isdigit() else None,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "outrider": version("outrider"),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), "")


def _commit() -> str:
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
