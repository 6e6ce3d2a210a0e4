"""What the commands share: errors as one line, spinners, colours where the stream shows them. Imports nothing heavy."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console

DIM, RED, GREEN, YELLOW = "2", "31", "32", "33"


def environment() -> None:
    """Settings that count only before torch and transformers are imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin stall when another program wants the core
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def readable(debug: bool) -> Iterator[None]:
    """Errors as one red line and exit code 2; ctrl-C as exit code 130."""

    def note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if debug or issubclass(category, RuntimeWarning):
            print(paint(f"note: {message}", YELLOW, sys.stderr), file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = note
        try:
            yield
        except KeyboardInterrupt:
            print(paint("interrupted", RED, sys.stderr), file=sys.stderr)
            raise typer.Exit(130) from None
        except typer.Exit:  # a RuntimeError
            raise
        except BrokenPipeError:  # the reader has gone, as in `outrider generate ... | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as error:
            if debug:
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, (ValueError, OSError, MemoryError)):
                message = f"{type(error).__name__}: {message} (--debug shows where)"
            print(paint(f"error: {message}", RED, sys.stderr), file=sys.stderr)
            raise typer.Exit(2) from None


@contextmanager
def loading(what: str) -> Iterator[None]:
    """A spinner on a terminal; transformers' own bars and logs stay silent."""
    with working(f"loading {what}"):
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield


def working(what: str) -> AbstractContextManager[Any]:
    """A spinner on a terminal."""
    from rich.console import Console

    return nullcontext() if plain(sys.stderr) else Console(stderr=True).status(f"{what} ...")


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """The text with a colour, where the stream shows colours."""
    return text if not text or plain(stream or sys.stdout) else f"\x1b[{code}m{text}\x1b[0m"


def plain(stream: TextIO) -> bool:
    """No escape codes: not a terminal, a dumb one, or NO_COLOR (https://no-color.org)."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def printable(text: str) -> str:
    """On a terminal, control characters a model writes are shown and not obeyed."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else f"\\x{ord(c):02x}" for c in text)


def console() -> Console:
    from rich.console import Console

    return Console(color_system=None if plain(sys.stdout) else "auto")
