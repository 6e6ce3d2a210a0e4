"""The answers of a batch that is not complete: each is on the disk before the next one counts."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from outrider.core.files import written_whole
from outrider.core.jsonl import JsonLines
from outrider.serve.batch.lines import BatchLine
from outrider.serve.errors import dumps

_FORMAT = 1


class Journal:
    """`OUTPUT.partial`: one line on how the answers are made, then one for each answer, in the order of their ends.

    `finish` writes OUTPUT in the order of the input and removes the journal. So OUTPUT is there only when it is complete.
    A process that is killed loses no answer of the journal. A line that was cut is dropped.
    """

    def __init__(self, output: Path, made_with: dict[str, Any]) -> None:
        """made_with: what changes the texts. Raises ValueError for a journal of other settings, and for an output that is
        there already; OSError for a journal that another process writes or that cannot be written."""
        self.output, self.path = output, output.with_name(output.name + ".partial")
        if not output.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {output.absolute().parent} to write {output.name} to")
        if output.exists() and not self.path.exists():
            raise ValueError(f"{output} is there already; delete it, or name another file with -o")
        self._places = dict[str, tuple[int, int]]()  # where the row of a key starts, and its bytes
        try:
            self._file = JsonLines(self.path, alone=True)
        except BlockingIOError:
            raise BlockingIOError(f"another process writes {self.path}; wait for it, or name another output") from None
        self._synced = monotonic()
        try:
            self._recover(made_with)
        except BaseException:
            self._file.close()
            raise

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Keep an answer. Raises ValueError if the line has one."""
        if key in self._places:
            raise ValueError(f"line {key} has an answer already")
        written = dumps(row)
        head = f'{{"key": "{key}", "row": '.encode()
        with _naming(self.path):
            start = self._file.add(head + written + b"}")
            self._places[key] = (start + len(head), len(written))
            if monotonic() - self._synced > 1:  # a lost machine keeps all but the last second
                self._file.sync()
                self._synced = monotonic()

    def row(self, key: str) -> dict[str, Any]:
        """The answer of a line. Raises KeyError if it has none."""
        return json.loads(self._raw(key))

    def finish(self, lines: Sequence[BatchLine]) -> None:
        """Write the output and remove the journal. Raises KeyError if a valid line has no answer."""
        with _naming(self.output), written_whole(self.output) as made, made.open("wb") as file:
            for line in lines:
                raw = self._raw(line.key) if line.code is None else dumps(line.row)
                file.write(raw + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.path.unlink()
        self.close()

    def close(self) -> None:
        """Let another process continue."""
        with suppress(OSError):  # of what is still to write; `add` has said so
            self._file.close()

    def _raw(self, key: str) -> bytes:
        return self._file.read(*self._places[key])

    def _recover(self, made_with: dict[str, Any]) -> None:
        """Read the answers of an earlier process, and cut what it did not finish."""
        header = {"outrider_batch": _FORMAT, "made_with": made_with}
        first, end = json.dumps(header).encode(), 0
        for number, line in enumerate(self._file.lines()):
            if number == 0 and not (line.value is None and first.startswith(line.raw)):
                self._check(line.value, header)
            if not line.whole:
                break
            if number:
                key, row = (line.value.get(n) if isinstance(line.value, dict) else None for n in ("key", "row"))
                head = f'{{"key": "{key}", "row": '.encode()
                if not (isinstance(key, str) and isinstance(row, dict) and line.raw.startswith(head)):
                    raise ValueError(
                        f"{self.path}, line {number + 1}: this is no answer of a batch. Delete the line, and its request is "
                        "answered again; or delete the file to start anew"
                    )
                self._places[key] = (line.start + len(head), len(line.raw) - len(head) - len(b"}\n"))
            end = line.end
        with _naming(self.path):
            self._file.cut(end)
            if end == 0:
                self._file.add(first)

    def _check(self, found: Any, wanted: dict[str, Any]) -> None:
        if found == wanted:
            return
        old = found.get("made_with") if isinstance(found, dict) else None
        if not isinstance(old, dict) or found.get("outrider_batch") != _FORMAT:
            raise ValueError(f"{self.path} is not the beginning of a batch of this version; delete it to start again")
        names = sorted(n for n in {*old, *wanted["made_with"]} if old.get(n) != wanted["made_with"].get(n))
        was = ", ".join(f"{name}={old.get(name)!r}" for name in names)
        raise ValueError(
            f"{self.path} was begun with {was}; start with that again to continue, or delete the file to start anew"
        )


@contextmanager
def _naming(path: Path) -> Generator[None, None, None]:
    """Give an error of the disk the file's name, and what to do."""
    try:
        yield
    except OSError as error:
        how = f"{error.strerror}; nothing that was answered is lost: make room, and run the same command again"
        raise OSError(error.errno, how, str(path)) from error
