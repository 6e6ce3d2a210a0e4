"""The one loaded library of this process, and its threads."""

from __future__ import annotations

import os
from functools import cache

import torch

from outrider.native._library import Library, load


@cache
def _loaded() -> tuple[Library | None, str | None]:
    found, why = load()
    if found is not None:
        found.set_threads(default_threads())
    return found, why


def default_threads() -> int:
    """As many as this process may run on, and no more than torch was given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, torch.get_num_threads()))


def available() -> bool:
    """Whether the native kernels can be used."""
    return _loaded()[0] is not None


def why() -> str | None:
    """Why they cannot, or None."""
    return _loaded()[1]


def library() -> Library:
    """The loaded library. Raises RuntimeError where there is none."""
    found, reason = _loaded()
    if found is None:
        raise RuntimeError(f"outrider's native kernels are not to be had: {reason}")
    return found


def isa() -> str:
    """The instruction set in use: portable, avx2 or avx512."""
    return library().isa().decode()


def use_isa(name: str) -> bool:
    """Switch the instruction set; False where this processor does not have it. For tests: results do not change."""
    return bool(library().select_isa(name.encode()))


def num_threads() -> int:
    return library().threads()


def set_num_threads(threads: int) -> None:
    """How many threads the kernels may use. Changes speed, never a bit of a result."""
    if threads < 1:
        raise ValueError(f"at least one thread is needed, got {threads}")
    library().set_threads(threads)
