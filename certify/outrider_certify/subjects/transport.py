"""Requests to a server that is certified: asked again when it is busy, read as a stream, and watched for its end."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import httpx

from outrider_certify.subject import Unsupported
from outrider_certify.trials import ENDED

_CONNECT = 10.0  # seconds
_TRIES, _PAUSE = 4, 0.5  # for a server that is busy or breaks off; seconds, doubled each time
_HANGS = 2  # times without an answer in time, after which the server hangs at this request
_LONGEST_PAUSE = 20.0
_WAIT = 180.0  # seconds for a server that ended, until it is started again


class RefusedRequest(Unsupported):
    """HTTP 4xx: the server does not take the request."""


class BrokenServer(ConnectionError):
    """The server failed at this request: HTTP 500, it broke off each time, or it gave no answer in time twice."""


def address(url: str) -> str:
    """A server's address without /v1. Raises ValueError for a wrong address, and for one with a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the address of a server; an example: http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ValueError("the address has a name or password, which would be written into files; use OUTRIDER_API_KEY")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def curl(url: str, body: dict[str, Any]) -> str:
    """The command that sends a request. A key stays in the environment."""
    return f"curl -s {url} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


class ServerClient:
    """One server. gone: why it answers nothing any more; "" while it does. troubles: what went wrong, and how often.

    Raises ValueError for a wrong address.
    """

    def __init__(
        self, url: str, *, api_key: str | None, timeout: float, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url, self.gone, self._answered = address(url), "", False
        self.timeout, self.troubles = timeout, Counter[str]()
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=_CONNECT),
            transport=transport,
            trust_env=urlsplit(self.url).hostname not in ("localhost", "127.0.0.1", "::1"),  # no proxy to this machine
        )

    def get(self, path: str) -> httpx.Response | None:
        """None if no server answers."""
        try:
            return self._http.get(path)
        except httpx.HTTPError:
            return None

    def first_model(self) -> str:
        """The first model that the server lists. Raises ConnectionError if it lists none, or does not answer."""
        try:
            answer = self._http.get("/v1/models", timeout=_CONNECT)
        except httpx.HTTPError as error:
            raise ConnectionError(f"no server answers at {self.url} ({error})") from None
        if answer.status_code == 401:
            raise ConnectionError(f"{self.url} needs a key: set OUTRIDER_API_KEY in the environment")
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            said = " ".join(answer.text.split())[:200] or answer.reason_phrase
            raise ConnectionError(
                f"{self.url} does not list its models ({said}); name one: --served-model NAME"
            ) from None

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
        pause, why, broken, hangs = _PAUSE, self.gone, "", 0
        for attempt in range(_TRIES if not self.gone else 0):
            unreachable = False
            try:
                status, headers, answer = self._once(path, body)
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
                unreachable = isinstance(error, httpx.ConnectError)
                if isinstance(error, httpx.ReadTimeout):
                    self.troubles["it gave no answer in time"] += 1
                    hangs += 1
                    if hangs == _HANGS:
                        raise BrokenServer(
                            f"it hangs: no answer within {self.timeout:g} s, {hangs} times ({why})"
                        ) from None
                if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
                    self.troubles["it broke off without an answer"] += 1
                    broken = broken or f"it broke off without an answer ({why})"
            else:
                self._answered = True
                if status == 200:
                    if isinstance(answer, dict):
                        return answer
                    raise ConnectionError(f"the server's answer is not {'a JSON object' if answer else 'JSON'}")
                why = f"HTTP {status}: {' '.join(str(answer).split())[:200]}"
                if status == 429:
                    self.troubles["it limits the rate of requests (HTTP 429)"] += 1
                elif status >= 500:
                    self.troubles[f"it failed (HTTP {status})"] += 1
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
            raise BrokenServer(broken + (f"; {ENDED}" if self.gone else ""))
        raise ConnectionError(why)

    def _once(self, path: str, body: dict[str, Any]) -> tuple[int, httpx.Headers, Any]:
        """(status, headers, the answer): a dict; else the text of an error, a value that is no dict, or "" for no JSON."""
        with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code == 200 and body.get("stream"):
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    raise RefusedRequest("the server has no streams: it answers in one piece")
                return 200, answer.headers, joined(answer.iter_lines())
            content = answer.read().decode(errors="replace")
            try:
                return answer.status_code, answer.headers, json.loads(content) if answer.status_code == 200 else content
            except ValueError:
                return 200, answer.headers, ""


def joined(lines: Iterable[str]) -> dict[str, Any]:
    """The events of a stream as one answer, in the form of an answer in one piece. lines: `data: {JSON}`, then `data: [DONE]`.

    Raises httpx.RemoteProtocolError for a stream that reports an error, that is no JSON, or that ends without `[DONE]`.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            return {**answer, "choices": [choices[i] for i in sorted(choices)]}
        try:
            event = json.loads(data)
            if "error" in event:
                raise httpx.RemoteProtocolError(f"the stream reports an error: {str(event['error'])[:200]}")
            answer |= {k: v for k, v in event.items() if k != "choices" and v is not None}
        except (ValueError, TypeError, AttributeError):
            raise httpx.RemoteProtocolError(f"an event of the stream is no JSON object: {data[:100]}") from None
        for piece in event.get("choices") or []:
            _add(choices.setdefault(piece.get("index", 0), {"text": "", "logprobs": {}, "token_ids": []}), piece)
    raise httpx.RemoteProtocolError("the stream ended without its last event, [DONE]")


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a stream to its choice."""
    delta = piece.get("delta") or {}
    choice["text"] += piece.get("text") or delta.get("content") or ""
    choice["token_ids"] += piece.get("token_ids") or []
    for name, values in (piece.get("logprobs") or {}).items():
        if isinstance(values, list):
            choice["logprobs"].setdefault(name, []).extend(values)
    for name in ("finish_reason", "prompt_token_ids"):
        if piece.get(name) is not None:
            choice[name] = piece[name]
