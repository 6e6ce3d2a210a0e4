"""The input of a batch, and the journal of its answers: each is on the disk before the next one counts.

The input is a JSON object a line, `{"custom_id", "method", "url", "body"}`. See
https://platform.openai.com/docs/api-reference/batch/request-input.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from outrider.core.files import written_whole
from outrider.core.jsonl import JsonLines
from outrider.serve.errors import dumps

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_EXAMPLE = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}'


@dataclass(frozen=True)
class BatchRequest:
    """One valid line. key: a digest of the line."""

    key: str
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchLine:
    """Where a line is, and what is wrong with it.

    Args:
        number: from 1.
        start: where it begins, in bytes.
        size: in bytes.
        key: a digest of its bytes.
        custom_id: what its author calls it.
        code: of what is wrong.
        problem: what is wrong.
    """

    number: int
    start: int
    size: int
    key: str
    custom_id: str | None
    code: str | None = None
    problem: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The answer to a line that is not valid."""
        return {
            "id": f"batch_req_{self.key}",
            "custom_id": self.custom_id,
            "response": None,
            "error": {"code": self.code, "message": f"line {self.number}: {self.problem}"},
        }


class _BadLine(ValueError):
    def __init__(self, code: str, problem: str) -> None:
        super().__init__(problem)
        self.code = code


def scan(path: Path) -> list[BatchLine]:
    """All lines of a file that are not blank. A broken line says what is wrong. Raises OSError."""
    lines, seen, start = list[BatchLine](), dict[str, int](), 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            place, start = (start, len(raw)), start + len(raw)
            if not raw.strip():
                continue
            key, name, code, problem = hashlib.sha256(raw.strip()).hexdigest()[:24], None, None, None
            try:
                value = _object(raw)
                name = value.get("custom_id") if isinstance(value.get("custom_id"), str) else None
                request = _request(value, key)
                if (first := seen.setdefault(request.custom_id, number)) != number:
                    raise _BadLine("duplicate_custom_id", f"custom_id {name!r} is that of line {first}; make it unique")
            except _BadLine as broken:
                code, problem = broken.code, str(broken)
            lines.append(BatchLine(number, *place, key, name, code, problem))
    return lines


def read(path: Path, lines: Iterable[BatchLine]) -> Iterator[BatchRequest]:
    """The requests of valid lines. Raises ValueError if the file changed after it was scanned."""
    with path.open("rb") as file:
        for line in lines:
            file.seek(line.start)
            raw = file.read(line.size)
            if hashlib.sha256(raw.strip()).hexdigest()[:24] != line.key:
                raise ValueError(f"{path} changed while it was read; start again, and answers are kept")
            yield _request(_object(raw), line.key)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _BadLine("invalid_json", f"this is not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine("invalid_json", f"this is not JSON ({error}); a line is {_EXAMPLE}") from None
    if not isinstance(value, dict):
        raise _BadLine("invalid_line", f"a line is one JSON object, such as {_EXAMPLE}")
    return value


def _request(value: dict[str, Any], key: str) -> BatchRequest:
    name, url, body, method = value.get("custom_id"), value.get("url"), value.get("body"), value.get("method", "POST")
    if not isinstance(name, str) or not name:
        raise _BadLine("missing_custom_id", "custom_id is a text that no other line has; answers are found by it")
    if name.encode("utf-8", "replace").decode() != name:
        raise _BadLine("invalid_custom_id", "custom_id has half of a surrogate pair, which is not a character")
    if method != "POST":
        raise _BadLine("invalid_method", f'method is "POST", got {json.dumps(method)[:40]}')
    if url not in ENDPOINTS:
        raise _BadLine("invalid_url", f"url is one of {', '.join(ENDPOINTS)}, got {json.dumps(url)[:80]}")
    if not isinstance(body, dict):
        raise _BadLine("invalid_body", f"body is the JSON object that would be sent to {url}")
    return BatchRequest(key, name, url, body)


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
        line = dumps({"key": key, "row": row})
        with _naming(self.path):
            self._places[key] = self._file.add(line), len(line)
            if monotonic() - self._synced > 1:  # a lost machine keeps all but the last second
                self._file.sync()
                self._synced = monotonic()

    def row(self, key: str) -> dict[str, Any]:
        """The answer of a line. Raises KeyError if it has none."""
        return json.loads(self._file.read(*self._places[key]))["row"]

    def finish(self, lines: Sequence[BatchLine]) -> None:
        """Write the output and remove the journal. Raises KeyError if a valid line has no answer."""
        with _naming(self.output), written_whole(self.output) as path, path.open("wb") as file:
            for line in lines:
                file.write(dumps(self.row(line.key) if line.code is None else line.row) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.path.unlink()
        self.close()

    def close(self) -> None:
        """Let another process continue."""
        with suppress(OSError):  # of what is still to write; `add` has said so
            self._file.close()

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
                if not (isinstance(key, str) and isinstance(row, dict)):
                    raise ValueError(
                        f"{self.path}, line {number + 1}: this is no answer of a batch. Delete the line, and its request is "
                        "answered again; or delete the file to start anew"
                    )
                self._places[key] = line.start, len(line.raw)
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
