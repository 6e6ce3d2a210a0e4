"""`outrider doctor`: what this machine and this installation have, and a line to type for what is wrong or slow."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from timeit import repeat
from typing import Any

import typer

from outrider.cli.command import as_command
from outrider.cli.options import parse_speculative_config
from outrider.cli.terminal import GREEN, RED, YELLOW, home, loading, paint, working
from outrider.core.extras import USES, install
from outrider.serve.options import LoadOptions

READ = 2**28  # bytes that are read for the bandwidth, more than most caches hold
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Check:
    """What was looked at."""

    name: str
    result: str
    fix: str = ""
    """A line to type."""
    wrong: bool = False
    """Whether outrider is slow or fails without the fix."""


@as_command(
    "Look inside",
    "outrider doctor",
    "outrider doctor builtin:code",
    """outrider doctor ./my-model --speculative-config '{"model": "./my-small-model"}'""",
)
def doctor(
    model: str | None = None,
    *,
    speculative_config: str = '{"method": "auto"}',
    load: LoadOptions,
) -> None:
    """Check this machine and this installation, and say what to change for speed. Exit code 1: something is wrong.

    With MODEL, it also measures what steps and drafts of this model cost here. Every command does so for a second when it first
    loads a model. This measures more sizes, more often. Later runs with the same model and settings start from the result.

    Args:
        model: Measure the costs of this model: a folder, a GGUF file, a hub name or a built-in model.
        speculative_config (JSON|FILE): How MODEL speculates, as JSON or a file with it. auto tries all methods.
    """
    with working("looking at this machine"):
        checks = [*_machine(), *memory_checks(), _cache(), *package_checks()]
    margin = max(len(check.name) for check in checks) + 4
    columns = shutil.get_terminal_size().columns
    for check in checks:
        mark = paint("✗", RED) if check.wrong else paint("-", YELLOW) if check.fix else paint("✓", GREEN)
        first, *more = textwrap.wrap(check.result, columns - margin, break_on_hyphens=False)
        print(f"{mark} {check.name:<{margin - 2}}{first}")
        for line in (*more, check.fix):
            if line:
                print(" " * margin + line)
    if model is not None:
        show_costs(model, parse_speculative_config(speculative_config), load)
    raise typer.Exit(int(any(check.wrong for check in checks)))


def show_costs(model: str, config: dict[str, Any], load: LoadOptions) -> None:
    """Measure what a model's steps and drafts cost, keep that for later runs, and print it.

    Raises ValueError for a configuration that is not planned with costs.
    """
    with loading(model):
        from outrider.core.files import cache_folder
        from outrider.engine.llm import LLM

        llm = LLM(model, speculative_config=config, calibrate=True, **dict(load))
    roster = llm.runtime.roster
    if roster is None or roster.planner.lengths is not None:
        raise ValueError(
            f"{config} uses no measured costs: nothing drafts, or its controller is fixed. "
            'Measure for example {"method": "auto"}'
        )
    costs = roster.planner.costs.model
    plain = costs.forward(1)
    print(f"A plain step, which writes one token, takes {1000 * plain:.1f} ms.")
    for nodes, seconds in sorted(costs.target.items()):
        if nodes > 1:
            tokens = f"{nodes - 1} draft token{'s' if nodes > 2 else ''}"
            print(f"  to check {tokens:<15} {seconds / plain:.2f} plain steps")
    for name, cost in costs.drafters.items():
        reads = f", {1000 * cost.read:.2g} ms to read a token of the prompt" if cost.read else ""
        print(f"  {name} drafts a token in {cost.level / plain:.2f} plain steps{reads}")
    print(f"The costs are kept in {cache_folder()}.")


def _machine() -> Iterator[Check]:
    from outrider.kernels.machine import machine

    facts = machine()
    names = ("outrider", "python", "numpy", "torch", "transformers")
    yield Check("versions", ", ".join(f"{name} {facts[name]}" for name in names if name in facts))
    if "torch" in facts:
        import torch

        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        if torch.cuda.is_available():
            yield Check("torch", build)
            yield from gpu_checks()
        else:
            yield Check("torch", f"{build}; GPU: none; models run on the CPU")
    yield Check("processor", facts["cpu"])
    yield instruction_set()
    yield thread_check(facts["cores"])


def gpu_checks() -> Iterator[Check]:
    """The card that torch takes: what it has, and what runs models there."""
    import torch

    from outrider.kernels import OWN_GPU, gpu

    card, (free, whole) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
    speed = f", copies {copy_speed() / 1e9:,.0f} GB/s" if free > 4 * READ else ""
    memory = f"{free / 1e9:.1f} of {whole / 1e9:.1f} GB are free"
    yield Check("GPU", f"{card.name}: compute capability {card.major}.{card.minor}, {memory}{speed}")
    others, asked = "the modelling code of transformers", os.environ.get(OWN_GPU) == "1"
    unmeasured = "they are proved by emulation and were not measured on a card yet"
    if why := gpu.why_not("cuda"):
        yield Check("models on it", f"{others}, because our kernels cannot run: {why}")
    elif asked:
        what = f"our kernels, because {OWN_GPU}=1 is set, and {others} for those that they cannot run; {unmeasured}"
        yield Check("models on it", what, f"unset {OWN_GPU}   # {others}")
    else:
        yield Check("models on it", f"{others}. Our kernels could: {unmeasured}", f"export {OWN_GPU}=1   # to try them")


def fastest(act: Callable[[], object]) -> float:
    """Seconds of the fastest of five passes: other programs can only slow a pass down."""
    return min(repeat(act, number=1, repeat=5))


def copy_speed(size: int = READ) -> float:
    """Bytes that a GPU reads and writes a second, when it copies `size` bytes. The fastest pass counts."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    torch.cuda.synchronize()
    return 2 * size / fastest(lambda: (target.copy_(source), torch.cuda.synchronize()))


