"""The packs in the user's cache folder. They are keyed by content, and the least recently used ones make room for new ones.

A pack is written behind: by a thread, while the model runs. A process that ends earlier waits for it. Else the next start would
pack the model again, and so would every start of a short command. Ctrl-C gives it up. What a killed process leaves is removed by
the next one that adds a pack.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

from filelock import FileLock, Timeout

from outrider.core.files import cache_folder
from outrider.models.checkpoint import fingerprint
from outrider.models.packs.folder import (
    MANIFEST,
    PARTIAL,
    BadPack,
    PackContents,
    is_pack,
    made_by,
    manifest,
    read,
    size,
)
from outrider.models.request import LoadRequest, ReadModel

LIMIT = "OUTRIDER_PACK_CACHE_GB"
"""The environment variable with the size of the cache in GB (10^9 bytes). 0 switches it off."""
_DEFAULT_LIMIT = 20e9
_SHARE = 0.25  # of the disk space that would be free without packs; the default limit is never more
_PATIENCE = 0.5  # seconds that the end of the process is late without a word
_CONTENT = 3  # of the packs of this cache; another number makes them all again


@dataclass(frozen=True)
class CachedPack:
    """name: of its folder in the cache. used: seconds since the epoch, when a model was last loaded from it.

    source, weights: empty for a pack that this version cannot read.
    """

    name: str
    bytes: int
    used: float
    source: str
    weights: str


def folder() -> Path:
    return cache_folder() / "packs"


def limit() -> float:
    """Bytes that all packs may take; 0 if none are kept. Raises ValueError for a variable that is no number."""
    given = os.environ.get(LIMIT)
    if given is None:
        return min(_DEFAULT_LIMIT, _SHARE * _room())
    try:
        return float(given) * 1e9
    except ValueError as error:
        raise ValueError(
            f"{LIMIT} is the size of the cache of packs in GB, such as 20, or 0 for none; got {given!r}"
        ) from error


def name_of(source: str | Path, request: LoadRequest) -> str:
    """The name of the pack of a model that is loaded from `source` as the request says. It changes with any of the files."""
    key = request.dtype, request.quantization, _CONTENT, made_by(), fingerprint(source)
    title = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(request.name).stem)
    return f"{title}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"


def restored(name: str, request: LoadRequest) -> ReadModel | None:
    """A cached pack, see `packs.folder.read`. None if there is none, or it is damaged; then it is removed, with a warning."""
    where = folder() / name
    if not is_pack(where):
        return None
    try:
        found = read(where, request)
        os.utime(where / MANIFEST)
        return found
    except (BadPack, OSError) as error:
        if is_pack(where):  # else another process has just removed it
            warnings.warn(f"{error}; it is removed, and the model is packed again", RuntimeWarning, stacklevel=2)
            remove(name)
        return None


def keep(name: str, need: int, contents: Callable[[], PackContents]) -> bool:
    """Begin to add a pack, in the background. False if it is not kept: it is there, or too large.

    need: bytes that it will take. contents: gives what to write. The background warns if the folder cannot be written, and adds
    nothing while another process adds a pack.
    """
    busy = name in _writers and _writers[name][0].is_alive()
    if busy or is_pack(folder() / name) or not _fits(need):
        return False
    given = contents()
    if not _writers:
        atexit.register(_end)
    # A daemon ends with the process, if `_end` does not wait for it.
    thread = Thread(target=_write, args=(name, need, given), daemon=True)
    _writers[name] = thread, need
    thread.start()
    return True


def wait() -> None:
    """Until all packs of this process are written."""
    for name, (thread, _) in [*_writers.items()]:
        thread.join()
        _writers.pop(name, None)
    atexit.unregister(_end)


_writers: dict[str, tuple[Thread, int]] = {}  # by the name of the pack; with its bytes
_writing = Lock()


def _write(name: str, need: int, contents: PackContents) -> None:
    """Add one pack, when no other thread or process does."""
    root = folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _writing, FileLock(root / ".lock").acquire(timeout=0):
            for left in root.glob(f"*{PARTIAL}"):  # of a process that was killed: this one has the lock
                shutil.rmtree(left, ignore_errors=True)
            if not is_pack(root / name) and _make_room(need):
                contents.write(root / name)
    except Timeout:
        pass
    except OSError as error:
        if name in _writers:  # else the user gave it up
            warnings.warn(
                f"the packed weights were not kept in {root} ({error}); the model runs, and the next start packs it again. "
                f"{LIMIT}=0 switches this off",
                RuntimeWarning,
                stacklevel=2,
            )


def _end() -> None:
    """At the end of the process: wait, unless the user does not want to."""
    try:
        for thread, need in _writers.values():
            thread.join(_PATIENCE)
            if thread.is_alive():
                warnings.warn(
                    f"still keeping the packed weights ({need / 1e9:.2f} GB) for the next start; Ctrl-C gives that up",
                    RuntimeWarning,
                    stacklevel=1,
                )
                thread.join()
    except KeyboardInterrupt:
        _writers.clear()
        for partial in folder().glob(f"*.{os.getpid()}{PARTIAL}"):  # a thread then has nothing to rename
            shutil.rmtree(partial, ignore_errors=True)


def _room() -> float:
    """Bytes that all packs could take on this disk."""
    where = folder()
    while not where.exists():
        where = where.parent
    return shutil.disk_usage(where).free + sum(size(file.parent) for file in folder().glob(f"*/{MANIFEST}"))


def _fits(need: int) -> bool:
    """Whether there could be room for so many bytes."""
    return need <= min(limit(), _room())


def _make_room(need: int) -> bool:
    """Remove the least recently used packs until another one fits. False, and nothing is removed, if it never does."""
    if not _fits(need):
        return False
    held, most = sorted(packs(), key=lambda p: (bool(p.source), p.used)), min(limit(), _room())
    while sum(p.bytes for p in held) + need > most:
        remove(held.pop(0).name)
    return True


def packs() -> list[CachedPack]:
    """The cached packs, by name. Damaged and older ones are among them."""
    found = []
    for file in sorted(folder().glob(f"*/{MANIFEST}")):
        where = file.parent
        if where.suffix == PARTIAL:
            continue
        source = weights = ""
        with suppress(BadPack):
            pack = manifest(where)
            source, weights = pack.source, pack.weights
        with suppress(OSError):
            found.append(CachedPack(where.name, size(where), file.stat().st_mtime, source, weights))
    return found


def remove(name: str) -> None:
    """A reader of the pack meanwhile sees it whole or not at all: it keeps the one file open that it reads."""
    gone = folder() / f"{name}.{time.time_ns()}{PARTIAL}"
    with suppress(OSError):
        (folder() / name).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
