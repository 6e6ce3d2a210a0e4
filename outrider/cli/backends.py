"""Who answers in a chat: a server, or a model in this process. Both give the events that OpenAI's API streams."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from outrider.cli.http_client import Client

if TYPE_CHECKING:
    from outrider.core.outputs import Delta
    from outrider.engine import Engine
    from outrider.engine.llm import LLM

Messages = Sequence[Mapping[str, str]]


class ChatBackend(Protocol):
    """Writes answers. name: of the model."""

    name: str

    def answer(self, messages: Messages, options: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of an answer, the last one with usage and metrics. Closing the generator stops the answer.

        options: names and meanings are those of `SamplingParams`. Raises ValueError for what cannot be answered.
        """
        ...


class ServerBackend:
    """A server of OpenAI's API. model: its name there; None for the server's first."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client = client
        self.name = model or client.get("/v1/models")["data"][0]["id"]
        self._template = True  # until the server says that the model has none

    def answer(self, messages: Messages, options: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """See `ChatBackend`. A model without a chat template continues the text of the conversation."""
        body = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **options}
        if self._template:
            try:
                yield from self._client.events("POST", "/v1/chat/completions", {**body, "messages": messages})
                return
            except ValueError as error:
                if "no chat template" not in str(error):
                    raise
                self._template = False
        text = "\n".join(m["content"] for m in messages)
        yield from self._client.events("POST", "/v1/completions", {"max_tokens": 512, **body, "prompt": text})


class LocalBackend:
    """A model in this process, with the engine of a server: what it has read is not read again."""

    def __init__(self, llm: LLM, engine: Engine) -> None:
        self._llm, self._engine = llm, engine
        self.name = llm.loaded.name

    def answer(self, messages: Messages, options: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """See `ChatBackend`."""
        from outrider.core.params import SamplingParams
        from outrider.serve.openai.responses import metrics, usage

        params = SamplingParams(**{"max_tokens": None, **options})
        [request] = self._llm.requests(messages, params)
        deltas: SimpleQueue[Delta] = SimpleQueue()
        [sequence] = self._engine.submit([replace(request, sink=deltas.put)])
        try:
            ended = False
            while not ended:
                delta = deltas.get()
                ended = delta.ended
                yield {"choices": [{"delta": {"content": delta.text}}]}
        finally:
            self._engine.cancel([sequence])
        assert sequence.finish is not None
        if sequence.finish.finish == "error":
            raise RuntimeError(f"the answer was not written: {sequence.finish.reason}")
        yield {
            "choices": [{"finish_reason": sequence.finish.finish, "seed": request.seed}],
            "usage": usage([sequence], 1),
            "metrics": metrics([sequence], False),
            "guarantee": self._engine.decoder.guarantee.value,
        }
