"""A folder of files that later processes use. Several processes and several models may share it.

A file is whole or absent, and its name says what it depends on. So two processes can only write the same bytes under one name,
and there are no locks. A name is NAME OF THE FILE BEFORE-NAME.KIND, and the one before has the same beginning: files form chains.
Where a folder is full, the least recently used ends of chains make room.
"""

from __future__ import annotations

import logging
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from outrider.core.files import written_whole

log = logging.getLogger("outrider.engine")
Seconds = float
MAGIC = b"outrider prefix 1\n"
HEAD = len(MAGIC) + 4
PENDING = 256 << 20  # bytes that wait for the disk; what comes while it is so late is not kept
_SCANS = 64  # files that are written between two looks at the folder, in which others write too
_ROOM = 0.95  # of the limit that is left when files were removed
_LATE = 600  # seconds after which a file that is not whole belongs to a process that is gone
_REST = 60  # seconds without writing after an error of the disk
_NAME = r"([0-9a-f]{16})-([0-9a-f]{40})\.%s(\.[0-9-]+\.partial)?"


class Use(NamedTuple):
    """What files are for. what: whose they are, in messages. option: the beginning of its options. kinds: a pattern of KIND.

    A folder of several uses is bounded for each of them apart."""

    what: str
    option: str
    kinds: str


PREFIXES = Use("the prefix cache", "prefix", "(?!texts)[a-z0-9]+")
TEXTS = Use("the memory of texts", "memory", "texts")


