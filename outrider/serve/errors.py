"""Errors as clients expect them. OpenAI's read {"error": {"message", "type", "param", "code"}}; a path has its protocol's."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from outrider.core.params import ContextOverflow
from outrider.core.suggest import said

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = TYPES | {
    403: "permission_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


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
    overflow: ContextOverflow | None = None

    @classmethod
    def of(cls, error: Exception, param: str | None) -> Refused:
        """Of an error in what a client sent. param: of an error that does not name its own."""
        overflow = error if isinstance(error, ContextOverflow) else None
        code = None if overflow is None else overflow.code
        return cls(str(error), param=getattr(error, "name", param), code=code, overflow=overflow)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call fields as the client did. names: of another protocol's field, by ours."""
        if self.param is None:
            return
        field, dot, rest = self.param.partition(".")
        ours, self.param = field, names.get(field, field) + dot + rest
        if self.overflow is not None:
            self.message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), self.message)
        elif ours in names:
            self.message = re.sub(rf"^{ours}\b|\b{ours}(?==)", names[ours], self.message)

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str | None) -> dict[str, Any]:
        """The body as Anthropic's clients read it."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        message, long = self._named, self.overflow
        if long is not None and long.prompt >= long.limit:  # clients look for these words
            message = f"prompt is too long: {long.prompt} tokens > {min(long.limit, long.prompt - 1)} maximum"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}

    @property
    def _named(self) -> str:
        """The message with the field in it, for a protocol whose errors have no place for its name."""
        return self.message if self.param is None or self.param in self.message else f"{self.param}: {self.message}"

    def body_of(self, scope: Mapping[str, Any]) -> dict[str, Any]:
        """The body in the protocol of a request's path."""
        path = scope["path"]
        if path.startswith("/v1/messages"):
            return self.messages_body(scope.get("state", {}).get("request_id"))
        return {"error": self._named} if path.startswith("/api/") else self.body

    def response(self, scope: Mapping[str, Any]) -> Response:
        """The answer to a request."""
        headers = {} if self.retry is None else {"retry-after": str(self.retry)}
        if self.status == 401:
            headers["www-authenticate"] = self.challenge
        return json_response(self.body_of(scope), self.status, headers)


def schema_of(body: Any) -> dict[str, Any]:
    """The JSON schema of bodies like this one, which has texts, nulls for texts that may be missing, and objects of both."""
    if isinstance(body, dict):
        fields = {name: schema_of(value) for name, value in body.items()}
        return {"type": "object", "properties": fields, "required": [*fields]}
    return {"type": ["string", "null"] if body is None else "string"}


def answered(description: str, *streams: str) -> dict[int | str, dict[str, Any]]:
    """The documentation of an answer that is an object. streams: the types of its other forms."""
    kinds = {kind: {"schema": {"type": "string"}} for kind in streams}
    return {200: {"description": description, "content": {"application/json": {"schema": {"type": "object"}}, **kinds}}}


def no_model(name: str, served: Iterable[str]) -> Refused:
    """The error for a model that is not served. served: those that are."""
    here = ", ".join(map(repr, served))
    text = f"there is no model {name[:80]!r} here; this server has {here}"
    return Refused(text, 404, param="model", code="model_not_found")


@contextmanager
def refusing(param: str | None = None) -> Generator[None, None, None]:
    """Make Refused of a ValueError. param: of an error that does not name its own."""
    try:
        yield
    except ValueError as error:
        raise Refused.of(error, param) from error


@contextmanager
def called(*tables: Mapping[str, str]) -> Generator[None, None, None]:
    """Refuse with the names that the client used. tables: names of the client's fields by ours, one after the other."""
    try:
        yield
    except (Refused, ValidationError) as error:
        refused = invalid_body(error.errors()) if isinstance(error, ValidationError) else error
        for names in tables:
            refused.rename(names)
        raise refused from error.__cause__


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
    if isinstance(first.get("input"), bytes):
        return Refused("the body is not JSON, or its content-type is not application/json")
    if first["loc"] == ("body",) and first["type"] != "value_error":
        kind = "empty" if first["type"] == "missing" else "no JSON object"
        return Refused(f'the body is {kind}; send one such as {{"model": ..., "messages": [...]}}')
    where = ".".join(str(part) for part in first["loc"] if part != "body" and not str(part)[:1].isupper())
    many = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = said(first)
    if where:
        return Refused(f"{where}: {message}{many}", param=where)
    return Refused(message + many, param=getattr(first.get("ctx", {}).get("error"), "name", None))


def _unread(error: BaseException | None) -> str:
    """Why a body cannot be read. error: of `json.loads`, but no JSONDecodeError."""
    if isinstance(error, RecursionError):
        return "the request is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "the body is not UTF-8, so it is not JSON"
    return "the body has a number with more digits than any field takes"


def install(app: FastAPI) -> None:
    """Give every error of the framework the shape of the protocol's errors."""

    async def refused(request: Request, error: Any) -> Response:
        known = error if isinstance(error, Refused) else invalid_body(error.errors())
        return known.response(request.scope)

    async def http(request: Request, error: Any) -> Response:
        what = {
            400: _unread(error.__cause__),
            404: f"this server has no {request.url.path}; GET /openapi.json lists what it has",
            405: f"{request.url.path} does not take {request.method}",
        }
        answer = Refused(what.get(error.status_code, str(error.detail)), error.status_code).response(request.scope)
        answer.headers.update(error.headers or {})
        if error.status_code == 405:  # several routes may have the path, and the framework names the methods of one
            routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
            answer.headers["allow"] = ", ".join(sorted({m for route in routes for m in getattr(route, "methods", ())}))
        return answer

    app.add_exception_handler(HTTPException, http)
    for kind in (Refused, RequestValidationError, ValidationError):  # the last: what a body of another protocol becomes
        app.add_exception_handler(kind, refused)
