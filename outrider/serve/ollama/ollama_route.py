"""The routes of Ollama's API."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider._version import __version__
from outrider.serve.errors import Refused, json_response
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
from outrider.serve.openai.translated import Answering

FOREVER = "9999-12-31T23:59:59Z"  # the model stays as long as the server runs


def install(app: FastAPI, answering: Answering, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. documented: what is answered."""
    service = answering.service
    settings, room = service.settings, service.encoder.max_length

    async def answered(body: OllamaRequest, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        arrived, chat = perf_counter(), isinstance(body, OllamaChatRequest)

        def writer(pending: PendingAnswer) -> OllamaWriter:
            thinking = answering.thinking(pending) if isinstance(asked, ChatRequest) else None
            return OllamaWriter(body.model, chat, arrived, thinking)

        if isinstance(asked, ChatRequest):
            variables = asked_to_think(service.template, body.thinking_wanted)
            asked = asked.model_copy(update={"chat_template_kwargs": variables})
        return await answering.translated(asked, request, writer)

    @app.post("/api/chat", responses=documented)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer messages. Needs a model with a chat template."""
        service.check_model(body.name)
        if not body.messages:
            return json_response(loaded(body.model, True))
        return await answered(body, body.chat(room), request)

    @app.post("/api/generate", responses=documented)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt, continue it with raw, or fill the gap before a suffix."""
        service.check_model(body.name)
        if not body.prompt and not body.suffix:
            return json_response(loaded(body.model, False))
        return await answered(body, body.request(room, bool(service.template)), request)

    @app.get("/api/tags", responses=documented)
    async def tags() -> Response:
        """List the model that is served."""
        return json_response({"models": [described()]})

    @app.get("/api/ps", responses=documented)
    async def running() -> Response:
        """List the model that is loaded. It stays as long as the server runs, whatever `keep_alive` was sent."""
        more = {"size_vram": 0, "expires_at": FOREVER, "context_length": room}
        return json_response({"models": [described() | more]})

    @app.post("/api/show", responses=documented)
    async def show(body: OllamaModelRequest) -> Response:
        """Describe the model."""
        service.check_model((body.model or body.name or "").removesuffix(":latest"))
        capable = ["completion"]
        capable += ["tools"] * (service.tool_format is not None) + ["insert"] * (service.infilling is not None)
        capable += ["thinking"] * thinks(service.template)
        kind = family()
        return json_response(
            {
                "template": str(service.template or ""),
                "parameters": "",
                "details": details(),
                "model_info": {"general.architecture": kind, f"{kind}.context_length": room},
                "capabilities": capable,
                "modified_at": described()["modified_at"],
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
            f"{settings.model_name} writes texts and was not trained for embeddings; ask a server with an embedding model"
        )

    def family() -> str:
        return str(getattr(service.llm.loaded.config, "model_type", "") or "unknown")

    def details() -> dict[str, Any]:
        gguf = str(service.llm.loaded.source).endswith(".gguf")
        return {
            "parent_model": "",
            "format": "gguf" if gguf else "safetensors",
            "family": family(),
            "families": [family()],
            "parameter_size": "",
            "quantization_level": service.llm.loaded.weights,
        }

    def described() -> dict[str, Any]:
        name = settings.model_name
        return {
            "name": name,
            "model": name,
            "modified_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
            "size": _size(str(service.llm.loaded.source)),
            "digest": hashlib.sha256(name.encode()).hexdigest(),  # of the name: the files are not read for it
            "details": details(),
        }


def _size(source: str) -> int:
    """Bytes of the files of a model; 0 for one that is not named by its path."""
    path = Path(source)
    files = [path] if path.is_file() else path.glob("*.safetensors") if path.is_dir() else ()
    return sum(file.stat().st_size for file in files)
