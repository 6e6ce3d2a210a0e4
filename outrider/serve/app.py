"""The FastAPI application: the routes, their documentation, and the pages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import anyio
from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider._version import __version__
from outrider.core.files import public_name
from outrider.engine.request import whose
from outrider.serve import errors
from outrider.serve.dashboard.viewers import HEADERS, Viewer
from outrider.serve.encoding import WIDE
from outrider.serve.errors import Refused, answered, json_response, refusing, schema_of
from outrider.serve.guard import guards
from outrider.serve.metrics import CONTENT_TYPE
from outrider.serve.page import ASSETS, assemble, bundle
from outrider.serve.pool import ModelPool, PooledModel
from outrider.serve.protocols import anthropic, ollama, openai, responses
from outrider.serve.requests import DetokenizeRequest, TokenizeRequest


def _errors(body: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The documentation of errors. body: what a protocol makes of one."""
    content = {"application/json": {"schema": schema_of(body)}}
    return {
        status: {"description": text, "content": content}
        for status, text in {
            400: "The request is not valid; the message says why",
            401: "The API key is missing or wrong",
            403: "The host or the page that asks is not allowed",
            404: "No such model",
            408: "The request did not arrive in time, or its deadline passed before its first token",
            413: "The request is too large",
            429: "The queue is full; Retry-After gives the seconds to wait",
            500: "The server failed on this request",
            503: "The server is stopping, has too many connections, or its engine has stopped",
        }.items()
    }


MAX_TOKENIZE = 256 << 10  # characters of /tokenize, if the model holds less
ANSWER = answered("The answer", "text/event-stream")


def create_app(pool: ModelPool) -> FastAPI:
    """The application of a server's models. It ends them when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await pool.close()

    app = FastAPI(
        title="outrider",
        version=__version__,
        description="A language model with exact speculative decoding behind the APIs of OpenAI, Anthropic and Ollama.",
        lifespan=lifespan,
        middleware=guards(pool.settings, pool.metrics),
        docs_url=None,  # the page would load scripts from another site
        redoc_url=None,
        responses=_errors(Refused("").body),
    )
    errors.install(app)
    openai.install(app, pool, ANSWER)
    responses.install(app, pool, ANSWER)
    anthropic.install(app, pool, _errors(Refused("").messages_body(None)) | ANSWER)
    ollama.install(app, pool, _errors({"error": ""}) | answered("The answer", "application/x-ndjson"))
    _model(app, pool)
    _state(app, pool)
    _pages(app, pool)
    return app


def _model(app: FastAPI, pool: ModelPool) -> None:
    """Routes about the models and their tokens."""

    def described(one: PooledModel) -> dict[str, Any]:
        about = {
            "id": one.name,
            "object": "model",
            "created": pool.started,
            "owned_by": "outrider",
            "type": "model",  # from here, as Anthropic's clients read it
            "display_name": one.name,
            "created_at": datetime.fromtimestamp(pool.started, UTC).isoformat(),
            **dict.fromkeys(("capabilities", "max_input_tokens", "max_tokens")),
            "root": public_name(one.settings.model),
            "state": pool.state(one),
            "size": one.weights,
        }
        if (service := one.service) is None:
            return about
        config = service.runtime.config
        return {
            **about,
            **dict.fromkeys(("max_model_len", "max_input_tokens", "max_tokens"), service.engine.decoder.max_length),
            "max_memory": one.bytes,
            "chat": bool(service.template),
            "speculative": {"method": config.method, "num_speculative_tokens": config.budget.depth},
            "guarantee": service.engine.decoder.guarantee.value,
        }

    @app.get("/v1/models", responses=answered("The models"))
    async def models() -> Response:
        """List the models that are served, with the bytes of their weights. Of those that are loaded it says more."""
        models = [described(one) for one in pool.models]
        pages = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}  # Anthropic's
        return json_response({"object": "list", "data": models, **pages})

    @app.get("/v1/models/{name:path}", responses=answered("The model"))
    async def model(name: str) -> Response:
        """Describe one model."""
        return json_response(described(pool.find(name)))

    @app.post("/tokenize", responses=answered("The tokens"))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The token ids of a prompt or of messages."""
        service = await pool.lend(body.model, request)
        encoder, most = service.encoder, max(MAX_TOKENIZE, WIDE * service.encoder.max_length)
        with refusing():
            chat = body.chat
        if chat is None:
            tokens = await encoder.prompt(body.prompt or "", most, body.add_special_tokens is not False)
        else:
            tokens = await encoder.chat(chat, most, bool(body.add_special_tokens))

        def answer() -> Response:
            begins = service.tokens.begins(tokens, skip_special_tokens=True)
            texts = [service.tokens.label(*each) for each in zip(tokens, begins, strict=False)]
            about = {"count": len(tokens), "max_model_len": encoder.max_length, "tokens": tokens}
            return json_response({**about, "token_strs": texts if body.return_token_strs else None})

        return await encoder.run(answer, len(tokens))

    @app.post("/detokenize", responses=answered("The text"))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        service = await pool.lend(body.model, request)
        vocab = service.engine.decoder.target.vocab_size
        if wrong := [t for t in body.tokens if not 0 <= t < vocab]:
            raise Refused(f"token {wrong[0]} is outside the vocabulary of {vocab} tokens", param="tokens")
        if service.prompts.tokenizer is None:
            raise Refused("this model has no tokenizer")
        decode = service.tokens.decode
        return await service.encoder.run(lambda: json_response({"prompt": decode(body.tokens)}), len(body.tokens))


