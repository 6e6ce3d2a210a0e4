"""Messages that a person types: lines with a history, and texts of several lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

_KEPT = 1000  # lines of the history
_QUOTES = '"""'


class Keyboard:
    """Lines of a terminal. Arrow keys, a history that the next start still has, and pasted lines that stay together.

    history: the file of the history; None keeps it in memory. It is readable by its owner only. A file that cannot be
    written is no error: the history is in memory then.
    """

    def __init__(self, history: Path | None) -> None:
        try:
            import readline
        except ImportError:  # a Python without it still reads lines
            self._readline = None
            return
        self._readline, self._file = readline, history
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
        readline.set_auto_history(False)  # a message is one entry, however many lines it has
        readline.set_history_length(_KEPT)
        if history is not None:
            try:
                history.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(history, os.O_CREAT | os.O_APPEND, 0o600))
                readline.read_history_file(history)
            except OSError:
                self._file = None

    def line(self, prompt: str) -> str | None:
        """The next line without its newline; None at the end. Raises KeyboardInterrupt for ctrl-C."""
        try:
            if sys.stdout.isatty():
                return input(prompt)
            sys.stderr.write(prompt)  # what is piped on is text only
            sys.stderr.flush()
            return input()
        except EOFError:
            return None

    def remember(self, message: str) -> None:
        """Add a message to the history."""
        if self._readline is None:
            return
        self._readline.add_history(message)
        if self._file is not None:
            try:
                self._readline.append_history_file(1, self._file)
            except OSError:
                self._file = None


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
