"""`outrider doctor`: what this machine and this installation have, and a line to type for what is wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

import typer

from outrider.cli.options import Debug
from outrider.cli.terminal import GREEN, RED, YELLOW, home, paint, readable, working
from outrider.core.extras import install

PORT = 8000


@dataclass(frozen=True)
class Check:
    """What was looked at, and what was found. fix: a line to type. wrong: whether outrider is slow or fails without it."""

    name: str
    found: str
    fix: str = ""
    wrong: bool = False


def doctor(debug: Debug = False) -> None:
    """Check this machine and this installation. Exit code 1: something is wrong; the line after it says what to type."""
    with readable(debug):
        with working("looking at this machine"):
            checks = [*_machine(), _cache(), *_packages(), _port()]
        width = max(len(check.name) for check in checks)
        for check in checks:
            mark = paint("✗", RED) if check.wrong else paint("-", YELLOW) if check.fix else paint("✓", GREEN)
            print(f"{mark} {check.name:<{width}}  {check.found}")
            if check.fix:
                print(f"  {'':<{width}}  {check.fix}")
        raise typer.Exit(int(any(check.wrong for check in checks)))


def _machine() -> list[Check]:
    import torch

    from outrider.kernels import cpu as native
    from outrider.kernels.machine import machine
    from outrider.models.checkpoint import free_memory

    facts = machine()
    versions = ", ".join(f"{name} {facts[name]}" for name in ("outrider", "python", "torch", "transformers"))
    threads = f"{native.num_threads()} threads" if native.available() else f"{torch.get_num_threads()} threads of torch"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none; models run on the CPU"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    rebuild = (
        "pip install --force-reinstall --no-deps .   # in the checkout"  # without kernels torch does it all, and slower
    )
    kernels = f"compiled, for {native.isa()}" if native.available() else f"not in use: {native.why()}"
    free = free_memory(torch.device("cpu"))
    return [
        Check("versions", versions),
        Check("processor", f"{facts['cpu']}; {facts['cores']} cores, {threads}"),
        Check("kernels", kernels) if native.available() else Check("kernels", kernels, rebuild, wrong=True),
        Check("memory", f"{free / 1e9:.1f} GB are free" if free else "this system does not say"),
        Check("torch", f"{build}; GPU: {gpu}"),
    ]


def _cache() -> Check:
    """The cache folder, with its size, and whether files can be written there."""
    from outrider.core.files import cache_folder

    folder = cache_folder()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(there, os.W_OK):
        return Check("cache", f"{home(folder)}: {size / 1e6:.1f} MB")
    return Check("cache", f"{home(there)} cannot be written", "export XDG_CACHE_HOME=$HOME/.cache", True)


def _packages() -> Iterator[Check]:
    """The optional packages of each extra that are missing."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in requires("outrider") or ()]
    for extra in ("data", "serve", "grammar", "bench", "certify", "ray", "otel"):
        needed = [r.name for r in wanted if r.marker and r.marker.evaluate({"extra": extra})]
        missing = ", ".join(name for name in needed if not _installed(name))
        yield (
            Check(f"extra {extra}", f"missing: {missing}", install(extra))
            if missing
            else Check(f"extra {extra}", "installed")
        )


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _port() -> Check:
    """Whether the usual port of `outrider serve` is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return Check("port", f"{PORT} is in use", "outrider serve MODEL --port 0   # takes a free port")
    return Check("port", f"{PORT} is free")
