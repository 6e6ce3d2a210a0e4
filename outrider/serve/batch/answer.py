"""Answers the lines of a batch on this machine, with all slots in use."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from outrider.engine import Engine
from outrider.serve.assembly import load_llm
from outrider.serve.batch.lines import BatchRequest
from outrider.serve.bodies import check_body
from outrider.serve.errors import Refused, called, invalid_body, no_model, refusing
from outrider.serve.options import BatchOptions, ServeOptions
from outrider.serve.protocols.openai import CompletionWriter
from outrider.serve.protocols.responses import ResponsesRequest, ResponsesWriter
from outrider.serve.requests import MAX_CHOICES, ChatRequest, CompletionRequest
from outrider.serve.service import Service

log = logging.getLogger("outrider.serve")
_BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}


class BatchAnswerer:
    """A model that answers lines. Use it in a `with` block. Raises what `LLM` raises."""

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        llm, self.note = load_llm(options)
        # a line may wait for as long as the batch takes
        settings = ServeOptions(**options.model_dump(exclude={"seed"}), request_timeout=math.inf)
        self.window = 2 * options.max_num_seqs  # lines in work: as many wait as there are slots, so no slot waits
        self.service = Service(Engine(llm.runtime, max_queue=self.window * MAX_CHOICES), settings)
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
            body = self._body(request)
            status, answer = 200, await self._whole(body, request.key)
        except Exception as error:
            engine = self.service.engine
            if engine.problem is not None or not engine.alive:
                raise RuntimeError(f"{engine.problem or 'the engine has stopped'}; answers so far are kept") from error
            refused = error if isinstance(error, Refused) else Refused("the batch failed on this line", 500)
            if refused is not error:
                log.error("line %s failed", request.custom_id, exc_info=error)
            status, answer = refused.status, refused.body
        response = {"status_code": status, "request_id": request.key, "body": answer}
        return {
            "id": f"batch_req_{request.key}",
            "custom_id": request.custom_id,
            "response": response,
            "error": None,
        }

    async def _whole(self, body: ChatRequest | CompletionRequest | ResponsesRequest, name: str) -> dict[str, Any]:
        if not isinstance(body, ResponsesRequest):
            with called(body.called):
                writer = await self.service.accept(body, lambda a: CompletionWriter(a, self.service), name, "batch")
                return await writer.whole()
        if body.previous_response_id is not None:
            raise Refused(
                "the lines of a batch do not follow each other; send the whole conversation as input",
                param="previous_response_id",
            )
        with called(body.called):
            writer = await self.service.accept(
                body.chat([]), lambda a: ResponsesWriter(a, self.service, f"resp_{name}", body), name, "batch"
            )
            return await writer.whole()

    def _body(self, request: BatchRequest) -> Any:
        try:
            with refusing():
                check_body(json.dumps(request.body).encode())
            body = _BODIES[request.url].model_validate(request.body)
        except ValidationError as error:
            raise invalid_body(error.errors()) from None
        if body.model is not None and body.model not in self.service.settings.names:
            raise no_model(body.model, [self.service.settings.model_name])
        if body.stream:
            raise Refused("a batch has whole answers; leave out stream", param="stream")
        if body.seed is None:
            body = body.model_copy(update={"seed": line_seed(self.options.seed, request.custom_id)})
        return body


def line_seed(seed: int, custom_id: str) -> int:
    """The seed of a line that has none. It does not depend on the other lines. JSON keeps it exactly."""
    named = hashlib.sha256(f"{seed} {custom_id}".encode("utf-8", "replace")).digest()
    return int.from_bytes(named[:8], "big") % 2**53
