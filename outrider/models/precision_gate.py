"""One default precision of torch for all threads.

transformers changes it while it makes a model of 16 bits. A forward of a module in another thread would then make tensors of 16
bits where native code writes 32. So none runs meanwhile: that takes a fraction of a second, because the model has no memory yet.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ContextDecorator, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_makes = threading.RLock()  # transformers changes functions of torch, too, so two threads cannot
_lock = threading.Lock()
_changed = threading.Condition(_lock)
_forwards = dict[int, int]()  # by thread: how deep it is inside of forwards
_closed = _guarded = False


class _PrecisionHeld(ContextDecorator):
    """Waits until the precision is torch's own, which stays as long as the forward is inside."""

    def __enter__(self) -> None:
        me = threading.get_ident()
        with _lock:
            while _closed and me not in _forwards:
                _changed.wait()
            _forwards[me] = _forwards.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with _lock:
            if (depth := _forwards.pop(me) - 1) > 0:
                _forwards[me] = depth
            if _closed:
                _changed.notify_all()


FORWARD = _PrecisionHeld()


@contextmanager
def making() -> Generator[None, None, None]:
    """Let transformers make a model inside, one thread at a time. While the precision is another, forwards of others wait."""
    global _guarded
    import torch

    me = threading.get_ident()

    def guarded(dtype: torch.dtype) -> None:
        global _closed
        with _changed:
            _closed = dtype != usual
            if _closed:
                _changed.wait_for(lambda: not _forwards.keys() - {me})
            change(dtype)
            _changed.notify_all()

    with _makes:
        if _guarded:  # this thread is inside already
            yield
            return
        change, usual = torch.set_default_dtype, torch.get_default_dtype()
        torch.set_default_dtype, _guarded = guarded, True
        try:
            yield
        finally:
            torch.set_default_dtype, _guarded = change, False
            guarded(usual)
