"""Files of JSON lines that grow. A line is in the file before the next one begins, so a kill cuts the last line at most."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple


class JsonLine(NamedTuple):
    """One line. start: where it begins, in bytes. raw: with its end. value: None if it is not JSON, or only half of a line."""

    start: int
    raw: bytes
    value: Any

    @property
    def whole(self) -> bool:
        return self.raw.endswith(b"\n")

    @property
    def end(self) -> int:
        return self.start + len(self.raw)


class JsonLines:
    """A file of JSON lines. Before lines are added, `lines` are read and what is not whole is cut off."""

    def __init__(self, path: Path, *, alone: bool = False) -> None:
        """alone: raises BlockingIOError while another process has the file open in this way. Raises OSError, too."""
        self._file = path.open("a+b")
        try:
            if alone:
                _lock(self._file)
        except OSError:
            self._file.close()
            raise

    def lines(self) -> Generator[JsonLine, None, None]:
        """All lines. The last one may be half of a line."""
        start = self._file.seek(0)
        for raw in self._file:
            try:
                value = json.loads(raw) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                value = None
            yield JsonLine(start, raw, value)
            start += len(raw)

    def whole(self) -> Generator[JsonLine, None, None]:
        """All lines. At the end, half of a line that a kill has left is cut off."""
        end = 0
        for line in self.lines():
            if not line.whole:
                break
            yield line
            end = line.end
        self.cut(end)

    def cut(self, end: int) -> None:
        """Drop all bytes from `end` on."""
        self._file.truncate(end)

    def add(self, line: bytes) -> int:
        """Add a line, given without its end. Returns where it starts. A killed process keeps it; a lost machine may not."""
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(line + b"\n")
        self._file.flush()
        return start

    def sync(self) -> None:
        """Wait until a lost machine keeps all lines."""
        os.fsync(self._file.fileno())

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


def _lock(file: BinaryIO) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError while another process has it locked."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(2**62)  # Windows keeps others from reading what is locked, so it is a byte that no file has
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from error
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
