"""The pages of a server: `/`, and `/dashboard`, which is live."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from typing import Annotated

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.dashboard.viewers import HEADERS, EventStream
from outrider.serve.page import ASSETS, assemble, bundle
from outrider.serve.pool import ModelPool


def install(app: FastAPI, pool: ModelPool) -> None:
    """Add the pages to an application. They are not part of its API and have no place in the schema."""
    told = json.dumps({"key": bool(pool.settings.api_key)})
    parts = (ASSETS / "home.html", ASSETS / "home.css", ASSETS / "home.js")
    first = _packed(assemble(*parts, told, connect=True, apart="home.js"))
    script = _packed(bundle(ASSETS / "home.js"))

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def home(request: Request) -> Response:
        """What the server is, where its other pages are, and a chat.

        It is open to all, so it holds nothing of the model: it asks for that with the key that its user gives.
        """
        return _sent(first, request, "text/html")

    @app.get("/home.js", include_in_schema=False)
    async def home_script(request: Request) -> Response:
        return _sent(script, request, "text/javascript")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        """There is none. Browsers ask for it beside pages that are not ours."""
        return Response(status_code=204, headers={"cache-control": "max-age=86400"})

    @app.get("/dashboard", include_in_schema=False)
    async def page() -> Response:
        return Response(_page(), headers=HEADERS, media_type="text/html")

    @app.get("/dashboard/events", include_in_schema=False)
    async def events(model: str | None = None) -> Response:
        return EventStream(pool.dashboard(model))

    @app.post("/dashboard/poll", include_in_schema=False)
    async def poll(viewer: Annotated[str, Query(min_length=1, max_length=64)]) -> Response:
        return Response(pool.dashboard().poll(viewer), headers=HEADERS, media_type="text/event-stream")


def _packed(text: str) -> tuple[bytes, bytes]:
    """A text as it is, and as gzip has it."""
    return text.encode(), gzip.compress(text.encode(), mtime=0)


def _sent(both: tuple[bytes, bytes], request: Request, kind: str) -> Response:
    """A text of `_packed`, in the form that its client reads."""
    headers = {**HEADERS, "vary": "accept-encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(both[0], headers=headers, media_type=kind)
    return Response(both[1], headers={**headers, "content-encoding": "gzip"}, media_type=kind)


@lru_cache(1)
def _page() -> str:
    return assemble(ASSETS / "dashboard.html", ASSETS / "dashboard.css", ASSETS / "dashboard.js", connect=True)
