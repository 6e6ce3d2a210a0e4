"""Where outrider keeps files of its own, and how it writes them: whole, or not at all."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def read_settings(file: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises OSError, and ValueError with the file's name for anything else than an object."""
    try:
        given: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} holds a {type(given).__name__}, and it must hold settings by name; download it again")
    return cast("dict[str, Any]", given)


def state_folder() -> Path:
    """$XDG_STATE_HOME/outrider, or ~/.local/state/outrider."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "outrider"


@contextmanager
def written_whole(path: Path) -> Generator[Path, None, None]:
    """A path beside `path` to write a file to. The file takes the place of `path` if the block ends without an error.

    Else it is removed. A reader sees the old file or the new one, never a part. Several threads and processes may write
    at once: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text file in UTF-8, whole. errors: as of `str.encode`."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8", errors=errors)
