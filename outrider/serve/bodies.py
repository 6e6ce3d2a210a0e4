"""JSON bodies whose reading stays short. Reading and validation are single calls that stop every thread, also the event loop.

So they cannot move to a worker. Their time grows with the number of values, and that number is bounded before they start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

# The text of a prompt is one value, and each id of a token is one. A list, an object and a name cost more.
MAX_VALUES, MAX_PARTS = 250_000, 40_000


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Unusable(ValueError):
    """A body that is not read; the message says why."""


def check_characters(value: Any) -> None:
    """Raise Unusable for a JSON value with half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Unusable("the request has half of a surrogate pair, which is not a character") from None


def check_size(body: bytes) -> None:
    """Raise Unusable for JSON with more than MAX_VALUES values, or MAX_PARTS lists, objects and names. Parses nothing."""
    if body.count(b",") <= MAX_VALUES and sum(map(body.count, (b"[", b"{", b":"))) <= MAX_PARTS:
        return
    for pair in (b"\\\\", b'\\"'):  # what is left of quotes then begins or ends a string
        body = body.replace(pair, b"  ")
    codes = np.frombuffer(body, np.uint8)
    outside = np.cumsum(codes == ord('"'), dtype=np.uint8) % 2 == 0
    counts = np.bincount(codes[outside], minlength=256)
    if counts[ord(",")] > MAX_VALUES:
        raise Unusable(f"the body has more than {MAX_VALUES} values; send fewer, or text in place of token ids")
    if sum(counts[code] for code in b"[{:") > MAX_PARTS:
        raise Unusable(f"the body has more than {MAX_PARTS} lists, objects and names; send fewer")


class _BoundedRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            check_size(body)
            value = json.loads(body)
            if _SURROGATE.search(body):
                check_characters(value)
            return value
        except json.JSONDecodeError:
            raise
        except RecursionError:
            raise HTTPException(400, "the request is nested too deeply") from None
        except UnicodeDecodeError:
            raise HTTPException(400, "the body is not UTF-8, so it is not JSON") from None
        except Unusable as error:
            raise HTTPException(400, str(error)) from None
        except ValueError:
            raise HTTPException(400, "the body has a number with more digits than any field takes") from None


class BoundedRoute(APIRoute):
    """A route whose JSON body is checked with `check_size` before it is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            if request.url.path.startswith("/api/"):  # Ollama's clients need not say that a body is JSON
                headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
                request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await handle(_BoundedRequest(request.scope, request.receive))

        return bounded
