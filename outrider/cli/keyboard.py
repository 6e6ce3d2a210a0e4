"""Messages that a person types: lines with a history, and texts of several lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

try:
    import readline
except ImportError:  # a Python without it still reads lines
    readline = None

_KEPT = 1000  # lines of the history
_QUOTES = '"""'


class Keyboard:
    """Lines of a terminal. Arrow keys, a history that the next start still has, and pasted lines that stay together.

    history: the file of the history; None keeps it in memory. It is readable by its owner only. A file that cannot be
    written is no error: the history is in memory then.
    """

    def __init__(self, history: Path | None) -> None:
        self._history = history
        if readline is None:
            return
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
        readline.set_auto_history(False)  # a message is one entry, however many lines it has
        readline.set_history_length(_KEPT)
        if history is not None:
            with suppress(OSError):
                history.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(history, os.O_CREAT | os.O_APPEND, 0o600))
                readline.read_history_file(history)

    def line(self, prompt: str) -> str | None:
        """The next line without its newline; None at the end. Raises KeyboardInterrupt for ctrl-C."""
        if not sys.stdout.isatty():  # what is piped on is text only
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        with suppress(EOFError):
            return input(prompt)

    def remember(self, message: str) -> None:
        """Add a message to the history."""
        if readline is not None:
            readline.add_history(message)
            if self._history is not None:
                with suppress(OSError):
                    readline.append_history_file(1, self._history)


def message(line: Callable[[str], str | None]) -> str | None:
    '''The next message: a line, or the lines between """ and """. None at the end, also within quotes.'''
    text = line(">>> ")
    if text is None or not text.lstrip().startswith(_QUOTES):
        return text
    text = text.lstrip().removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        more = line("... ")
        if more is None:
            return None
        text += "\n" + more
    return text.rstrip().removesuffix(_QUOTES).strip("\n")
