"""In PYTHONPATH beside OUTRIDER_LOOP_LOG: each server of uvicorn writes the pauses of its event loop to that file.

A line is a pause: `at`, its end by `perf_counter`; `pause`, seconds that a timer was late; of these, `ran`, in which the loop's
thread had a core, and `queued`, in which it waited for one. In the rest it waited for other threads. `stack`: where.
"""

from __future__ import annotations

import os
import sys

EVERY, WRITTEN = 0.01, 0.02  # seconds: between two looks, and of the shortest pause that is written


def watch(file: str) -> None:
    """Call it in the thread of a running loop."""
    import asyncio
    import json
    import threading
    import traceback
    from pathlib import Path
    from time import perf_counter, sleep

    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    clock = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    log = open(file, "a", buffering=1)  # noqa: SIM115
    due, before, stack = perf_counter() + EVERY, clock.read_text().split(), list[str]()

    def look() -> None:
        nonlocal due, before
        now, times = perf_counter(), clock.read_text().split()
        ran, queued = ((int(b) - int(a)) / 1e9 for a, b in zip(before[:2], times[:2], strict=True))
        if now - due > WRITTEN:
            found = {"pid": os.getpid(), "at": now, "pause": now - due, "ran": ran, "queued": queued}
            log.write(json.dumps({**found, "stack": stack[-6:]}) + "\n")
        stack.clear()
        due, before = now + EVERY, times
        loop.call_later(EVERY, look)

    def sample() -> None:
        while True:
            sleep(2 * EVERY)
            if perf_counter() - due > 2 * WRITTEN and not stack:
                frame = sys._current_frames().get(thread)
                stack.extend(f"{f.filename[-40:]}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame))

    loop.call_later(EVERY, look)
    threading.Thread(target=sample, daemon=True).start()


if "OUTRIDER_LOOP_LOG" in os.environ and "-c" not in sys.orig_argv:  # servers' children for hostile work have it
    import uvicorn.server

    startup = uvicorn.server.Server.startup

    async def started(self, sockets=None) -> None:
        await startup(self, sockets)
        watch(os.environ["OUTRIDER_LOOP_LOG"])

    uvicorn.server.Server.startup = started  # type: ignore[method-assign]
