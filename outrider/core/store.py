"""Folders that later processes use: packed weights, starts of texts, texts of requests, fetched models.

An entry is a file or a folder. It is whole or absent, and its name says what it depends on. So two processes can only write the
same under one name. Its time is that of its last use: where a store is full, the least recently used entries make room.

One thread writes for all stores of a process, and the end of the process waits for it.
"""

from __future__ import annotations

import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.core.files import PARTIAL, discard, disk_bytes, written_whole

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger("outrider.engine")
Seconds = float
MAGIC = b"outrider prefix 1\n"
HEAD = len(MAGIC) + 4
PENDING = 256 << 20  # bytes that wait for the disk; what comes while it is so late is not kept
_SCANS = 64  # files that are written between two looks at the folder, in which others write too
_ROOM = 0.95  # of the limit that is left when entries were removed
_LATE = 600  # seconds after which an entry that is not whole belongs to a process that is gone
_writer = ThreadPoolExecutor(1, "outrider-store")


def _new_writer() -> None:
    global _writer
    _writer = ThreadPoolExecutor(1, "outrider-store")


if hasattr(os, "fork"):
    os.register_at_fork(after_in_child=_new_writer)  # a fork has no threads


class Kind(NamedTuple):
    """What entries are for. A folder of several kinds is bounded for each of them apart."""

    what: str
    """Whose they are, in messages."""
    option: str
    """How the options of the folder begin."""
    where: str
    """A glob of the entries in the folder."""
    name: str
    """A pattern of their names."""
    alone: bool = False
    """Whether one process at a time makes an entry, in its `turn`, because that takes long."""


PREFIXES = Kind("the prefix cache", "prefix", "*/*", r"[0-9a-f]{16}-[0-9a-f]{40}\.(?!texts)[a-z0-9]+")
TEXTS = Kind("the memory of texts", "memory", "*/*", r"[0-9a-f]{16}-[0-9a-f]{40}\.texts")
PACKS = Kind("the cache of packed weights", "pack", "*", r".+-[0-9a-f]{16}", alone=True)
FETCHED = Kind("the folder of fetched models", "model", "*", r".+\.gguf", alone=True)


class Entry(NamedTuple):
    """A whole entry of a store."""

    path: Path
    bytes: int
    used: Seconds
    """Since the epoch."""


