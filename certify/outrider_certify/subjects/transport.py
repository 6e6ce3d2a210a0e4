"""Requests to a server that is certified: asked again when it is busy, read as a stream, and watched for its end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from outrider.core.extras import needs
from outrider.core.http import StreamError, address, error_text, events
from outrider.lab.bench.remote import client_of, first_model
from outrider_certify.subjects.base import Unsupported

with needs("certify", "certifying a server"):
    import httpx

_TRIES, _PAUSE = 4, 0.5  # for a server that is busy or breaks off; seconds, doubled each time
_LONGEST_PAUSE = 20.0
_WAIT = 180.0  # seconds for a server that ended, until somebody has started it again


class RefusedRequest(Unsupported):
    """HTTP 4xx: the server does not take the request."""


class BrokenServer(ConnectionError):
    """The server failed at this request: HTTP 500, or it broke off each time. It is neither busy nor slow."""


class ServerClient:
    """One server. gone: why it answers nothing any more; "" while it does.

    Raises ValueError for a wrong address.
    """

    def __init__(
        self, url: str, *, api_key: str | None, timeout: float, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url, self.gone, self._answered = address(url), "", False
        self._http = client_of(url, api_key, timeout, transport)

    def get(self, path: str) -> httpx.Response | None:
        """None if no server answers."""
        try:
            return self._http.get(path)
        except httpx.HTTPError:
            return None

    def first_model(self) -> str:
        """The first model that the server lists. Raises ConnectionError if it lists none, or does not answer."""
        return first_model(self._http, self.url, "--served-model")

    def ready(self) -> str:
        """Wait for a server that ended. Returns why it can be asked nothing more, "" if it answers."""
        end = time.monotonic() + _WAIT
        while self.gone:
            answer = self.get("/v1/models")
            if answer is not None and answer.status_code < 500:
                self.gone = ""
            elif time.monotonic() > end:
                break
            else:
                time.sleep(_PAUSE)
        return self.gone

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer. A server that is busy or breaks off is asked again.

        Raises RefusedRequest, BrokenServer if it fails at this request, and ConnectionError if it stays busy or slow.
        """
        pause, why, broken = _PAUSE, self.gone, ""
        for attempt in range(_TRIES if not self.gone else 0):
            unreachable = False
            try:
                status, headers, found = self._once(path, body)
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
                unreachable = isinstance(error, httpx.ConnectError)
                if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
                    broken = broken or f"it broke off without an answer ({why})"
            else:
                self._answered = True
                if status == 200:
                    if isinstance(found, dict):
                        return found
                    raise ConnectionError(f"the server's answer is not {'a JSON object' if found else 'JSON'}")
                why = f"HTTP {status}: {' '.join(str(found).split())[:200]}"
                if status == 500:
                    broken = broken or why
                elif status != 429 and status < 500:
                    raise RefusedRequest(f"the server refuses it ({why})")
                wanted = headers.get("retry-after", "")
                pause = max(pause, float(wanted)) if wanted.replace(".", "", 1).isdigit() else pause
            if attempt < _TRIES - 1:
                time.sleep(min(pause, _LONGEST_PAUSE))
                pause *= 2
            elif unreachable and self._answered:
                self.gone = f"the server at {self.url} ended ({broken or why})"
        if broken:
            raise BrokenServer(broken + ("; then the server was gone" if self.gone else ""))
        raise ConnectionError(why)

    def _once(self, path: str, body: dict[str, Any]) -> tuple[int, httpx.Headers, Any]:
        """(status, headers, the answer): a dict; else the text of an error, a value that is no dict, or "" for no JSON."""
        if not body.get("stream"):
            answer = self._http.post(path, json=body)
            if answer.status_code != 200:
                return answer.status_code, answer.headers, answer.text
            try:
                return 200, answer.headers, answer.json()
            except ValueError:
                return 200, answer.headers, ""
        with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                return answer.status_code, answer.headers, answer.read().decode(errors="replace")
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise RefusedRequest("the server has no streams: it answers in one piece")
            return 200, answer.headers, joined(answer.iter_bytes())

    def close(self) -> None:
        self._http.close()


def joined(parts: Iterable[bytes]) -> dict[str, Any]:
    """The events of a stream as one answer, in the form of an answer in one piece. parts: of the body.

    Raises httpx.RemoteProtocolError for a stream that reports an error, or that ends without `[DONE]`.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    try:
        for event in events(parts, whole=True):
            if "error" in event:
                raise StreamError(f"the stream reports an error: {error_text(event['error'])[:200]}")
            answer |= {k: v for k, v in event.items() if k != "choices" and v is not None}
            for piece in event.get("choices") or []:
                _add(choices.setdefault(piece.get("index", 0), {"text": "", "logprobs": {}, "token_ids": []}), piece)
    except StreamError as error:
        raise httpx.RemoteProtocolError(str(error)) from None
    return {**answer, "choices": [choices[i] for i in sorted(choices)]}


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a stream to its choice."""
    delta = piece.get("delta") or {}
    choice["text"] += piece.get("text") or delta.get("content") or ""
    choice["token_ids"] += piece.get("token_ids") or []
    for name, values in (piece.get("logprobs") or {}).items():
        if isinstance(values, list):
            choice["logprobs"].setdefault(name, []).extend(values)
    for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
        if piece.get(name) is not None:
            choice[name] = piece[name]
