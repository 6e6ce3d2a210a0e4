"""An object that is made when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any


class Lazy:
    """Stands for the object that `make` gives, which is called when anything is asked of it. Threads may share it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, RLock()
        self._complete: Any = None

    @property
    def complete(self) -> Any:
        if self._complete is None:
            with self._lock:
                self._complete = self._make() if self._complete is None else self._complete
        return self._complete

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.complete, name)
