"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from starlette.responses import Response

from outrider.serve.anthropic.messages_request import CountTokensRequest, MessagesRequest
from outrider.serve.anthropic.messages_writer import MessagesWriter
from outrider.serve.errors import Refused, json_response
from outrider.serve.logs import log
from outrider.serve.openai.pending import PendingAnswer
from outrider.serve.openai.protocol import ChatRequest
from outrider.serve.openai.thinking import asked_to_think
from outrider.serve.openai.translated import Answering, thinking_reader
from outrider.serve.service import Service

VERSION = "2023-06-01"


def install(app: FastAPI, answering: Answering, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. documented: what is answered."""
    told = False

    def headers_seen() -> None:
        """Say once what a header costs."""
        nonlocal told
        if not told and answering.pool.settings.client_headers == "keep":
            told = True
            log.warning(
                "a client begins its system text with header lines. If they change in each request, no prompt begins like an "
                "earlier one: --client-headers drop leaves them out, and move puts them at the end"
            )

    async def chat_of(body: CountTokensRequest, version: str, request: Request) -> tuple[Service, ChatRequest]:
        if version < VERSION:  # dates; streams before this one had another form
            raise Refused(f"anthropic-version {version[:40]!r} is older than this server knows; send {VERSION}")
        service = await answering.pool.lend(body.model, request)
        chat = body.chat(service.settings.client_headers, headers_seen)
        variables = asked_to_think(service.template, body.thinking_wanted)
        room = chat.max_total_tokens or service.encoder.max_length  # clients ask for more than many models hold
        return service, chat.model_copy(update={"chat_template_kwargs": variables, "max_total_tokens": room})

    @app.post("/v1/messages", responses=documented)
    async def messages(
        body: MessagesRequest, request: Request, anthropic_version: Annotated[str, Header()] = VERSION
    ) -> Response:
        """Answer messages. Needs a model with a chat template."""
        service, chat = await chat_of(body, anthropic_version, request)

        def writer(pending: PendingAnswer) -> MessagesWriter:
            prompt = len(pending.sequences[0].prompt)
            name, thinking = request.state.request_id, thinking_reader(service, pending)
            return MessagesWriter(name, service.settings.model_name, prompt, body.max_tokens, thinking)

        return await answering.answer(service, chat, request, writer)

    @app.post("/v1/messages/count_tokens", responses=documented)
    async def count_tokens(
        body: CountTokensRequest, request: Request, anthropic_version: Annotated[str, Header()] = VERSION
    ) -> Response:
        """The tokens of messages, as the model would read them."""
        service, chat = await chat_of(body, anthropic_version, request)
        return json_response({"input_tokens": len(await service.encoder.chat(chat))})
