"""One line for each request, to standard error or a file. A log that cannot be written never stops a request."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("outrider.serve")


def clean(text: str) -> str:
    """Text that can neither begin a line nor steer a terminal: what cannot be printed is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class LineFormatter(logging.Formatter):
    """One line for each record. The lines of a traceback are indented, so none of them looks like a record."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler may have kept its own lines there
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = clean(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join("    " + clean(line) for line in super().formatException(ei).splitlines())


class LogHandler(logging.StreamHandler):
    """Writes lines to a file or to standard error. A full disk only loses lines, and `failed` counts them."""

    def __init__(self, file: Path | None, failed: Callable[[], None]) -> None:
        super().__init__(sys.stderr if file is None else file.open("a", encoding="utf-8", errors="replace"))
        self._failed = failed
        self.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        self._failed()


def start(file: Path | None, failed: Callable[[], None]) -> LogHandler:
    """Write outrider's log to a file; None is standard error. failed: called for each lost line."""
    handler = LogHandler(file, failed)
    top = logging.getLogger("outrider")
    top.addHandler(handler)
    top.setLevel(logging.INFO)
    top.propagate = False
    return handler
