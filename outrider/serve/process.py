"""What a server sets for its whole process."""

from __future__ import annotations

import gc
import sys

SWITCH = 0.0005  # seconds that a thread keeps Python to itself while the engine's waits for it


def prepare() -> None:
    """Make a process ready to serve, when its first model is loaded."""
    sys.setswitchinterval(SWITCH)
    settle()


def settle() -> None:
    """Let the garbage collector leave out what is there now: to look through a model again stops every thread for a fifth of a
    second."""
    gc.collect()
    gc.freeze()


def release() -> None:
    """Free what a model leaves. What is there afterwards stays."""
    gc.unfreeze()
    settle()
