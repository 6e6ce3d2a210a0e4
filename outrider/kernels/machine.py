"""What numbers were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outrider._version import __version__
from outrider.kernels import cpu as native


def machine() -> dict[str, Any]:
    """Processor, cores, kernels, versions. Nothing that names its owner or folders."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    why = native.why()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "kernels": "native" if native.available() else f"oneDNN (native kernels are not in use: {why})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "outrider": __version__,
    }
