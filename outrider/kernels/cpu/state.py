"""The one loaded library of this process, and its threads."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

from outrider.core.files import content_digest
from outrider.kernels.cpu.library import Library, load


@cache
def _loaded() -> tuple[Library | None, str | None]:
    lib, why = load()
    if lib is not None:
        places = _places()
        lib.set_cores((ctypes.c_int32 * len(places))(*places), len(places))
        lib.set_threads(default_threads())
    return lib, why


def default_threads() -> int:
    """One for each core that this process may use, and at most OMP_NUM_THREADS, as other programs understand it."""
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, min(len(_places()) or _cores(), int(limit) if limit.isdecimal() else sys.maxsize))


def _cores() -> int:
    """Cores, not the processors that share one; of Apple's, the fast ones."""
    if sys.platform == "darwin":
        count, size = ctypes.c_int(), ctypes.c_size_t(4)
        asked = ctypes.CDLL(None).sysctlbyname(
            b"hw.perflevel0.physicalcpu", ctypes.byref(count), ctypes.byref(size), None, 0
        )
        return (0 if asked else count.value) or os.cpu_count() or 1
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set[str]()
    for processor in os.sched_getaffinity(0):
        shared = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        cores.add(shared.read_text() if shared.exists() else str(processor))
    return len(cores)


def _places() -> list[int]:
    """The processors of OpenMP's places; empty if OpenMP binds no threads.

    If OMP_PROC_BIND or OMP_PLACES is set, OpenMP has bound the calling thread to one processor. New threads would share that
    processor, so ours are bound to these places.
    """
    try:
        openmp = ctypes.CDLL(None)
        processors: list[int] = []
        for place in range(openmp.omp_get_num_places()):
            ids = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
            openmp.omp_get_place_proc_ids(place, ids)
            processors += ids
    except (AttributeError, OSError, TypeError):  # no OpenMP is loaded; Windows has no CDLL(None)
        return []
    return sorted(set(processors))


def available() -> bool:
    """Whether the native kernels can be used."""
    return _loaded()[0] is not None


def why() -> str | None:
    """Why the native kernels cannot be used, or None."""
    return _loaded()[1]


def library() -> Library:
    """The loaded library. Raises RuntimeError with the reason if there is none."""
    lib, reason = _loaded()
    if lib is None:
        raise RuntimeError(f"outrider's native kernels are not available: {reason}")
    return lib


def build() -> str:
    """What the kernels' speed depends on: a digest of the compiled library, and the instruction set in use; "none" without."""
    return f"{content_digest([library().path])[:16]} {isa()}" if available() else "none"


def isas() -> tuple[str, ...]:
    """The instruction sets that the library was compiled for, the slowest first. This processor may lack some."""
    return tuple(library().isas().decode().split()) if available() else ()


def isa() -> str:
    """The instruction set in use, one of `isas()`."""
    return library().isa().decode()


def use_isa(name: str) -> bool:
    """Switch the instruction set. False if this processor does not have it. For tests: results do not change."""
    return bool(library().select_isa(name.encode()))


def num_threads() -> int:
    return library().threads()


def set_num_threads(threads: int) -> None:
    """Set how many threads the kernels may use. This changes only the speed. Raises ValueError for fewer than one."""
    if threads < 1:
        raise ValueError(f"at least one thread is needed, got {threads}")
    library().set_threads(threads)