class ContentFolder:
    """Reads and writes files, at most `limit` bytes of them, none older than `age` seconds.

    Reading never raises: a file that is missing, damaged or of another origin is one that is not there. A thread writes, and the
    end of the process waits for it.

    bytes: of the files, when they were counted last, and of those written since.
    """

    def __init__(
        self, path: str | os.PathLike[str], limit: int, use: Use = PREFIXES, age: Seconds = float("inf")
    ) -> None:
        """Make the folder, for its owner alone: what is kept of a text reveals it. Raises ValueError if that is not possible."""
        self.path, self.limit, self.age, self.bytes = Path(path).expanduser().absolute(), limit, age, 0
        self._use, self._name = use, re.compile(_NAME % use.kinds)
        if limit < 1:
            raise ValueError(
                f"{use.option}_disk must be 1 byte or more, got {limit}; for example {use.option}_disk='20GiB'"
            )
        try:
            self._make()
        except OSError as error:
            raise ValueError(
                f"{use.what} cannot use {self.path}: {error.strerror}; give a folder that you may write to, for example "
                f"--{use.option}-dir ~/.cache/outrider/{use.option}"
            ) from error
        self._known, self._told = set[Path](), set[str]()
        self._pending, self._written, self._rests_until = 0, 0, 0.0
        self._writer = ThreadPoolExecutor(1, f"outrider-{use.option}")
        self._writer.submit(self._trim)

    def forget(self, files: Iterable[Path]) -> None:
        """These may have been removed by others: let `wants` look again."""
        self._known.difference_update(files)

    def read(self, file: Path, size: int) -> memoryview | None:
        """What a file of so many bytes keeps; None if it is not whole or not of this name. Several threads may call it."""
        try:
            with file.open("rb") as opened:
                found = memoryview(opened.read(HEAD + size + 1))
        except OSError as error:
            self._known.discard(file)
            if not isinstance(error, FileNotFoundError):
                self._tell(f"{file} cannot be read ({error.strerror}); it is left out")
            return None
        if len(found) == HEAD + size and bytes(found[:HEAD]) == MAGIC + _sum(file, [found[HEAD:]]):
            self._known.add(file)
            return found[HEAD:]
        self._known.discard(file)
        with suppress(OSError):
            file.unlink()  # no other bytes can be right under this name
        self._tell(f"{file} is damaged or was not written by outrider; it is left out")
        return None

    def wants(self, file: Path, size: int) -> bool:
        """Whether `write` would take a file of so many bytes now."""
        return file not in self._known and self._pending + size <= PENDING and time.monotonic() >= self._rests_until

    def write(self, file: Path, parts: Sequence[memoryview | bytes]) -> None:
        """Write a file later. parts: bytes, which do not change any more."""
        size = HEAD + sum(map(len, parts))
        self._known.add(file)
        if not file.exists():
            self._pending += size
            self._writer.submit(self._write, file, parts, size)

    def used(self, files: Iterable[Path]) -> None:
        """These were used now."""
        self._writer.submit(_touch, list(files))

    def later(self, act: Callable[..., None], *given: Any) -> Future[None]:
        """Do this in the thread that writes. An error goes to the log."""
        return self._writer.submit(self._guarded, act, given)

    def put(self, file: Path, parts: Sequence[memoryview | bytes], since: Seconds | None = None) -> bool:
        """Write a file now, in the thread that writes. since: its age counts from this time; None is now. False if that fails."""
        try:
            self._make()
            with written_whole(file) as partial:
                with partial.open("wb") as opened:
                    opened.writelines((MAGIC, _sum(file, parts), *parts))
                if since is not None:
                    os.utime(partial, (since, since))
            self.bytes += HEAD + sum(map(len, parts))
            self._written += 1
            if self.bytes > self.limit or self._written % _SCANS == 0:
                self._trim()
        except OSError as error:
            self._known.discard(file)
            self._rests_until = time.monotonic() + _REST
            self._tell(
                f"{self._use.what} cannot write to {self.path} ({error.strerror}); it tries again in {_REST} seconds"
            )
            return False
        return True

    def remove(self, files: Iterable[Path]) -> None:
        """Remove these now, in the thread that writes."""
        for file in files:
            self._known.discard(file)
            with suppress(OSError):
                file.unlink()

    def flush(self) -> None:
        """Wait until all is written."""
        self._writer.submit(int).result()

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _guarded(self, act: Callable[..., None], given: Sequence[Any]) -> None:
        try:
            act(*given)
        except Exception:
            log.exception("%s failed", self._use.what)

    def _write(self, file: Path, parts: Sequence[memoryview | bytes], size: int) -> None:
        try:
            self.put(file, parts)
        finally:
            self._pending -= size

    def _trim(self) -> None:
        """Count the files, remove those that are too old and the least recently used ends of chains, until there is room."""
        now = time.time()
        sizes, times, files, parents = Counter[str](), dict[str, float](), dict[str, list[Path]](), dict[str, str]()
        for file in self.path.glob("*/*"):
            if not (found := self._name.fullmatch(file.name)):
                continue
            with suppress(OSError):
                about = file.stat()
                if found[3]:
                    if abs(now - about.st_mtime) > _LATE:
                        file.unlink()
                    continue
                if about.st_mtime > now:
                    os.utime(file)  # the clock was set back
                if now - about.st_mtime > self.age:
                    self.remove([file])
                    continue
                name = f"{file.parent.name}/{found[2][:16]}"
                sizes[name] += about.st_size
                times[name] = max(times.get(name, 0.0), min(about.st_mtime, now))
                files.setdefault(name, []).append(file)
                parents[name] = f"{file.parent.name}/{found[1]}"
        self.bytes = sizes.total()
        if self.bytes <= self.limit:
            return
        children = Counter(parents.values())
        ends = [(times[name], name) for name in files if not children[name]]
        heapify(ends)
        while ends and self.bytes > _ROOM * self.limit:
            _, name = heappop(ends)
            self.remove(files[name])
            self.bytes -= sizes[name]
            parent = parents[name]
            children[parent] -= 1
            if parent in files and not children[parent]:
                heappush(ends, (times[parent], parent))

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message)


def _sum(file: Path, parts: Sequence[memoryview | bytes]) -> bytes:
    """A checksum of the name and the content."""
    found = zlib.crc32(f"{file.parent.name}/{file.name}".encode())
    for part in parts:
        found = zlib.crc32(part, found)
    return found.to_bytes(4, "little")


def _touch(files: Sequence[Path]) -> None:
    for file in files:
        with suppress(OSError):
            os.utime(file)
