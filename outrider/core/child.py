"""A child process that answers questions, and that is ended when one takes too long or too much memory.

Some work can be stopped by nothing else: a grammar that is compiled in native code, a chat template that loops.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

START_SECONDS = 120.0  # for a child on a busy machine
MEMORY = 1 << 30  # bytes that a child may take for an answer
LIMITED = sys.platform == "linux"  # macOS does not obey a limit of memory, and Windows has none
STEP = 0.02  # seconds between two looks at the memory of a child without a limit


class TooSlow(ValueError):
    """An answer did not come in time."""


class Child:
    """Asks one question after the other. The child starts at the first one, and anew after it was ended.

    One thread may ask. Another may close it.
    """

    def __init__(self, module: str, setup: Any, deed: str, advice: str) -> None:
        """module: has the `prepare` that the child gives to `answer`. setup: JSON that the child reads first.

        deed, advice: for messages, as in "it needs more than 1 s {to compile}; {make it smaller}".
        """
        self._module, self._setup, self._deed, self._advice = module, setup, deed, advice
        self._process: subprocess.Popen[str] | None = None
        self._ready = self._closed = False
        self._allowed: int | None = None  # bytes that the child may have, where this process must look
        self._late = False

    def start(self) -> None:
        """Wait until the child is ready. Raises ChildProcessError if it cannot start."""
        if not self._ready and not self._closed:
            self._spawn()
            if self._exchange(self._setup, START_SECONDS) is None:
                raise ChildProcessError("the child process did not start")
            self._bound_memory()
            self._ready = True

    def ask(self, question: Any, seconds: float) -> Any:
        """What the child answers. question, answer: JSON. seconds: from the moment when the child begins.

        Raises TooSlow after them, ValueError for what the child refuses and for what needs too much memory, and
        ChildProcessError if the child cannot start.
        """
        self.start()
        reply = self._exchange([question, seconds], seconds)
        if reply is None:
            self._ready = False
            if self._closed:
                raise ChildProcessError("the child process has ended")
            self._spawn()  # so that the next question need not wait for it
            if self._late:
                raise TooSlow(f"it needs more than {seconds:g} s {self._deed}; {self._advice}")
            raise ValueError(f"it needs more than {MEMORY >> 20} MB {self._deed}; {self._advice}")
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        """End the child, also in the middle of an answer."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _spawn(self) -> None:
        if self._process is not None:
            if self._process.poll() is None and not self._ready:
                return  # it was started ahead
            self._end()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import answer; import {self._module} as own; "
        code += "answer(own.prepare)"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries write warnings there
            encoding="utf-8",
        )

    def _exchange(self, line: Any, seconds: float) -> dict[str, Any] | None:
        """What the child answers; None if it ended, and it is ended after so many seconds."""
        child = self._process
        if child is None:
            return None
        assert child.stdin is not None
        assert child.stdout is not None
        until, allowed, answered = time.monotonic() + seconds, self._allowed, threading.Event()

        def watch() -> None:
            while not answered.wait(min(max(0.0, until - time.monotonic()), STEP if allowed else seconds)):
                if time.monotonic() >= until or (allowed and _resident(child.pid) > allowed):
                    child.kill()
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        reply = ""
        with suppress(OSError):
            child.stdin.write(json.dumps(line) + "\n")
            child.stdin.flush()
            reply = child.stdout.readline()
        answered.set()
        watcher.join()
        self._late = time.monotonic() >= until
        if reply.endswith("\n") and not self._late:
            return json.loads(reply)
        self._end()
        return None

    def _bound_memory(self) -> None:
        """Let the child take `MEMORY` bytes more than it has."""
        assert self._process is not None
        pid = self._process.pid
        if not LIMITED:
            self._allowed = _resident(pid) + MEMORY
            return
        with suppress(OSError, ValueError, psutil.Error):  # a limit of the user can be lower
            import resource

            limit = psutil.Process(pid).memory_info().vms + MEMORY
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))

    def _end(self) -> None:
        self._allowed = None
        child, self._process = self._process, None
        if child is not None:
            child.kill()
            with suppress(OSError):
                child.communicate()


def answer(prepare: Callable[[Any], Callable[[Any], Any]]) -> None:
    """The child: read the setup, then answer questions, a line each, until there are no more.

    prepare: takes the setup, and gives the function from a question to its answer. What that raises is the answer.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    act = prepare(json.loads(sys.stdin.readline()))
    say({})
    for line in sys.stdin:
        question, seconds = json.loads(line)
        # if the parent no longer can end this process, a thread without Python does
        faulthandler.dump_traceback_later(seconds + 1, exit=True)
        try:
            say({"answer": act(question)})
        except Exception as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                os._exit(1)
            say({"error": str(error)})
        faulthandler.cancel_dump_traceback_later()


def give_way() -> None:
    """Let this thread, and processes that it starts, have a quarter of a core that others need. Only Linux has it."""
    with suppress(AttributeError, OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 5)


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory. 0 if it has ended."""
    with suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0
