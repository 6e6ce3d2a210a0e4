"""Thoughts: what a model writes between marks before its answer."""

from __future__ import annotations

from typing import Any

from outrider.serve.tools import begun

OPENING, CLOSING = "<think>", "</think>"  # of a thought
END = 64  # tokens of a prompt that may show that the template began a thought


class ThinkingReader:
    """Splits the text of one answer into thought and content. How the text is cut into pieces changes nothing."""

    def __init__(self, prompt: str = "") -> None:
        """prompt: its end, or all of it. Some templates begin the thought themselves."""
        self._inside, self._text = prompt.rstrip().endswith(OPENING), ""
        self._over, self._trim = False, self._inside  # no thought can follow; space before the next text goes

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """Add text. Returns the thought and the content that are certain now. last: there is no more text."""
        self._text += text
        thought = content = ""
        if not self._inside and not self._over:
            start = self._text.lstrip()
            if start.startswith(OPENING):
                self._text, self._inside, self._trim = start[len(OPENING) :], True, True
            elif last or not OPENING.startswith(start):
                self._over = True
        if self._inside:
            self._trimmed()
            thought, closed, rest = self._text.partition(CLOSING)
            if closed:
                self._text, self._inside, self._over, self._trim = rest, False, True, True
            else:
                sure = len(thought if last else thought[: len(thought) - begun(thought, CLOSING)].rstrip())
                thought, self._text = thought[:sure], thought[sure:]
            thought = thought.rstrip()
        if self._over:
            self._trimmed()
            content, self._text = self._text, ""
        return thought, content

    def _trimmed(self) -> None:
        """Leave out the space at the beginning of a part."""
        if self._trim:
            self._text = self._text.lstrip()
            self._trim = not self._text


def thinks(template: Any) -> bool:
    """Whether a chat template is one of a model that thinks."""
    return CLOSING in str(template or "")
