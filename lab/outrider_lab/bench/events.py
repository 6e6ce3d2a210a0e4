"""What a client of a server needs: the server's address, the words of an error, and the events of a stream.

OpenAI's API streams `data: {JSON}` lines, the last one `data: [DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, cast
from urllib.parse import urlsplit

_LONGEST = 1 << 24  # bytes of a line


class StreamError(ValueError):
    """The server did not send a valid event stream. The message says what came."""


def address(url: str) -> str:
    """A server's address without /v1. Raises ValueError for a wrong address, and for one with a password."""
    parts = urlsplit(url if "//" in url else "http://" + url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the address of a server; an example: http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ValueError("the address has a name or password, which would be written into files; use OUTRIDER_API_KEY")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def error_message(body: bytes) -> str:
    """What an answer in JSON says of its error; "" if it says nothing."""
    try:
        return error_text(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def error_text(error: Any) -> str:
    """What the field `error` of an answer or an event says."""
    fields = cast(dict[str, Any], error) if isinstance(error, dict) else {}
    return str(fields.get("message", error))


def events(parts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to `[DONE]` or its end.

    Args:
        parts: The body as it arrives, cut anywhere.

    Raises StreamError for data that is not a stream of JSON objects.
    """
    for line in _lines(parts):
        if line.startswith("data:"):
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
        elif line and line[0] in "{<":
            raise StreamError(f"this is not an event stream: {line[:100]}")


def _lines(parts: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST:
            raise StreamError(f"this is not an event stream: {rest[:100].decode(errors='replace')}")
        yield from (line.rstrip(b"\r").decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")