class Store:
    """Entries of one kind in a folder: at most `limit` bytes of them, none older than `age` seconds.

    Attributes:
        bytes: Of the entries, when they were counted last, and of those written since.
    """

    def __init__(self, path: str | os.PathLike[str], limit: float, kind: Kind, age: Seconds = float("inf")) -> None:
        self.path, self.limit, self.age, self.bytes = Path(path).expanduser().absolute(), limit, age, 0
        self._kind, self._told, self._waiting = kind, set[str](), dict[Path, int]()
        self._writes = 0

    @classmethod
    def open(cls, path: str | os.PathLike[str], limit: int, kind: Kind, age: Seconds = float("inf")) -> Store:
        """A store whose folder is there and within its bounds. Raises ValueError if that is not possible."""
        store, option = cls(path, limit, kind, age), kind.option
        if limit < 1:
            raise ValueError(f"{option}_disk must be 1 byte or more, got {limit}; for example {option}_disk='20GiB'")
        try:
            store._make_folder()
        except OSError as error:
            raise ValueError(
                f"{kind.what} cannot use {store.path}: {error.strerror}; give a folder that you may write to, for example "
                f"--{option}-dir ~/.cache/outrider/{option}"
            ) from error
        store.later(store._trim)
        return store

    def entries(self) -> list[Entry]:
        """The whole entries, in no order."""
        return [entry for entry, whole in self._look() if whole]

    def read(self, file: Path, size: int) -> memoryview | None:
        """The `size` bytes that `put` wrote to a file. Several threads may call it.

        Never raises: a file that is missing, damaged or of another origin is one that is not there.
        """
        try:
            with file.open("rb") as opened:
                content = memoryview(opened.read(HEAD + size + 1))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(f"{file} cannot be read ({error.strerror}); it is left out")
            return None
        if len(content) == HEAD + size and bytes(content[:HEAD]) == MAGIC + _sum(file, [content[HEAD:]]):
            return content[HEAD:]
        discard(file)  # no other bytes can be right under this name
        self._tell(f"{file} is damaged or was not written by outrider; it is left out")
        return None

    def write(self, file: Path, size: int, content: Callable[[], Sequence[memoryview | bytes]]) -> None:
        """Write a file later, unless it is there or the disk is late.

        Args:
            file: The file.
            size: Bytes of its content.
            content: Gives the parts of it, at once. They must not change any more.
        """
        if file not in self._waiting and sum([*self._waiting.values()]) + size <= PENDING and not file.exists():
            self._waiting[file] = size
            self.later(self._write, file, content())

    def used(self, paths: Iterable[Path]) -> None:
        """These were used now. Each needs those before it, so the last one makes room first."""
        self.later(_touch, list(paths))

    def later(self, act: Callable[..., Any], *values: Any) -> Future[None]:
        """Do this in the thread that writes. An error goes to the log."""
        return _writer.submit(self._guarded, act, values)

    def flush(self) -> None:
        """Wait until all is written."""
        self.later(int).result()

    def turn(self, timeout: Seconds = -1) -> AbstractContextManager[Any]:
        """The right to make entries of a kind that one process makes alone. Raises TimeoutError; -1 waits for ever."""
        self._make_folder()
        return self._lock.acquire(timeout)

    @cached_property
    def _lock(self) -> FileLock:
        from filelock import FileLock  # it imports asyncio

        return FileLock(self.path / ".lock")

    def make(self, path: Path, write: Callable[[Path], object], size: int) -> None:
        """Make an entry now, unless there can be no room for it. Raises what `write` raises, and OSError.

        Args:
            path: The entry.
            write: Writes a file or a folder to the path that it gets.
            size: Bytes that it will take. Room is made before.
        """
        if size > self.limit:
            return
        self._make_folder()
        if self.bytes + size > self.limit or self._writes % _SCANS == 0:
            self._trim(size)
        self._writes += 1
        with written_whole(path) as half:
            write(half)
        self.bytes += size

    def put(self, file: Path, parts: Sequence[memoryview | bytes], since: Seconds | None = None) -> bool:
        """Make a file of these parts now, in the thread that writes. False if the disk does not take it.

        Args:
            file: The file.
            parts: Its content.
            since: Its age counts from this time; None is now.
        """

        def write(half: Path) -> None:
            with half.open("wb") as opened:
                opened.writelines((MAGIC, _sum(file, parts), *parts))
            if since is not None:
                os.utime(half, (since, since))

        try:
            self.make(file, write, HEAD + sum(map(len, parts)))
        except OSError as error:
            self._tell(f"{self._kind.what} cannot write to {self.path} ({error.strerror}); texts are made without it")
            return False
        return True

    def _make_folder(self) -> None:
        """For its owner alone, if it is of texts: what is kept of a text reveals it."""
        self.path.mkdir(mode=0o777 if self._kind.alone else 0o700, parents=True, exist_ok=True)

    def _guarded(self, act: Callable[..., Any], values: Sequence[Any]) -> None:
        try:
            act(*values)
        except Exception:
            log.exception("%s failed", self._kind.what)

    def _write(self, file: Path, parts: Sequence[memoryview | bytes]) -> None:
        try:
            self.put(file, parts)
        finally:
            del self._waiting[file]

    def _look(self) -> Iterator[tuple[Entry, bool]]:
        """What has a name of this kind, and whether it is whole."""
        name = re.compile(rf"(?:{self._kind.name})((?:\.[0-9-]+)?{re.escape(PARTIAL)})?")
        for path in self.path.glob(self._kind.where):
            if match := name.fullmatch(path.name):
                with suppress(OSError):
                    yield Entry(path, disk_bytes(path), path.stat().st_mtime), not match[1]

    def _trim(self, need: int = 0) -> None:
        """Remove what is not whole or too old, and the least recently used entries until there is room for so many bytes."""
        now, entries = time.time(), list[Entry]()
        for entry, whole in self._look():
            # in its turn a process is alone, so the others are gone
            late = self.age if whole else 0 if self._kind.alone else _LATE
            if now - entry.used > late:
                discard(entry.path)
            elif whole:
                entries.append(entry)
        self.bytes = sum(entry.bytes for entry in entries)
        if self.bytes + need > self.limit:
            for entry in sorted(entries, key=lambda entry: entry.used):
                discard(entry.path)
                self.bytes -= entry.bytes
                if self.bytes + need <= _ROOM * self.limit:
                    break

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message)


def _sum(file: Path, parts: Sequence[memoryview | bytes]) -> bytes:
    """A checksum of the name and the content."""
    total = zlib.crc32(f"{file.parent.name}/{file.name}".encode())
    for part in parts:
        total = zlib.crc32(part, total)
    return total.to_bytes(4, "little")


def _touch(paths: Sequence[Path]) -> None:
    """The first one was used last."""
    now = time.time_ns()
    for n, path in enumerate(paths):
        when = now - 1000 * n
        with suppress(OSError):
            os.utime(path, ns=(when, when))
