"""The routes of OpenAI's Responses API, and the responses that are kept to go on from: in memory, bounded."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider.serve.connection import unless_gone
from outrider.serve.errors import Refused, dumps, json_response
from outrider.serve.openai.pending import EventResponse, PendingAnswer
from outrider.serve.openai.protocol import ChatRequest, StreamOptions
from outrider.serve.openai.responses_request import ResponsesRequest
from outrider.serve.openai.responses_writer import ResponsesWriter, encoded
from outrider.serve.service import Service

_OBJECT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The response", "content": {"application/json": {"schema": {"type": "object"}}}}
}


@dataclass(frozen=True)
class StoredResponse:
    """response: as it was sent. items: of the whole conversation, without instructions. size: bytes."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    size: int


class ResponseStore:
    """The responses that were used last. limit: how many. limit_bytes: of all, as JSON; one that is larger is not kept."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self.limit, self.limit_bytes, self.bytes = limit, limit_bytes, 0
        self._kept = OrderedDict[str, StoredResponse]()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response, and let go of the oldest ones."""
        size = len(dumps(response)) + len(dumps(items))
        self._kept[response["id"]] = StoredResponse(response, items, size)
        self.bytes += size
        while self._kept and (len(self._kept) > self.limit or self.bytes > self.limit_bytes):
            _, old = self._kept.popitem(last=False)
            self.bytes -= old.size

    def get(self, name: str, status: int = 404, param: str | None = None) -> StoredResponse:
        """A response. Raises Refused, with this status and param, if it is not here."""
        if name not in self._kept:
            raise Refused(
                f"there is no response {name[:80]!r} here: the server keeps the last {self.limit} in memory, of up to "
                f"{self.limit_bytes >> 20} MiB, and none with store=false; send the whole conversation as input",
                status,
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        self._kept.move_to_end(name)
        return self._kept[name]

    def drop(self, name: str) -> None:
        """Let go of a response. Raises Refused if it is not here."""
        self.bytes -= self.get(name).size
        del self._kept[name]


def install(
    app: FastAPI,
    service: Service,
    watch: Callable[[PendingAnswer, ChatRequest, Request], None],
    answer: dict[int | str, dict[str, Any]],
) -> ResponseStore:
    """Add the routes. watch: is told of each request. answer: documents what is answered. Returns the store."""
    settings = service.settings
    store = ResponseStore(settings.max_responses, settings.max_response_bytes)

    @app.post("/v1/responses", responses=answer)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input, or go on from an earlier response. Needs a model with a chat template."""
        service.check_model(body.model)
        earlier = body.previous_response_id
        before = [] if earlier is None else store.get(earlier, 400, "previous_response_id").items
        chat = body.chat(before)
        owner = request.state.owner
        try:
            pending = await service.accept(chat, request.state.request_id, body.user or owner, owner)
        except Refused as refused:
            if refused.param == "messages":
                refused.param = "input"
            raise
        watch(pending, chat, request)
        writer = ResponsesWriter(response_id(settings.replica_name), settings.model_name, body, chat)

        def keep() -> None:
            response = writer.response
            if response["store"] and response["status"] != "failed":
                store.put(response, [*before, *body.items, *response["output"]])

        if body.stream:
            return EventResponse(pending, _events(pending, writer, settings.pad_seconds, keep))
        writer.whole(await unless_gone(request.receive, pending.whole()))
        keep()
        return json_response(writer.response, headers=pending.headers)

    @app.get("/v1/responses/{name}", responses=_OBJECT)
    async def read_response(name: str) -> Response:
        """A response that the server still keeps."""
        return json_response(store.get(name).response)

    @app.delete("/v1/responses/{name}", responses=_OBJECT)
    async def delete_response(name: str) -> Response:
        """Forget a response."""
        store.drop(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    return store


async def _events(
    pending: PendingAnswer, writer: ResponsesWriter, interval: float | None, keep: Callable[[], None]
) -> AsyncIterator[bytes]:
    """The typed events of a response. keep: is called before the last one, so that the client can go on from it."""
    for event in writer.begin():
        yield encoded(event)
    try:
        async for chunk in pending.chunks(StreamOptions(include_usage=True), interval):
            events = writer.chunk(chunk)
            if not chunk["choices"]:
                keep()
            for event in events:
                yield encoded(event)
    except Refused as refused:
        for event in writer.failed(refused):
            yield encoded(event)


def response_id(replica: str = "") -> str:
    """A new id. replica: that keeps the response, so that a request about it can be sent there."""
    return f"resp_{secrets.token_hex(16)}" + (f"_{replica}" if replica else "")


def replica_of(name: str) -> str:
    """The replica in the id of a response; empty if it has none."""
    parts = name.split("_", 2)
    return parts[2] if parts[0] == "resp" and len(parts) == 3 else ""
