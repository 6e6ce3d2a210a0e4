"""Work that may never end, each piece in a child process and under a clock, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from outrider.core.child import Child, TooSlow, give_way

T = TypeVar("T")
SECONDS = (1.0, 10.0)  # of the first try and of the second


class Lanes:
    """Two children. A slow question moves to the second one, which gives way, so that the others need not wait for it."""

    def __init__(self, name: str, make: Callable[[], Child]) -> None:
        """name: of the threads. make: a new child; it starts at its first question."""
        kinds = zip((None, give_way), SECONDS, strict=True)
        self._lanes = [(ThreadPoolExecutor(1, name, act), make(), seconds) for act, seconds in kinds]

    def start(self) -> None:
        """Start the first child now, so that the first question need not wait for it."""
        pool, child, _ = self._lanes[0]
        pool.submit(child.start)

    async def ask(self, act: Callable[[Child, float], T]) -> T:
        """What `act` gives with a child and its seconds. Raises what it raises; TooSlow after the second try."""
        loop, (first, last) = asyncio.get_running_loop(), self._lanes
        with suppress(TooSlow):
            return await loop.run_in_executor(first[0], act, *first[1:])
        return await loop.run_in_executor(last[0], act, *last[1:])

    def close(self) -> None:
        """End the children and the threads, also in the middle of an answer."""
        for pool, child, _ in self._lanes:
            pool.shutdown(wait=False, cancel_futures=True)
            child.close()
