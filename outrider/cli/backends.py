"""What answers in a chat: a server, or a model in this process. Both give the events that OpenAI's API streams."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from http.client import HTTPResponse
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from outrider.core.http import address, error_message, error_text, events

if TYPE_CHECKING:
    from outrider.core.outputs import Delta
    from outrider.engine import Engine
    from outrider.engine.llm import LLM

Messages = Sequence[Mapping[str, str]]
_TIMEOUT = 600.0  # seconds between two parts of a response


class ChatBackend(Protocol):
    """Writes answers. name: of the model."""

    name: str

    def room(self, messages: Messages) -> int | None:
        """Tokens that an answer to these messages may have; None if that is not known here."""
        ...

    def answer(self, messages: Messages, options: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of an answer, the last one with usage and metrics. Closing the generator stops the answer.

        options: names and meanings are those of `SamplingParams`. Raises ValueError for what cannot be answered.
        """
        ...


class ServerBackend:
    """A server of OpenAI's API. model: its name there; None for the server's first.

    Raises ValueError for what is no address. Every request raises ConnectionError if no server answers, and ValueError, with the
    server's own words, for what it refuses.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._address = address(url)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._template = True  # until the server says that the model has none
        self._more: dict[str, Any] = {}  # others may refuse fields that they do not know
        if model is None:
            with self._open("/v1/models") as response:
                first = json.load(response)["data"][0]
            model = str(first["id"])
            self._more = {"return_pieces": True} if first.get("owned_by") == "outrider" else {}
        self.name = model

    def room(self, messages: Messages) -> None:
        """See `ChatBackend`: a server knows it, and does not say it before it answers."""

    def answer(self, messages: Messages, options: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """See `ChatBackend`. A model without a chat template continues the text of the conversation."""
        body = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **self._more, **options}
        if self._template:
            try:
                yield from self._events("/v1/chat/completions", {**body, "messages": messages})
                return
            except ValueError as error:
                if "no chat template" not in str(error):
                    raise
                self._template = False
        text = "\n".join(m["content"] for m in messages)
        yield from self._events("/v1/completions", {"max_tokens": 512, **body, "prompt": text})

    def _events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a stream. Closing the generator closes the connection."""
        with self._open(path, json.dumps(body).encode()) as response:
            for event in events(iter(lambda: response.read1(1 << 16), b"")):
                if "error" in event:
                    raise ValueError(error_text(event["error"]))
                yield event

    def _open(self, path: str, body: bytes | None = None) -> HTTPResponse:
        try:
            request = Request(self._address + path, body, self._headers)
            return build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT)
        except HTTPError as error:
            said = error_message(error.read()) or f"{self._address} answers {error.code} to {path}"
            hint = "; give the key with --api-key or OUTRIDER_API_KEY" if error.code == 401 else ""
            raise ValueError(said + hint) from None
        except OSError as error:
            raise ConnectionError(
                f"no server answers at {self._address} ({getattr(error, 'reason', error)}); start one: outrider serve "
                "builtin:code"
            ) from error


class LocalBackend:
    """A model in this process, with the engine of a server: what it has read is not read again."""

    def __init__(self, llm: LLM, engine: Engine) -> None:
        self._llm, self._engine = llm, engine
        self.name = llm.loaded.name

    def room(self, messages: Messages) -> int:
        """See `ChatBackend`."""
        return self._engine.decoder.max_length - len(self._llm.encode(messages))

    def answer(self, messages: Messages, options: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """See `ChatBackend`."""
        from outrider.core.params import SamplingParams
        from outrider.serve.protocols.openai import metrics, usage

        params = SamplingParams(**{"max_tokens": None, **options})
        deltas: SimpleQueue[Delta] = SimpleQueue()
        [sequence] = self._engine.submit(self._llm.requests(self._llm.encode(messages), params, sink=deltas.put))
        try:
            ended = False
            while not ended:
                delta = deltas.get()
                ended = delta.ended
                yield {"choices": [{"delta": {"content": delta.text}, "pieces": delta.pieces}]}
        finally:
            self._engine.cancel([sequence])
        assert sequence.finish is not None
        if sequence.finish.finish == "error":
            raise RuntimeError(f"the answer was not written: {sequence.finish.reason}")
        yield {
            "choices": [{"finish_reason": sequence.finish.finish, "seed": sequence.request.seed}],
            "usage": usage([sequence], 1),
            "metrics": metrics([sequence], False),
            "guarantee": self._engine.decoder.guarantee.value,
        }
