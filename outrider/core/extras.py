"""Optional packages: what to type where one is missing. Imports nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def needs(extra: str, what: str, instead: str = "") -> Generator[None, None, None]:
    """Around imports of packages of an extra. what: needs them, as the begin of a sentence. instead: what works without them.

    Raises ValueError, with the line that installs them, if one is missing.
    """
    try:
        yield
    except ImportError as error:
        other = f"; or {instead}" if instead else ""
        raise ValueError(f"{what} needs {error.name}, which is not installed{other}: {install(extra)}") from None


def install(extra: str) -> str:
    """The line that installs an extra. outrider is not on PyPI."""
    return f"pip install '.[{extra}]'   # in the checkout"
