"""What a command asks of a running server. Imports nothing large."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

from outrider.core.http import address, error_message, error_text, events


class Client:
    """A server's address and key.

    timeout: seconds between two parts of a response. Raises ValueError for what is no address. Every request raises
    ConnectionError if no server answers, and ValueError, with the server's own words, for what it refuses.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(address(url))
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._open = lambda: kind(parts.hostname or "", parts.port, timeout=timeout)
        self._base = parts.path
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path."""
        connection, response = self._send("GET", path, None)
        try:
            return json.loads(response.read())
        finally:
            connection.close()

    def events(self, method: str, path: str, body: Any = None) -> Generator[dict[str, Any], None, None]:
        """The events of a stream. Closing the generator closes the connection."""
        connection, response = self._send(method, path, body)
        try:
            for event in events(iter(lambda: response.read1(1 << 16), b"")):
                if "error" in event:
                    raise ValueError(error_text(event["error"]))
                yield event
        finally:
            connection.close()

    def _send(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._open()
        try:
            connection.request(method, self._base + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except OSError as error:
            where = f"{connection.host}:{connection.port}"
            raise ConnectionError(
                f"no server answers at {where} ({error}); start one: outrider serve builtin:code"
            ) from error
        if response.status != 200:
            message = error_message(response.read()) or f"{connection.host} answers {response.status} to {path}"
            hint = "; give the key with --api-key or OUTRIDER_API_KEY" if response.status == 401 else ""
            connection.close()
            raise ValueError(message + hint)
        return connection, response
