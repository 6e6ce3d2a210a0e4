"""Where outrider keeps files of its own, and how it writes them: whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

PREFIX_DISK = "20GiB"  # what a folder of the prefix cache may take, where nothing else is said
MEMORY_DISK, MEMORY_DAYS, MEMORY_BY = "64MiB", 30.0, ("client", "all")  # of a memory of texts; the second is its age
PARTIAL = ".partial"  # how the name of a file or a folder ends that is not whole
_UNITS = {"": 1} | {
    f"{x}{form}": base**n for n, x in enumerate("KMGT", 1) for form, base in (("B", 1000), ("IB", 1024))
}


def byte_count(given: int | str) -> int:
    """A number of bytes, from a number or from a text such as 20GiB or 500 MB. Raises ValueError for another text."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(given))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{given!r} is no number of bytes; write it as 20GiB, 500MB or 21474836480")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def public_name(name: str) -> str:
    """A model's name without the folders of this machine: what others may see."""
    path = os.path.expanduser(name)
    return os.path.basename(os.path.abspath(path)) if os.path.isabs(path) or os.path.exists(path) else name


def read_settings(file: Path, instead: str = "download it again") -> dict[str, Any]:
    """The object of a JSON file. Raises OSError, and ValueError with the file's name for anything else than an object.

    instead: what to do then.
    """
    try:
        settings: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); {instead}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds a {type(settings).__name__}, and it must hold settings by name; {instead}")
    return cast("dict[str, Any]", settings)


def state_folder() -> Path:
    """$XDG_STATE_HOME/outrider, or ~/.local/state/outrider."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "outrider"


def discard(path: Path) -> None:
    """Remove a file or a folder, if that can be done. A reader of a folder sees it whole or not at all."""
    with suppress(OSError):
        if not path.is_dir():
            path.unlink()
            return
        gone = path if path.suffix == PARTIAL else path.with_name(f"{path.name}.{time.time_ns()}{PARTIAL}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def disk_bytes(path: Path) -> int:
    """Bytes of a file, or of the files in a folder. What another process removes meanwhile counts as nothing."""
    total = 0
    for file in path.glob("*") if path.is_dir() else (path,):
        with suppress(OSError):
            total += file.stat().st_size
    return total


@contextmanager
def written_whole(path: Path) -> Generator[Path, None, None]:
    """A path beside `path` to write a file or a folder to. It takes the place of `path` if the block ends without an error.

    Else it is removed. A reader sees the old one or the new one, never a part. Several threads and processes may write
    at once: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    try:
        yield partial
        if partial.is_dir():
            discard(path)
        partial.replace(path)
    except OSError as error:
        if error.filename is None and error.strerror:  # of a write: a full disk, for example
            error.filename = str(path)
        raise
    finally:
        discard(partial)


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text file in UTF-8, whole. errors: as of `str.encode`."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8", errors=errors)


def sha256(files: Sequence[Path]) -> str:
    """Of the contents of all files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(2**22):
                digest.update(block)
    return digest.hexdigest()


def content_digest(files: Sequence[Path]) -> str:
    """The same, kept in the cache folder until a file changes."""
    states = [(str(f.resolve()), (s := f.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns) for f in files]
    noted = cache_folder() / "contents" / hashlib.sha256(repr(states).encode()).hexdigest()
    with suppress(OSError, ValueError):
        if len(digest := noted.read_text(encoding="utf-8")) == 64:
            return digest
    digest = sha256(files)
    with suppress(OSError):
        write_whole(noted, digest)
    return digest
