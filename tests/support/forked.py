"""The command line in a process whose imports are done: a fork of a process that only imported.

The imports of a new process take four seconds, most of its time in a test. Tests of how a process starts begin a new one.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import termios
from collections.abc import Mapping
from multiprocessing.connection import Connection

from patience import PATIENCE

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "outrider.cli.main", "outrider.engine.llm", "outrider.serve.app", "outrider.models.hf", "outrider.models.native.model",
        "outrider.models.gguf.model", "transformers.modeling_utils", "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
    ]
)  # fmt: skip
COMMAND = "from outrider.cli.main import main; main()"


class Forked:
    """A process of the command line. Use it in a `with` block, whose end kills it.

    stdout: a pipe of text, without a terminal. said: what the process wrote to its standard error so far.
    """

    def __init__(
        self, *words: str, code: str = COMMAND, terminal: int | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        """words: of the command line. code: what Python runs with them. terminal: a descriptor for all three streams."""
        read, write = os.pipe()
        self.stdout, self._stderr = open(read), tempfile.TemporaryFile()  # noqa: SIM115
        with open(write, "w") as pipe, open(os.devnull) as nothing:
            given = [nothing.fileno(), pipe.fileno(), self._stderr.fileno()] if terminal is None else [terminal] * 3
            ends = [Connection(os.dup(end)) for end in given]
        self._process = FORKS.Process(target=_run, args=(code, words, dict(environment), ends, terminal is not None))
        self._process.start()
        for end in ends:
            end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def said(self) -> str:
        return os.pread(self._stderr.fileno(), 1 << 20, 0).decode()

    def poll(self) -> int | None:
        """The exit code, or minus the number of a signal. None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code. It fails for a process that hangs."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, "it hangs"
        return self._process.exitcode

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self.stdout.close()
        self._stderr.close()


def _run(
    code: str, words: tuple[str, ...], environment: dict[str, str], ends: list[Connection], terminal: bool
) -> None:
    """What the process does: streams, terminal, signals and environment of a new one, then the code."""
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    if terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["outrider", *words]
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
