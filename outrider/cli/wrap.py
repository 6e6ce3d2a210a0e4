"""Text that comes in pieces, on a terminal: no word is broken at its edge."""

from __future__ import annotations

import shutil
from typing import TextIO

from rich.cells import cell_len

_TAB = 8


class WordWrap:
    """Writes text as it comes, and breaks lines between words. A word is written when its end is known: call `end` at last."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._column = 0  # cells of this line that are written
        self._gap = self._word = ""

    def write(self, text: str) -> None:
        """Add text. Control characters other than a newline and a tab must not be in it."""
        for character in text:
            if character == "\n":
                self.end()
                self._out.write("\n")
                self._column = 0
            elif character == "\t":
                self._put()
                self._gap += " " * (_TAB - (self._column + len(self._gap)) % _TAB)
            elif character == " ":
                self._put()
                self._gap += " "
            else:
                self._word += character
                if cell_len(character) > 1:  # between wide characters a line can always break
                    self._put()
        self._out.flush()

    def end(self) -> None:
        """Write what was held back."""
        self._put()
        self._gap = ""
        self._out.flush()

    def _put(self) -> None:
        if not self._word:
            return
        size, width = cell_len(self._word), shutil.get_terminal_size().columns
        if self._column and self._column + len(self._gap) + size > width:
            self._out.write("\n")
            self._column, self._gap = 0, ""
        self._out.write(self._gap + self._word)
        self._column += len(self._gap) + size
        if self._column > width:  # the terminal broke a word that is longer than a line
            self._column = (self._column - 1) % width + 1
        self._gap = self._word = ""
