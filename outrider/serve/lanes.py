"""Work that may never end, each piece in a child process and under a clock, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from outrider.core.child import Child, TooSlow

T = TypeVar("T")
SECONDS = (1.0, 10.0)  # of the first try and of the second


class Lanes:
    """Two children. A slow question moves to the second one, so that the others need not wait for it."""

    def __init__(self, name: str, make: Callable[[], Child]) -> None:
        """name: of the threads. make: a new child; it starts at its first question."""
        self._pools = [ThreadPoolExecutor(1, name) for _ in SECONDS]
        self._make, self._children = make, dict[int, Child]()

    def start(self) -> None:
        """Start the first child now, so that the first question need not wait for it."""
        self._pools[0].submit(lambda: self._child(0).start())

    async def ask(self, act: Callable[[Child, float], T]) -> T:
        """What `act` gives with a child and its seconds. Raises what it raises; TooSlow after the second try."""
        loop, last = asyncio.get_running_loop(), len(SECONDS) - 1
        for lane in range(last):
            with suppress(TooSlow):
                return await loop.run_in_executor(self._pools[lane], self._act, act, lane)
        return await loop.run_in_executor(self._pools[last], self._act, act, last)

    def close(self) -> None:
        """End the children and the threads, also in the middle of an answer."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for child in self._children.values():
            child.close()

    def _act(self, act: Callable[[Child, float], T], lane: int) -> T:
        return act(self._child(lane), SECONDS[lane])

    def _child(self, lane: int) -> Child:
        if lane not in self._children:
            self._children[lane] = self._make()
        return self._children[lane]
