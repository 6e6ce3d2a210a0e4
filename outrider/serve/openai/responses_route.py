"""The routes of OpenAI's Responses API, and the responses that are kept to go on from: in memory, bounded."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider.serve.errors import Refused, dumps, json_response, renamed
from outrider.serve.openai.responses_api import ResponsesRequest, ResponsesWriter
from outrider.serve.openai.translated import Answering

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

    def __init__(self, limit: int = 256, limit_bytes: int = 32 << 20) -> None:
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


def install(app: FastAPI, answering: Answering, answer: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. answer: documents what is answered."""
    store = ResponseStore()

    @app.post("/v1/responses", responses=answer)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input, or go on from an earlier response. Needs a model with a chat template."""
        service = await answering.pool.lend(body.model, request)
        earlier = body.previous_response_id
        before = [] if earlier is None else store.get(earlier, 400, "previous_response_id").items
        chat = body.chat(before)

        def keep(response: dict[str, Any]) -> None:
            store.put(response, [*before, *body.items, *response["output"]])

        name = response_id(answering.pool.settings.replica_name)
        with renamed("messages", "input"):
            called = service.settings.model_name
            return await answering.answer(
                service, chat, request, lambda _: ResponsesWriter(name, called, body, chat, keep)
            )

    @app.get("/v1/responses/{name}", responses=_OBJECT)
    async def read_response(name: str) -> Response:
        """A response that the server still keeps."""
        return json_response(store.get(name).response)

    @app.delete("/v1/responses/{name}", responses=_OBJECT)
    async def delete_response(name: str) -> Response:
        """Forget a response."""
        store.drop(name)
        return json_response({"id": name, "object": "response", "deleted": True})


def response_id(replica: str = "") -> str:
    """A new id. replica: that keeps the response, so that a request about it can be sent there."""
    return f"resp_{secrets.token_hex(16)}" + (f"_{replica}" if replica else "")


def replica_of(name: str) -> str:
    """The replica in the id of a response; empty if it has none."""
    parts = name.split("_", 2)
    return parts[2] if parts[0] == "resp" and len(parts) == 3 else ""
