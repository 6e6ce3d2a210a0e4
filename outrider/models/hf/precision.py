"""One default precision of torch for all threads.

transformers changes it while it makes a model of 16 bits. A forward of a module in another thread would then make tensors of 16
bits where native code writes 32. So none runs meanwhile: that takes a fraction of a second, because the model has no memory yet.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

FORWARD = threading.RLock()
"""Held by a forward, and while the precision is another."""
_makes = threading.RLock()  # transformers changes functions of torch, too, so two threads cannot make models


@contextmanager
def making() -> Generator[None, None, None]:
    """Let transformers make a model inside, one thread at a time. While the precision is another, forwards of others wait."""
    with _makes:
        change, usual, held = torch.set_default_dtype, torch.get_default_dtype(), False

        def guarded(dtype: torch.dtype) -> None:
            nonlocal held
            if dtype != usual and not held:
                FORWARD.acquire()
            elif dtype == usual and held:
                FORWARD.release()
            held = dtype != usual
            change(dtype)

        torch.set_default_dtype = guarded
        try:
            yield
        finally:
            guarded(usual)
            torch.set_default_dtype = change
