"""The input of a batch: a JSON object a line, `{"custom_id", "method", "url", "body"}`.

See https://platform.openai.com/docs/api-reference/batch/request-input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    number: from 1. start, size: bytes in the file. key: a digest of its bytes. code, problem: None for a valid line.
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
    found, seen, start = list[BatchLine](), dict[str, int](), 0
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
            found.append(BatchLine(number, *place, key, name, code, problem))
    return found


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
