"""Optional packages: what to type where one is missing. Imports nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

USES = {
    "torch": "models without a native program, GPUs, training",
    "data": "the built-in models",
    "serve": "outrider serve and batch",
    "grammar": "answers that fit a JSON schema",
    "lab": "the commands bench, tune, explain, replay and demo",
    "certify": "outrider certify",
    "ray": "outrider deploy",
}
"""The extras, and what each is for."""
_FOLDERS = ("data", "certify", "lab", "ray")  # extras that are packages of their own, in folders of the checkout


class MissingExtra(ValueError):
    """A package that is not installed."""


@contextmanager
def needs(extra: str, what: str) -> Generator[None, None, None]:
    """Around imports of packages of an extra. what: needs them, as the begin of a sentence.

    Raises MissingExtra, with the line that installs them, if one is missing.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(f"{what} needs {error.name}, which is not installed: {install(extra)}") from None


def install(extra: str) -> str:
    """The line that installs an extra. outrider is not on PyPI, nor are its own packages."""
    return f"pip install {f'./{extra}' if extra in _FOLDERS else repr(f'.[{extra}]')}   # in the checkout"
