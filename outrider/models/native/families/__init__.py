"""One file per family of models: from a configuration to a program."""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from outrider.models.native.builder import Build

_Build = TypeVar("_Build", bound=Build)
_FAMILIES = dict[str, Build]()


def family(*classes: str) -> Callable[[_Build], _Build]:
    """Register what builds the program of these classes of transformers."""

    def register(build: _Build) -> _Build:
        _FAMILIES.update(dict.fromkeys(classes, build))
        return build

    return register


def family_of(name: str) -> Build | None:
    """What builds the program of a class of transformers; None if nothing does."""
    _import_all()
    return _FAMILIES.get(name)


@functools.cache
def digest() -> str:
    """Of the source of all families and of what builds their programs. With another one, a model may have another program."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@functools.cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