def instruction_set() -> Check:
    """Which variant of the kernels runs, and why it is that one."""
    from outrider.kernels import cpu as native

    if not native.available():
        rebuild = "pip install --force-reinstall --no-deps .   # in the checkout"
        return Check("kernels", f"not in use, and torch is slower: {native.why()}", rebuild, wrong=True)
    chosen, every = native.isa(), native.isas()
    if asked := os.environ.get("OUTRIDER_ISA"):
        return Check("kernels", f"{chosen}, because OUTRIDER_ISA={asked} is set", "unset OUTRIDER_ISA   # the fastest")
    lacks = ", ".join(every[every.index(chosen) + 1 :][::-1])
    return Check("kernels", f"{chosen}: " + (f"the processor lacks {lacks}" if lacks else "the fastest of this build"))


def thread_check(cores: int) -> Check:
    """The threads of the kernels, and the settings of OpenMP that slow them."""
    from outrider.kernels import cpu as native

    threads = native.num_threads() if native.available() else cores
    summary = f"{cores} for this process, {threads} thread{'s' * (threads > 1)}"
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit and threads < cores:
        return Check("cores", f"{summary}, because of OMP_NUM_THREADS={limit}", "unset OMP_NUM_THREADS")
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        waits = "OMP_WAIT_POLICY=ACTIVE: waiting threads take the time of working ones"
        return Check("cores", f"{summary}; {waits}", "unset OMP_WAIT_POLICY")
    return Check("cores", summary)


def memory_checks() -> Iterator[Check]:
    """Memory: how much is free, how fast it is read, and whether it has large pages."""
    from outrider.kernels import cpu as native
    from outrider.models.checkpoint import free_memory

    free = free_memory("cpu")
    yield Check("memory", f"{free / 1e9:.1f} GB are free" if free else "this system does not say how much is free")
    if native.available() and free > 4 * READ:
        speed = read_speed() / 1e9
        most = f"1 GB of weights gives at most {speed:.1f} tokens/s without drafts"
        yield Check("bandwidth", f"{speed:.1f} GB/s, fewer when other programs run: {most}")
    if PAGES.exists():
        setting = PAGES.read_text().partition("[")[2].partition("]")[0]
        off = setting == "never"
        fix = f"echo madvise | sudo tee {PAGES}" if off else ""
        yield Check("large pages", f"{setting}: " + ("weights cannot have them" if off else "weights have them"), fix)


def read_speed(size: int = READ) -> float:
    """Memory bandwidth in bytes per second, of all threads together. Needs the native kernels.

    Measured with the linear layer that reads a model's weights: a vector times a matrix of `size` bytes.
    """
    import numpy as np

    from outrider.kernels import cpu as native

    width = 4096
    matrix = native.Packed([np.broadcast_to(np.float32(1), (size // (4 * width), width))], "float32")
    row = np.ones((1, width), np.float32)
    return matrix.bytes / fastest(lambda: matrix.linear(row))


def _cache() -> Check:
    """The cache folder, with its size, and whether files can be written there."""
    from outrider.core.files import cache_folder

    folder = cache_folder()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(there, os.W_OK):
        return Check("cache", f"{home(folder)}: {size / 1e6:.1f} MB")
    return Check("cache", f"{home(there)} cannot be written", "export XDG_CACHE_HOME=$HOME/.cache", True)


def package_checks() -> Iterator[Check]:
    """The extras, what each is for, and the packages that others lack."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in requires("outrider") or ()]
    for extra, use in USES.items():
        needed = [r.name for r in wanted if r.marker and r.marker.evaluate({"extra": extra})]
        missing = ", ".join(name for name in needed if not _installed(name))
        yield Check(f"extra {extra}", f"{use}{'; missing: ' * bool(missing)}{missing}", install(extra) * bool(missing))


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
