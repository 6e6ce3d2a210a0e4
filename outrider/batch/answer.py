"""Answers the lines of a batch on this machine, with full rows."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from outrider.batch.lines import BatchRequest
from outrider.engine import Engine
from outrider.serve.assembly import load_llm
from outrider.serve.errors import Refused, invalid_body
from outrider.serve.protocol import ChatRequest, CompletionRequest
from outrider.serve.responses_request import ResponsesRequest
from outrider.serve.responses_writer import ResponsesWriter
from outrider.serve.service import Service
from outrider.serve.settings import Settings, served_name

_BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}


@dataclass(frozen=True)
class BatchOptions:
    """What a batch runs on. The names are those of `LLM`.

    served_model_name: what lines call the model; None for its own name. chat_template: its text; None for the model's own.
    seed: of lines without one; each gets a seed of its own from this one and its custom_id.
    """

    model: str
    speculative_config: dict[str, Any] | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    served_model_name: str | None = None
    chat_template: str | None = None
    seed: int = 0

    @property
    def of_texts(self) -> dict[str, Any]:
        """The options that may change a text. Drafters do not, unless the verifier only keeps the distribution."""
        config = self.speculative_config or {}
        keep = {k: v for k, v in asdict(self).items() if k not in ("speculative_config", "max_num_seqs")}
        if self.chat_template is not None:
            keep["chat_template"] = hashlib.sha256(self.chat_template.encode()).hexdigest()[:24]
        return keep if config.get("verifier", "match") == "match" else {**keep, "speculative_config": config}


class BatchAnswerer:
    """A model that answers lines. Use it in a `with` block. Raises what `LLM` raises."""

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        self.llm, self.note = load_llm(options)
        loaded, given = self.llm.loaded.name, options.served_model_name
        settings = Settings(
            model_name=given or served_name(loaded),
            aliases=() if given else (loaded,),
            request_timeout=math.inf,  # a line may wait for as long as the batch takes
        )
        self.window = 2 * options.max_num_seqs  # lines in work: as many wait as there are slots, so no slot waits
        self.service = Service(self.llm, Engine(self.llm, max_queue=self.window * settings.max_choices), settings)
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> BatchAnswerer:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()
        self._loop.close()

    def answers(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[BatchRequest, dict[str, Any]]]:
        """Each request with its row of the output, in the order of their ends.

        Raises RuntimeError if the engine dies: then the lines in work have no answer.
        """
        source, tasks = iter(requests), dict[asyncio.Task[dict[str, Any]], BatchRequest]()
        try:
            while True:
                while len(tasks) < self.window and (request := next(source, None)) is not None:
                    tasks[self._loop.create_task(self._answer(request))] = request
                if not tasks:
                    return
                done, _ = self._loop.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
                for task in done:
                    request = tasks.pop(task)
                    yield request, task.result()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))

    async def _answer(self, request: BatchRequest) -> dict[str, Any]:
        try:
            status, answer = 200, await self._whole(self._body(request), request.key)
        except Refused as refused:
            if self.service.engine.problem is not None or not self.service.engine.alive:
                raise RuntimeError(
                    f"{self.service.engine.problem or 'the engine has stopped'}; answers so far are kept"
                ) from refused
            status, answer = refused.status, refused.body
        response = {"status_code": status, "request_id": request.key, "body": answer}
        return {
            "id": f"batch_req_{request.key}",
            "custom_id": request.custom_id,
            "response": response,
            "error": None,
        }

    async def _whole(self, body: ChatRequest | CompletionRequest | ResponsesRequest, name: str) -> dict[str, Any]:
        service = self.service
        if not isinstance(body, ResponsesRequest):
            return await (await service.accept(body, name, "batch")).whole()
        if body.previous_response_id is not None:
            raise Refused(
                "the lines of a batch do not follow each other; send the whole conversation as input",
                param="previous_response_id",
            )
        chat = body.chat([])
        writer = ResponsesWriter(f"resp_{name}", service.settings.model_name, body, chat)
        return writer.whole(await (await service.accept(chat, name, "batch")).whole())

    def _body(self, request: BatchRequest) -> ChatRequest | CompletionRequest | ResponsesRequest:
        try:
            body = _BODIES[request.url].model_validate(request.body)
        except ValidationError as error:
            raise invalid_body(error.errors()) from None
        if body.stream:
            raise Refused("a batch has whole answers; leave out stream", param="stream")
        if body.seed is None:
            body = body.model_copy(update={"seed": line_seed(self.options.seed, request.custom_id)})
        return body


def line_seed(seed: int, custom_id: str) -> int:
    """The seed of a line that has none. It does not depend on the other lines. JSON keeps it exactly."""
    named = hashlib.sha256(f"{seed} {custom_id}".encode("utf-8", "replace")).digest()
    return int.from_bytes(named[:8], "big") % 2**53
