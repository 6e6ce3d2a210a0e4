"""A command in a terminal of 80 columns, as a person has it: what it shows is waited for, and keys are typed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable

from forked import COMMAND, Forked
from patience import PATIENCE


class Terminal:
    """Use it in a `with` block. shown: everything so far, with "\\n" for a new line."""

    def __init__(self, *words: str, code: str = COMMAND, **environment: str) -> None:
        """words: of the command line. code: what Python runs with them."""
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS", "LINES")}

        shown = {"TERM": "xterm", "NO_COLOR": "1", **environment}
        self.process = Forked(*words, code=code, terminal=follower, environment=kept | shown)
        os.close(follower)
        self._bytes = b""

    @property
    def marks_pastes(self) -> bool:
        """Whether the command asked the terminal to mark the begin and the end of a paste."""
        return b"\x1b[?2004h" in self._bytes

    @property
    def shown(self) -> str:
        text = re.sub(r"\x1b\[\?2004[hl]\r?", "", self._bytes.decode(errors="replace"))
        return text.replace("\r\n", "\n")

    def wait_for(self, text: str, count: int = 1) -> str:
        """Read until the text was shown so often. Returns what was shown."""
        return self.wait_until(lambda shown: shown.count(text) >= count, repr(text))

    def wait_until(self, good: Callable[[str], bool], what: str = "that") -> str:
        """Read until what was shown is good. Returns it."""
        end = time.monotonic() + PATIENCE
        while not good(self.shown):
            if time.monotonic() > end:  # a guard against a command that hangs
                raise AssertionError(f"{what} was not shown in {self.shown!r}")
            assert self._read(), f"{what} was not shown, and the command has ended: {self.shown!r}"
        return self.shown

    def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def interrupt(self, text: str) -> None:
        """Press ctrl-C until the text is shown. Python may miss one between its prompt and its wait for a key."""
        while text not in self.shown:
            self.type("\x03")
            while text not in self.shown and select.select([self._leader], [], [], 2)[0]:
                assert self._read(), f"{text!r} was not shown, and the command has ended: {self.shown!r}"

    def ended(self) -> int:
        """Read to the end. Returns the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE)

    def _read(self) -> bool:
        if not select.select([self._leader], [], [], PATIENCE)[0]:
            raise AssertionError(f"the command hangs: {self.shown!r}")
        try:
            part = os.read(self._leader, 64)  # a full terminal holds the writer back
        except OSError:  # the other side is closed
            part = b""
        self._bytes += part
        return bool(part)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()
        os.close(self._leader)
