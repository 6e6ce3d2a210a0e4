"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.routing import Match

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """param: the field of the request that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(BaseModel):
    """What OpenAI's clients read."""

    error: ErrorDetail


@dataclass(eq=False)
class Refused(Exception):
    """The response is an error. The client sees the message. retry: seconds for `Retry-After`. challenge: how to give the key."""

    message: str
    status: int = 400
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    retry: int | None = None
    challenge: str = "Bearer"

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {} if self.retry is None else {"retry-after": str(self.retry)}
        if self.status == 401:
            headers["www-authenticate"] = self.challenge
        return json_response(self.body, self.status, headers)


@contextmanager
def refusing(param: str | None = None) -> Generator[None, None, None]:
    """Make Refused of a ValueError. param: of an error that does not name its own."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error), param=getattr(error, "name", param)) from error


def dumps(value: Any) -> bytes:
    """JSON in UTF-8. Half of a surrogate pair becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


def invalid_body(errors: Sequence[Any]) -> Refused:
    """The error for a body that pydantic refuses. errors: its own, at least one."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return Refused(f"the body is not JSON: {first['ctx']['error']}, at character {first['loc'][-1]}")
    where = ".".join(str(part) for part in first["loc"] if part != "body" and not str(part)[0].isupper())
    many = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    if where:
        return Refused(f"{where}: {message}{many}", param=where)
    return Refused(message + many, param=getattr(first.get("ctx", {}).get("error"), "name", None))


def install(app: FastAPI) -> None:
    """Give every error of the framework the shape of OpenAI's errors."""

    async def refused(request: Request, error: Any) -> Response:
        return error.response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        what = {
            404: f"this server has no {request.url.path}",
            405: f"{request.url.path} does not take {request.method}",
        }
        answer = Refused(what.get(error.status_code, str(error.detail)), error.status_code).response()
        answer.headers.update(error.headers or {})
        if error.status_code == 405:  # several routes may have the path, and the framework names the methods of one
            found = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
            answer.headers["allow"] = ", ".join(sorted({m for route in found for m in getattr(route, "methods", ())}))
        return answer

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return invalid_body(error.errors()).response()

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
