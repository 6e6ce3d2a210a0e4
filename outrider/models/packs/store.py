"""The packs in the user's cache folder. They are keyed by content, and the least recently used ones make room for new ones."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import transformers
from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from outrider.core.files import cache_folder
from outrider.core.suggest import did_you_mean
from outrider.models.packs.folder import (
    LAYOUT,
    MANIFEST,
    BadPack,
    NotRestorable,
    kernel_layout,
    load_manifest,
    restore,
    size,
)

LIMIT = "OUTRIDER_PACK_CACHE_GB"
"""The environment variable with the size of the cache in GB (10^9 bytes). 0 switches it off."""
_DEFAULT_LIMIT = 20e9
_SHARE = 0.25  # of the disk space that would be free without packs; the default limit is never more
_SAMPLES, _SAMPLE = 16, 1 << 16  # pieces of a file that are read for its digest, and bytes of each
_PARTIAL = ".partial"
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
    digest = hashlib.sha256(repr((request, LAYOUT, kernel_layout(), transformers.__version__)).encode())
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


class Restored(NamedTuple):
    """A model from the cache. folder: with its tokenizer. weights: the precision."""

    model: PreTrainedModel
    weights: str
    folder: Path


def restored(name: str) -> Restored | None:
    """The model of a cached pack. None if there is none, or it is damaged; then it is removed, with a warning."""
    where = folder() / name
    if not (where / MANIFEST).exists():
        return None
    try:
        pack = load_manifest(where)
        model = restore(where, pack)
        os.utime(where / MANIFEST)
    except (BadPack, OSError) as error:
        if (where / MANIFEST).exists():  # else another process has just removed it
            warnings.warn(f"{error}; it is removed, and the model is packed again", RuntimeWarning, stacklevel=2)
            _remove(where)
        return None
    return Restored(model, pack.weights, where)


def keep(name: str, need: int, write: Callable[[Path], int]) -> Path | None:
    """Add a pack. Returns its folder, or None if it was not kept: it is too large, or another process is adding one.

    need: bytes that it will take. write: fills a folder and returns its bytes. Warns if the folder cannot be written.
    """
    root = folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock").acquire(timeout=0):
            for left in root.glob(f"*{_PARTIAL}"):  # of a process that was killed: this one has the lock
                _remove(left)
            if (root / name / MANIFEST).exists():
                return root / name
            if not _make_room(need):
                return None
            partial = root / f"{name}{_PARTIAL}"
            partial.mkdir()
            try:
                write(partial)
                shutil.rmtree(root / name, ignore_errors=True)  # without a manifest it is no pack
                return partial.rename(root / name)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (Timeout, NotRestorable):
        return None
    except OSError as error:
        warnings.warn(
            f"the packed weights were not kept in {root} ({error}); the model runs, and the next start packs it again. "
            f"{LIMIT}=0 switches this off",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _make_room(need: int) -> bool:
    """Remove the least recently used packs until another one fits. False, and nothing is removed, if it never does."""
    held = sorted(packs(), key=lambda p: p.used)
    total, most = sum(p.bytes for p in held), limit()
    if need > most or need > _free(folder()) + total:
        return False
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
            f"the cache has no pack {name!r}{did_you_mean(name, names)}; `outrider models` lists them, and `all` removes all"
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
