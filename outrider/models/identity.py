"""Which files hold a model's weights, and the sha256 of their contents: what a measurement or a certificate was made with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.core.files import cache_folder, write_whole
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.gguf.files import gguf_files


def weight_files(model: str) -> list[Path]:
    """The files that hold a model's weights: GGUF, all parts, or safetensors. Empty for a name whose files are not at hand.

    Raises what `outrider.models.load.load` raises for a GGUF file that cannot be had.
    """
    if files := gguf_files(model):
        return list(files)
    path = builtin_folder(model) if model.startswith("builtin:") else Path(model).expanduser()
    return sorted(path.glob("*.safetensors"))


def sha256(files: Sequence[Path]) -> str:
    """Of the contents of all files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(2**22):
                digest.update(block)
    return digest.hexdigest()


def content(model: Any) -> str:
    """A digest of all that a model's arithmetic reads of its files: weights and settings. It does not depend on where they are.

    It is kept in the cache folder until the files change. Raises ValueError for a model that has no files here.
    """
    files = weight_files(str(model)) if isinstance(model, (str, Path)) else []
    if not files:
        raise ValueError(
            "the model has no files here whose content could name what is kept of its texts; load it from its folder or "
            "GGUF file, or leave out prefix_dir"
        )
    if files[0].suffix != ".gguf":
        files += [f for f in map(files[0].with_name, ("config.json", "outrider_pack.json")) if f.exists()]
    states = [(str(f.resolve()), (s := f.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns) for f in files]
    noted = cache_folder() / "contents" / hashlib.sha256(repr(states).encode()).hexdigest()
    with suppress(OSError, ValueError):
        if len(digest := noted.read_text(encoding="utf-8")) == 64:
            return digest
    digest = sha256(files)
    with suppress(OSError):
        write_whole(noted, digest)
    return digest
