"""The packs in the user's cache folder. They are keyed by content, and the least recently used ones make room for new ones.

A pack is written behind, while the model runs. A process that ends earlier waits for it. Else the next start would pack the
model again, and so would every start of a short command.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.core.files import cache_folder, discard
from outrider.core.store import PACKS, Store
from outrider.models.checkpoint import LoadRequest, ReadModel, fingerprint
from outrider.models.packs.folder import BadPack, PackContents, is_pack, made_by, manifest, read

LIMIT = "OUTRIDER_PACK_CACHE_GB"
"""The environment variable with the size of the cache in GB (10^9 bytes). 0 switches it off."""
_DEFAULT_LIMIT = 20e9
_SHARE = 0.25  # of the disk space that would be free without packs; the default limit is never more
_CONTENT = 4  # of the packs of this cache; another number makes them all again
_jobs = dict[str, Future[None]]()  # of the packs that this process writes, by name


@dataclass(frozen=True)
class CachedPack:
    """A pack of the cache."""

    name: str
    """Of its folder in the cache."""
    bytes: int
    used: float
    """Seconds since the epoch, when a model was last loaded from it."""
    source: str
    """Empty for a pack that this version cannot read, and so is `weights`."""
    weights: str


def folder() -> Path:
    return cache_folder() / "packs"


def limit() -> float:
    """Bytes that all packs may take; 0 if none are kept. Raises ValueError for a variable that is no number."""
    value = os.environ.get(LIMIT)
    if value is None:
        return min(_DEFAULT_LIMIT, _SHARE * _room())
    try:
        return float(value) * 1e9
    except ValueError as error:
        raise ValueError(
            f"{LIMIT} is the size of the cache of packs in GB, such as 20, or 0 for none; got {value!r}"
        ) from error


def name_of(source: str | Path, request: LoadRequest) -> str:
    """The name of the pack of a model that is loaded from `source` as the request says. It changes with any of the files."""
    key = request.dtype, request.quantization, _CONTENT, made_by(), fingerprint(source)
    title = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(request.name).stem)
    return f"{title}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"


def restored(name: str, request: LoadRequest) -> ReadModel | None:
    """A cached pack, see `packs.folder.read`. None if there is none, or it is damaged; then it is removed, with a warning."""
    path = folder() / name
    if not is_pack(path):
        return None
    try:
        model = read(path, request)
        os.utime(path)
        return model
    except (BadPack, OSError) as error:
        if is_pack(path):  # else another process has just removed it
            warnings.warn(f"{error}; it is removed, and the model is packed again", RuntimeWarning, stacklevel=2)
            discard(path)
        return None


def keep(name: str, need: int, contents: Callable[[], PackContents]) -> bool:
    """Begin to add a pack, in the background. False if it is not kept: it is there, or too large.

    The background warns if the folder cannot be written, and adds nothing while another process adds a pack.

    Args:
        name: Of the pack.
        need: Bytes that it will take.
        contents: Gives what to write.
    """
    most, busy = min(limit(), _room()), name in _jobs and not _jobs[name].done()
    if busy or is_pack(folder() / name) or need > most:
        return False
    store = Store(folder(), most, PACKS)
    _jobs[name] = store.later(_write, store, name, need, contents())
    return True


def wait() -> None:
    """Until all packs of this process are written."""
    Store(folder(), 0, PACKS).flush()


def _write(store: Store, name: str, need: int, contents: PackContents) -> None:
    try:
        with store.turn(0):
            if not is_pack(store.path / name):
                store.make(store.path / name, contents.write_to, need)
    except TimeoutError:
        pass
    except OSError as error:
        warnings.warn(
            f"the packed weights were not kept in {store.path} ({error}); the model runs, and the next start packs it again. "
            f"{LIMIT}=0 switches this off",
            RuntimeWarning,
            stacklevel=2,
        )


def _room() -> float:
    """Bytes that all packs could take on this disk."""
    root = folder()
    there = next(path for path in (root, *root.parents) if path.exists())
    return shutil.disk_usage(there).free + sum(entry.bytes for entry in Store(root, 0, PACKS).entries())


def packs() -> list[CachedPack]:
    """The cached packs, by name. Damaged and older ones are among them."""
    cached = list[CachedPack]()
    for entry in sorted(Store(folder(), 0, PACKS).entries()):
        source = weights = ""
        with suppress(BadPack):
            pack = manifest(entry.path)
            source, weights = pack.source, pack.weights
        cached.append(CachedPack(entry.path.name, entry.bytes, entry.used, source, weights))
    return cached


def remove(name: str) -> None:
    """Remove a pack. A process that reads it meanwhile sees it whole or not at all."""
    discard(folder() / name)
