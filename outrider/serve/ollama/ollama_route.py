"""The routes of Ollama's API."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider._version import __version__
from outrider.serve.assembly import Assembly
from outrider.serve.errors import Refused, dumps, json_response
from outrider.serve.ollama.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaRequest,
)
from outrider.serve.ollama.ollama_writer import OllamaWriter, loaded
from outrider.serve.openai.pending import PendingAnswer
from outrider.serve.openai.protocol import ChatRequest, CompletionRequest
from outrider.serve.openai.thinking import asked_to_think, thinks
from outrider.serve.openai.translated import Answering, thinking_reader
from outrider.serve.pool import PooledModel
from outrider.serve.service import Service

FOREVER = "9999-12-31T23:59:59Z"  # the model stays until others need its memory
UNKNOWN = "unknown"  # of a model that is not loaded


def install(app: FastAPI, answering: Answering, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. documented: what is answered."""
    pool = answering.pool

    async def answered(
        body: OllamaRequest, empty: bool, make: Callable[[Service], ChatRequest | CompletionRequest], request: Request
    ) -> Response:
        """The answer to a body. empty: it only loads the model, or lets it go. make: the request that it stands for."""
        arrived, chat, ends = perf_counter(), isinstance(body, OllamaChatRequest), empty and body.keep == 0
        if ends and pool.find(body.name).assembly is None:
            return json_response(loaded(body.model, chat, "unload"))
        service = await pool.lend(body.name, request, keep=body.keep)
        if empty:
            return json_response(loaded(body.model, chat, "unload" if ends else "load"))
        asked = make(service)

        def writer(pending: PendingAnswer) -> OllamaWriter:
            thinking = thinking_reader(service, pending) if isinstance(asked, ChatRequest) else None
            return OllamaWriter(body.model, arrived, getattr(request.state, "waited", 0.0), thinking, chat)

        if isinstance(asked, ChatRequest):
            variables = asked_to_think(service.template, body.thinking_wanted)
            asked = asked.model_copy(update={"chat_template_kwargs": variables})
        return await answering.answer(service, asked, request, writer)

    @app.post("/api/chat", responses=documented)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer messages. Needs a model with a chat template."""
        return await answered(body, not body.messages, lambda service: body.chat(service.encoder.max_length), request)

    @app.post("/api/generate", responses=documented)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt, continue it with raw, or fill the gap before a suffix."""

        def made(service: Service) -> ChatRequest | CompletionRequest:
            return body.request(service.encoder.max_length, bool(service.template))

        return await answered(body, not body.prompt and not body.suffix, made, request)

    @app.get("/api/tags", responses=documented)
    async def tags() -> Response:
        """List the models that are served."""
        return json_response({"models": [described(one) for one in pool.models]})

    @app.get("/api/ps", responses=documented)
    async def running() -> Response:
        """List the models that are loaded, and until when."""
        return json_response({"models": [present(one, one.assembly) for one in pool.models if one.assembly]})

    @app.post("/api/show", responses=documented)
    async def show(body: OllamaModelRequest, request: Request) -> Response:
        """Describe a model. It is loaded for it."""
        service = await pool.lend(body.named, request)
        capable = ["completion"]
        capable += ["tools"] * (service.tool_format is not None) + ["insert"] * (service.infilling is not None)
        capable += ["thinking"] * thinks(service.template)
        about, kind = described(pool.find(body.named)), family(service)
        # editors look for this word in Ollama's templates
        gap = "{# .Suffix #}" if service.infilling is not None else ""
        return json_response(
            {
                "template": str(service.template or "") + gap,
                "parameters": "",
                "details": about["details"],
                "model_info": {"general.architecture": kind, f"{kind}.context_length": service.encoder.max_length},
                "capabilities": capable,
                "modified_at": about["modified_at"],
            }
        )

    @app.get("/api/version", responses=documented)
    async def version() -> Response:
        """The version of outrider, not one of Ollama."""
        return json_response({"version": __version__})

    @app.post("/api/embed", responses=documented)
    @app.post("/api/embeddings", responses=documented)
    async def embed() -> Response:
        """Refused."""
        raise Refused(
            "the models here write texts and were not trained for embeddings; ask a server with an embedding model"
        )

    def described(one: PooledModel) -> dict[str, Any]:
        # clients keep what a model can do under its digest, and another start may have other files
        digest = hashlib.sha256(dumps([one.name, one.weights, pool.started])).hexdigest()
        return {
            "name": one.name,
            "model": one.name,
            "modified_at": datetime.fromtimestamp(pool.started, UTC).isoformat(),
            "size": one.weights,
            "digest": digest,
            "details": details(one),
        }

    def present(one: PooledModel, assembly: Assembly) -> dict[str, Any]:
        until = FOREVER if one.expires is None else datetime.fromtimestamp(one.expires, UTC).isoformat()
        room = assembly.service.encoder.max_length
        return described(one) | {"size": one.bytes, "size_vram": 0, "expires_at": until, "context_length": room}


def family(service: Service) -> str:
    """The kind of a model, by transformers' name."""
    return str(getattr(service.llm.loaded.config, "model_type", "") or UNKNOWN)


def details(one: PooledModel) -> dict[str, Any]:
    """What Ollama's clients show beside a name. The kind and the precision are known of a model that is loaded."""
    service = one.assembly and one.assembly.service
    source = str(service.llm.loaded.source) if service else one.settings.model
    kind = family(service) if service else UNKNOWN
    return {
        "parent_model": "",
        "format": "gguf" if source.endswith(".gguf") else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": "",
        "quantization_level": service.llm.loaded.weights if service else "",
    }
