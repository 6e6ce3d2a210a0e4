"""One default precision of torch for all threads.

transformers changes it while it makes a model of 16 bits. A forward in another thread would then make tensors of 16 bits where
native code writes 32. So no step runs meanwhile: that takes a fraction of a second, because the model has no memory yet.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

_makes = threading.RLock()  # transformers changes functions of torch, too, so two threads cannot
_changed = threading.Condition()
_steps = dict[int, int]()  # by thread: how deep it is inside of steps
_closed = False


@contextmanager
def step() -> Generator[None, None, None]:
    """Compute inside. It waits until the precision is torch's own."""
    me = threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: not _closed or me in _steps)
        _steps[me] = _steps.get(me, 0) + 1
    try:
        yield
    finally:
        with _changed:
            _steps[me] -= 1
            if not _steps[me]:
                del _steps[me]
            _changed.notify_all()


@contextmanager
def making() -> Generator[None, None, None]:
    """Let transformers make a model inside, one thread at a time. While the precision is another, steps of others wait."""
    me = threading.get_ident()

    def guarded(dtype: torch.dtype) -> None:
        global _closed
        with _changed:
            _closed = dtype != usual
            if _closed:
                _changed.wait_for(lambda: not _steps.keys() - {me})
            change(dtype)
            _changed.notify_all()

    with _makes:
        change, usual = torch.set_default_dtype, torch.get_default_dtype()
        torch.set_default_dtype = guarded
        try:
            yield
        finally:
            torch.set_default_dtype = change
            guarded(usual)
