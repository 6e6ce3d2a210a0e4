"""The packs in the user's cache folder. They are keyed by content, and the least recently used ones make room for new ones.

A pack is written behind: by a thread, while the model runs. A process that ends before waits for it, as the next start would
else pack the model again, and so would every start of a short command. Ctrl-C gives it up. A pack is written beside its place and
renamed, with its manifest last, so that a half one is never read: the next process that adds one removes it.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Lock, Thread

from filelock import FileLock, Timeout

from outrider.core.files import cache_folder
from outrider.core.suggest import did_you_mean
from outrider.models.packs.folder import (
    LAYOUT,
    MANIFEST,
    BadPack,
    NotRestorable,
    PackContents,
    RestoredModel,
    kernel_layout,
    load_manifest,
    size,
    start,
)

LIMIT = "OUTRIDER_PACK_CACHE_GB"
"""The environment variable with the size of the cache in GB (10^9 bytes). 0 switches it off."""
_DEFAULT_LIMIT = 20e9
_SHARE = 0.25  # of the disk space that would be free without packs; the default limit is never more
_SAMPLES, _SAMPLE = 16, 1 << 16  # pieces of a file that are read for its digest, and bytes of each
_PARTIAL = ".partial"
_PATIENCE = 0.5  # seconds that the end of the process is late without a word
_CONTENT = 2  # of the packs of this cache; another number makes them all again
# What a folder's pack depends on: weights, configuration and tokenizer.
_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".model", ".jinja", ".txt")


@dataclass(frozen=True)
class CachedPack:
    """name: of its folder in the cache. used: seconds since the epoch, when a model was last loaded from it."""

    name: str
    bytes: int
    used: float
    source: str
    weights: str


def folder() -> Path:
    return cache_folder() / "packs"


def enabled() -> bool:
    """Whether packs are kept. Raises ValueError for a variable that is no number."""
    return LIMIT not in os.environ or limit() > 0


def limit() -> float:
    """Bytes that all packs may take. Raises ValueError for a variable that is no number."""
    given = os.environ.get(LIMIT)
    if given is None:
        free = _free(folder())
        return min(_DEFAULT_LIMIT, _SHARE * (free + sum(p.bytes for p in packs())))
    try:
        return float(given) * 1e9
    except ValueError as error:
        raise ValueError(
            f"{LIMIT} is the size of the cache of packs in GB, such as 20, or 0 for none; got {given!r}"
        ) from error


def name_of(title: str, files: Sequence[Path], request: str) -> str:
    """The name of the pack of a model that is loaded from files as `request` says. It changes with any of the files.

    title: how the name starts. files: or folders with them. request: the precision that was asked for, and what else decides.
    The digest covers the size and time of each file, and samples of its content.
    """
    made_by = LAYOUT, _CONTENT, kernel_layout(), version("transformers")
    digest = hashlib.sha256(repr((request, *made_by)).encode())
    for given in files:
        for file in sorted(given.iterdir()) if given.is_dir() else [given]:
            if file.suffix in _SUFFIXES and file.is_file():
                stat = file.stat()
                digest.update(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())
                digest.update(_sample(file, stat.st_size))
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', title)}-{digest.hexdigest()[:16]}"


def _sample(file: Path, length: int) -> bytes:
    if length <= _SAMPLES * _SAMPLE:
        return file.read_bytes()
    with file.open("rb") as f:
        parts = []
        for i in range(_SAMPLES):
            f.seek(i * (length - _SAMPLE) // (_SAMPLES - 1))
            parts.append(f.read(_SAMPLE))
    return b"".join(parts)


def restored(name: str, *, tokenizer: bool = True, modules: bool = False) -> RestoredModel | None:
    """A cached pack, see `packs.folder.start`. None if there is none, or it is damaged; then it is removed, with a warning."""
    where = folder() / name
    if not (where / MANIFEST).exists():
        return None
    try:
        found = start(where, load_manifest(where), tokenizer=tokenizer, modules=modules)
        os.utime(where / MANIFEST)
    except (BadPack, OSError) as error:
        if (where / MANIFEST).exists():  # else another process has just removed it
            warnings.warn(f"{error}; it is removed, and the model is packed again", RuntimeWarning, stacklevel=2)
            _remove(where)
        return None
    return found


def keep(name: str, need: int, contents: Callable[[], PackContents]) -> bool:
    """Begin to add a pack, in the background. False if it is not kept: it is there, is too large, or cannot be restored.

    need: bytes that it will take. contents: gives what to write. The background warns if the folder cannot be written, and adds
    nothing while another process adds a pack.
    """
    if (folder() / name / MANIFEST).exists() or not _fits(need):
        return False
    try:
        given = contents()
    except NotRestorable:
        return False
    if not _writers:
        atexit.register(_end)
    _writers.append(_Writer(name, need, given))
    _writers[-1].start()
    return True


def wait() -> None:
    """Until all packs of this process are written."""
    for writer in [*_writers]:
        writer.join()
        _writers.remove(writer)
    atexit.unregister(_end)


class _Writer(Thread):
    """Adds one pack, when no other thread does. It ends with the process, if `_end` does not wait for it."""

    def __init__(self, name: str, need: int, contents: PackContents) -> None:
        super().__init__(name=f"pack {name}", daemon=True)
        self.need, self._pack, self._contents, self._given_up = need, name, contents, False

    def run(self) -> None:
        root = folder()
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _writing, FileLock(root / ".lock").acquire(timeout=0):
                for left in root.glob(f"*{_PARTIAL}"):  # of a process that was killed: this one has the lock
                    _remove(left)
                if not (root / self._pack / MANIFEST).exists() and _make_room(self.need):
                    self._write(root)
        except Timeout:
            pass
        except OSError as error:
            if not self._given_up:
                warnings.warn(
                    f"the packed weights were not kept in {root} ({error}); the model runs, and the next start packs it again. "
                    f"{LIMIT}=0 switches this off",
                    RuntimeWarning,
                    stacklevel=2,
                )
        finally:
            del self._contents  # the model's memory is its own again

    def _write(self, root: Path) -> None:
        partial = root / f"{self._pack}{_PARTIAL}"
        partial.mkdir()
        try:
            self._contents.write(partial)
            shutil.rmtree(root / self._pack, ignore_errors=True)  # without a manifest it is no pack
            partial.rename(root / self._pack)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def give_up(self) -> None:
        """Take away what is written so far. The thread then has nothing to rename."""
        self._given_up = True
        shutil.rmtree(folder() / f"{self._pack}{_PARTIAL}", ignore_errors=True)


_writers: list[_Writer] = []
_writing = Lock()


def _end() -> None:
    """At the end of the process: wait, unless the user does not want to."""
    try:
        for writer in _writers:
            writer.join(_PATIENCE)
            if writer.is_alive():
                warnings.warn(
                    f"still keeping the packed weights ({writer.need / 1e9:.2f} GB) for the next start; Ctrl-C gives that up",
                    RuntimeWarning,
                    stacklevel=1,
                )
                writer.join()
    except KeyboardInterrupt:
        for writer in _writers:
            writer.give_up()


def _fits(need: int) -> bool:
    """Whether there could be room for so many bytes."""
    return need <= limit() and need <= _free(folder()) + sum(p.bytes for p in packs())


def _make_room(need: int) -> bool:
    """Remove the least recently used packs until another one fits. False, and nothing is removed, if it never does."""
    if not _fits(need):
        return False
    held = sorted(packs(), key=lambda p: p.used)
    total, most = sum(p.bytes for p in held), limit()
    while held and (total + need > most or need > _free(folder())):
        oldest = held.pop(0)
        _remove(folder() / oldest.name)
        total -= oldest.bytes
    return True


def packs() -> list[CachedPack]:
    """The cached packs, by name. Damaged and older ones are among them."""
    found = []
    for manifest in sorted(folder().glob(f"*/{MANIFEST}")):
        where = manifest.parent
        if where.suffix == _PARTIAL:
            continue
        source = weights = "?"
        with suppress(BadPack):
            pack = load_manifest(where)
            source, weights = pack.source, pack.weights
        with suppress(OSError):
            found.append(CachedPack(where.name, size(where), manifest.stat().st_mtime, source, weights))
    return found


def remove(name: str) -> list[CachedPack]:
    """Remove the pack of this name, or all ("all"). Returns the removed ones. Raises ValueError for an unknown name."""
    known = packs()
    chosen = known if name == "all" else [p for p in known if p.name == name]
    if not chosen and name != "all":
        names = [p.name for p in known]
        raise ValueError(
            f"the cache has no pack {name!r}{did_you_mean(name, names)}; `outrider list` shows them, and `all` removes all"
        )
    for pack in chosen:
        _remove(folder() / pack.name)
    return chosen


def _remove(where: Path) -> None:
    """A reader of the pack meanwhile sees it whole or not at all: it keeps the one file open that it reads."""
    gone = where.with_name(f"{where.name}.{time.time_ns()}{_PARTIAL}")
    with suppress(OSError):
        where.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _free(where: Path) -> int:
    while not where.exists():
        where = where.parent
    return shutil.disk_usage(where).free
