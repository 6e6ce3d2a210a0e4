"""Server-sent events as OpenAI's API streams them: `data: {JSON}` lines, the last one `data: [DONE]`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

_LONGEST = 1 << 24  # bytes of a line


class StreamError(ValueError):
    """The server did not send a valid event stream. The message says what came."""


def events(parts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to `[DONE]` or its end.

    parts: the body as it arrives, cut anywhere. Raises StreamError for data that is not a stream of JSON objects.
    """
    for line in _lines(parts):
        if not line.startswith("data:"):
            if line and line[0] in "{<":
                raise StreamError(f"this is not an event stream: {line[:100]}")
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise StreamError(f"an event is not JSON: {data[:100]}") from None
        if not isinstance(event, dict):
            raise StreamError(f"an event is not an object: {data[:100]}")
        yield event


def _lines(parts: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST:
            raise StreamError(f"this is not an event stream: {rest[:100].decode(errors='replace')}")
        yield from (line.rstrip(b"\r").decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")
