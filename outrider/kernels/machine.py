"""What numbers were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider._version import __version__
from outrider.kernels import cpu as native


def machine() -> dict[str, Any]:
    """Processor, cores, kernels, versions. Nothing that names its owner or folders."""
    why, packages = native.why(), dict[str, Any]()
    for name in ("numpy", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "kernels": "native" if native.available() else f"oneDNN (native kernels are not in use: {why})",
        "python": platform.python_version(),
        **packages,
        "outrider": __version__,
    }


def _processor() -> str:
    """The processor's name, as far as the system says it."""
    with suppress(OSError, StopIteration, subprocess.SubprocessError):
        if sys.platform == "darwin":
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    return platform.processor() or platform.machine()