def _state(app: FastAPI, pool: ModelPool) -> None:
    """Routes about how the server is."""

    @app.get("/health", responses=answered("The engine runs"))
    async def health() -> Response:
        """Report that the engines work. 503 if one has died, hangs in a step, or is inconsistent."""
        if (problem := trouble(pool)) is not None:
            raise Refused(problem, 503, code="unhealthy")
        stats = [service.engine.stats for service in pool.loaded]
        waiting = pool.waiting + sum(one.waiting for one in stats)
        return json_response({"status": "ok", "running": sum(one.running for one in stats), "waiting": waiting})

    @app.get("/metrics", responses={200: {"description": "For Prometheus", "content": {"text/plain": {}}}})
    async def read_metrics() -> Response:
        """Counters, gauges and histograms for Prometheus."""
        return Response(pool.metrics.page(), headers={"content-type": CONTENT_TYPE})

    if pool.settings.memory_dir is not None and pool.settings.memory_by == "client":

        @app.delete("/v1/memory", responses=answered("The texts are removed"))
        async def forget_texts(request: Request, user: str | None = None) -> Response:
            """Remove your texts from the memory that drafts come from: those with this user, or those without one."""
            owner = request.state.owner
            await pool.lend(None, request)
            memories = [service.runtime.text_memory for service in pool.loaded]
            for memory in filter(None, memories):
                await anyio.to_thread.run_sync(memory.forget, whose(owner, user or owner))
            return json_response({"object": "memory.deleted"})

    @app.get("/version", responses=answered("The version"))
    async def version() -> Response:
        """The version of outrider."""
        return json_response({"version": __version__})


def _pages(app: FastAPI, pool: ModelPool) -> None:
    """The pages `/`, and `/dashboard`, which is live. They are not part of the API and have no place in the schema."""
    told = json.dumps({"key": bool(pool.settings.api_key)})
    parts = (ASSETS / "home.html", ASSETS / "home.css", ASSETS / "home.js")
    first, script = assemble(*parts, told, connect=True, apart="home.js"), bundle(ASSETS / "home.js")
    live = assemble(ASSETS / "dashboard.html", ASSETS / "dashboard.css", ASSETS / "dashboard.js", connect=True)

    def add(path: str, text: str, kind: str, *methods: str) -> None:
        async def page() -> Response:
            return Response(text, headers=HEADERS, media_type=f"text/{kind}")

        app.add_api_route(path, page, methods=["GET", *methods], include_in_schema=False)

    # What the server is, where its other pages are, and a chat. It is open to all, so it holds nothing of the model: it asks for
    # that with the key that its user gives.
    add("/", first, "html", "HEAD")
    add("/home.js", script, "javascript")
    add("/dashboard", live, "html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        """There is none. Browsers ask for it beside pages that are not ours."""
        return Response(status_code=204, headers={"cache-control": "max-age=86400"})

    @app.get("/dashboard/events", include_in_schema=False)
    async def events(model: str | None = None) -> Response:
        return Viewer(pool.dashboard(model))


def trouble(pool: ModelPool) -> str | None:
    """Why an engine does not work; None if each does."""
    for service in pool.loaded:
        engine = service.engine
        if engine.problem is not None or not engine.alive:
            return engine.problem or "the engine has stopped"
        if engine.stalled > service.settings.stall_timeout:
            return f"the engine has been busy with one step for {engine.stalled:.0f} s"
    return None
