"""The page at `/`: what the server is, where its other pages are, and a chat box.

It needs no key, so it holds nothing of the model: it asks for that with the key that its user gives.
"""

from __future__ import annotations

import json

from fastapi import FastAPI
from starlette.responses import Response

from outrider.pages.page import assemble
from outrider.serve.dashboard.viewers import ASSETS, HEADERS
from outrider.serve.service import Service


def install(app: FastAPI, service: Service) -> None:
    """Add the page to an application."""
    tokenizer = service.llm.tokenizer
    told = {"chat": bool(tokenizer and tokenizer.chat_template), "key": bool(service.settings.api_key)}
    page = assemble(ASSETS / "home.html", ASSETS / "home.css", ASSETS / "home.js", json.dumps(told), connect=True)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def home() -> Response:
        return Response(page, headers=HEADERS, media_type="text/html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        """There is none. Browsers ask for it beside pages that are not ours."""
        return Response(status_code=204, headers={"cache-control": "max-age=86400"})
