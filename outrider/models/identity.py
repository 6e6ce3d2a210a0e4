"""Which files hold a model's weights, and the sha256 of their contents: what a measurement or a certificate was made with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from outrider.models.builtin.shipped import builtin_folder
from outrider.models.gguf.files import gguf_files


def weight_files(model: str) -> list[Path]:
    """The files that hold a model's weights: GGUF, all parts, or safetensors. Empty for a name whose files are not at hand.

    Raises what `outrider.models.load.load` raises for a GGUF file that cannot be had.
    """
    if found := gguf_files(model):
        return list(found)
    path = builtin_folder(model) if model.startswith("builtin:") else Path(model).expanduser()
    return sorted(path.glob("*.safetensors"))


def public_name(model: str) -> str:
    """A model's name without the folders of this machine."""
    path = Path(model).expanduser()
    return path.name if path.exists() else model


def sha256(files: Sequence[Path]) -> str:
    """Of the contents of all files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(2**22):
                digest.update(block)
    return digest.hexdigest()
