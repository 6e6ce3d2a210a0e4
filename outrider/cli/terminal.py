"""What the commands share on the terminal: errors in one line, spinners, colours. Imports nothing large."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from outrider.core.suggest import faults

if TYPE_CHECKING:
    from rich.console import Console

DIM, RED, GREEN, YELLOW = "2", "31", "32", "33"


def show_warnings(debug: bool = False) -> None:
    """Show warnings as notes, from now on: those that are for the user, or all of them."""

    def note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if debug or issubclass(category, RuntimeWarning):
            warn(f"note: {message}")

    warnings.showwarning = note


@contextmanager
def readable(debug: bool) -> Iterator[None]:
    """Show an error as one red line and exit with code 2. Ctrl-C exits with 130, a closed pipe with 141.

    debug: show the traceback instead, and all warnings.
    """
    with warnings.catch_warnings():
        show_warnings(debug)
        try:
            yield
        except (KeyboardInterrupt, typer.Abort):
            warn("interrupted", RED)
            raise typer.Exit(130) from None
        # typer.Exit is a RuntimeError.
        except typer.Exit:
            raise
        # The reader of the pipe has ended, as in `outrider generate ... | head -1`.
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as error:
            if debug:
                raise
            from pydantic import ValidationError

            # its own text names classes and pages that users need not know
            said = "; ".join(faults(error)) if isinstance(error, ValidationError) else str(error)
            if isinstance(error, OSError) and error.strerror:  # without its number
                said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
            message = " ".join(said.split()) or type(error).__name__
            if not isinstance(error, (ValueError, OSError, MemoryError)):
                message = f"{type(error).__name__}: {message} (--debug shows where)"
            warn(f"error: {message}", RED)
            raise typer.Exit(2) from None


@contextmanager
def unechoed() -> Iterator[None]:
    """Show nothing of what is typed while a text is written, ^C included. It is the beginning of the next message."""
    keys = sys.stdin.fileno() if sys.stdin.isatty() and hasattr(os, "tcgetpgrp") else -1
    if keys < 0 or os.tcgetpgrp(keys) != os.getpgrp():  # a process in the background may not change the terminal
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] = quiet[3] & ~termios.ECHO | termios.NOFLSH  # ctrl-C keeps what was typed
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def loading(what: str) -> AbstractContextManager[Any]:
    """Show a spinner on a terminal."""
    return nullcontext() if plain(sys.stderr) else working(f"loading {what}")


def working(what: str) -> AbstractContextManager[Any]:
    """Say what runs for seconds, on standard error: a spinner on a terminal, a line elsewhere."""
    from rich.console import Console

    if not plain(sys.stderr):
        return Console(stderr=True).status(f"{what} ...")
    print(f"{what} ...", file=sys.stderr, flush=True)
    return nullcontext()


def check_folders(*files: Path | None) -> None:
    """Raise FileNotFoundError for a file that could not be written after the work, because its folder does not exist."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {file.absolute().parent} to write {file.name} to")


def home(path: Path) -> str:
    """A path as people write it: `~` for the home folder."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """Return the text in a colour, if the stream shows colours. code: an ANSI code, such as `GREEN`."""
    return text if not (text and code) or plain(stream or sys.stdout) else f"\x1b[{code}m{text}\x1b[0m"


def say(text: str, colour: str = DIM) -> None:
    """Print a line in a colour, on a terminal wrapped between words."""
    print(paint(wrapped(text), colour))


def warn(text: str, colour: str = YELLOW) -> None:
    """Print a line on standard error, in a colour."""
    print(paint(text, colour, sys.stderr), file=sys.stderr, flush=True)


def tell(text: str, code: str = DIM) -> None:
    """Show a line that is not the model's: never in a pipe of texts, and on a terminal wrapped between words."""
    to = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(paint(wrapped(text, to), code, to), file=to, flush=True)


def wrapped(text: str, stream: TextIO | None = None) -> str:
    """The text in lines that fit the terminal, broken between words. A pipe gets it as it is."""
    if not (stream or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = (textwrap.fill(s, width, break_long_words=False, break_on_hyphens=False) for s in text.split("\n"))
    return "\n".join(lines)


def command(*words: str) -> str:
    """A command that can be copied. On a terminal its lines end between its words, or after a comma of JSON within one.

    words: as a shell reads them, so quoted where that is needed.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    text, column = words[0], len(words[0])
    for word in words[1:]:
        for n, part in enumerate(re.split("(?<=,) ", word)):
            fits = column + len(part) + 3 <= width  # a space, and a space with a backslash behind it
            text += (" " if fits else "\n  " if n else " \\\n  ") + part
            column = (column + 1 if fits else 2) + len(part)
    return text


def plain(stream: TextIO) -> bool:
    """Whether to write no escape codes: no terminal, a dumb one, or NO_COLOR (https://no-color.org)."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def printable(text: str) -> str:
    """Return text that is safe on a terminal: control characters are shown as codes and have no effect."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else f"\\x{ord(c):02x}" for c in text)


def console() -> Console:
    """A rich console on standard output, with colours if it shows them."""
    from rich.console import Console

    return Console(color_system=None if plain(sys.stdout) else "auto")
