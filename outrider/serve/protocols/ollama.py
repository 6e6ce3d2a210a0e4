"""Ollama's API: its bodies become chats and completions, and the parts of an answer become its lines.

See https://docs.ollama.com/api. What the server cannot do is refused, never left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, TypeVar

from fastapi import FastAPI, Request
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from outrider._version import __version__
from outrider.serve.answer import Answer, ChoiceReader, Event, Part, Writer
from outrider.serve.errors import Refused, called, dumps, json_response
from outrider.serve.pool import ModelPool, PooledModel
from outrider.serve.protocols.openai import usage
from outrider.serve.requests import ChatRequest, CommonRequest, CompletionRequest, JsonObject, Objects, Texts
from outrider.serve.service import Service
from outrider.serve.tools import ToolForm, thinks

API_VERSION = "0.12.10"  # of Ollama's API, as it is spoken here; editors refuse what is older than they need
# the fields as Ollama calls them
_OPTIONS = ("seed", "stop", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
CALLED = {name: f"options.{name}" for name in _OPTIONS} | {"repetition_penalty": "options.repeat_penalty"}
CALLED |= {"max_tokens": "options.num_predict", "max_total_tokens": "options.num_ctx", "response_format": "format"}
_EFFORT = {"False": "none", "True": "high"}
FOREVER = "9999-12-31T23:59:59Z"  # the model stays until others need its memory
UNKNOWN = "unknown"  # of a model that is not loaded
_PLACE = ("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock", "num_thread")
_ELSEWHERE = frozenset({*_PLACE, "vocab_only", "num_keep", "mirostat_tau", "mirostat_eta"})
_NEUTRAL = {
    "mirostat": 0,
    "tfs_z": 1,
    "typical_p": 1,
    "penalize_newline": False,
    "embedding_only": False,
    "logits_all": False,
}
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = r"-?(([0-9]+(\.[0-9]+)?(h|ms|m|s)){1,8}|[0-9]{1,9})"


R = TypeVar("R", bound=CommonRequest)


class OllamaOptions(JsonObject):
    """`options`. The defaults are Ollama's, but for the penalty: without repeat_penalty no token is penalised."""

    model_config = ConfigDict(extra="allow")
    num_predict: int | None = None
    num_ctx: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | Texts | None = None
    temperature: float | None = Field(0.8, ge=0)
    top_k: int | None = Field(40, ge=0)
    top_p: float | None = Field(0.9, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0)
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @model_validator(mode="after")
    def _possible(self) -> OllamaOptions:
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL:
                if value is not None and value != _NEUTRAL[name]:
                    raise ValueError(f"this server has no {name}; leave it out, or send {_NEUTRAL[name]}")
            elif name not in _ELSEWHERE:
                raise ValueError(f"there is no option {name[:40]!r}")
        if self.repeat_penalty not in (None, 1) and self.repeat_last_n not in (None, -1):
            raise ValueError(
                "repeat_penalty counts all of the prompt and the text here; send repeat_last_n=-1, or leave it out"
            )
        if self.num_predict is not None and self.num_predict < 1 and self.num_predict not in (-1, -2):
            raise ValueError("num_predict is 1 or more, or -1 for as many as fit")
        return self

    def shared(self, room: int) -> dict[str, Any]:
        """The fields that chat and text completions have. room: tokens that the model holds."""
        limit = self.num_predict if self.num_predict and self.num_predict > 0 else None
        return {name: getattr(self, name) for name in _OPTIONS} | {
            "max_tokens": limit or room,
            "max_total_tokens": min(self.num_ctx or room, room),
            "seed": None if self.seed == -1 else self.seed,
            "stop": self.stop or None,
            "top_k": self.top_k or -1,
            "repetition_penalty": self.repeat_penalty,
        }


class OllamaChat(ChatRequest):
    """What a body stands for, if its prompt is messages."""

    renamed = CALLED
    tells_thoughts = True
    tool_form = ToolForm(names=r"(?s).+", said="a name is a text that is not empty")


class OllamaCompletion(CompletionRequest):
    """What a body stands for, if its prompt is a text."""

    renamed = CALLED


class OllamaRequest(JsonObject):
    """What all requests for a text have. keep_alive: how long the model stays then, in seconds or as Go writes it."""

    missing: ClassVar[dict[str, str]] = {"logprobs": "ask for them at /v1/chat/completions"}
    is_chat: ClassVar[bool] = True  # it came to `/api/chat`
    model: str
    stream: bool = True
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None

    @property
    def name(self) -> str:
        """The model without the tag that Ollama's clients add."""
        return self.model.removesuffix(":latest")

    @property
    def keep(self) -> float | None:
        """Seconds that the model stays; None for one that stays until others need its memory. Raises Refused."""
        keep = self.keep_alive
        if isinstance(keep, str):
            parts = re.fullmatch(_DURATION, keep)
            if parts is None:
                raise Refused(
                    'keep_alive is a duration such as "5m" or "1h30m", or a number of seconds', param="keep_alive"
                )
            units = re.findall(r"([0-9.]+)(h|ms|m|s)", keep) or [(keep.lstrip("-"), "s")]
            keep = (-1 if keep.startswith("-") else 1) * sum(float(number) * _SECONDS[unit] for number, unit in units)
        return keep if keep is not None and 0 <= keep < 1e9 else None

    def _made(self, kind: type[R], room: int, **more: Any) -> R:
        shared = {
            "model": self.name,
            "stream": self.stream,
            "response_format": _format(self.format),
            "reasoning_effort": _EFFORT.get(str(self.think), self.think),
            **(self.options or OllamaOptions.model_validate({})).shared(room),
        }
        with called(CALLED):
            return kind.model_validate(shared | more)


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat"""

    messages: Objects | None = None
    tools: Objects | None = None

    @property
    def empty(self) -> bool:
        """It only loads the model, or lets it go."""
        return not self.messages

    def request(self, room: int, chats: bool) -> ChatRequest:
        """The request that this one stands for. room: tokens that the model holds. chats: it has a chat template."""
        messages = [{**message, "content": message.get("content") or ""} for message in self.messages or ()]
        for message in messages:
            if "tool_name" in message:
                message["name"] = message.pop("tool_name")
        goes_on = messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
        more = {"tools": self.tools or None, "continue_final_message": goes_on or None}
        return self._made(OllamaChat, room, messages=messages, **more)


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate"""

    is_chat = False
    missing = OllamaRequest.missing | {
        "images": "this model reads text only",
        "template": "templates are the model's here; send raw=true and a prompt that has its marks",
        "context": "this server keeps no context; send the messages to /api/chat",
    }
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    @property
    def empty(self) -> bool:
        """It only loads the model, or lets it go."""
        return not self.prompt and not self.suffix

    def request(self, room: int, chats: bool) -> ChatRequest | CompletionRequest:
        """As of `OllamaChatRequest`. Raises Refused."""
        if self.suffix or self.raw or not chats:
            if self.system:
                raise Refused("system needs a chat template, and this prompt is read as it is", param="system")
            return self._made(OllamaCompletion, room, prompt=self.prompt or "", suffix=self.suffix or None)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._made(OllamaChat, room, messages=[*system, {"role": "user", "content": self.prompt}])


class OllamaModelRequest(JsonObject):
    """POST /api/show"""

    model: str | None = None
    name: str | None = Field(None, description="the older name of model")

    @property
    def named(self) -> str:
        """The model without the tag that Ollama's clients add."""
        return (self.model or self.name or "").removesuffix(":latest")


def _format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not given:
        return None
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, str):
        raise Refused('format is "json" or a JSON schema', param="format")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}


class OllamaWriter(Writer):
    """Writes one answer of `/api/chat` or `/api/generate`.

    Args:
        answer: to what the body stands for.
        service: wrote it.
        body: the request.
        arrived: when it came, a `perf_counter` time.
        waited: seconds until the model was loaded.
    """

    media_type, comment = "application/x-ndjson", b""

    def __init__(self, answer: Answer, service: Service, body: OllamaRequest, arrived: float, waited: float) -> None:
        super().__init__(answer)
        self._body, self._arrived, self._waited = body, arrived, waited
        self._text, self._thought, self._calls, self._end = "", "", list[dict[str, Any]](), dict[str, Any]()

    async def part(self, choice: ChoiceReader, part: Part) -> list[Event]:
        text, thought, calls = part.text, part.thought, list[dict[str, Any]]()
        if (call := part.call) is not None:
            calls = [{"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}]
        self._text, self._thought, self._calls = self._text + text, self._thought + thought, self._calls + calls
        if (ending := part.ending) is not None:
            ending.check_whole()
            self._end = {"done_reason": "length" if ending.finish == "length" else "stop", "seed": choice.sequence.seed}
            self._end["guarantee"] = self.answer.guarantee
        return [_line(self._body, text, thought, calls, done=False)] if text or thought or calls else []

    def failed(self, refused: Refused) -> list[Event]:
        return [{"error": refused.message}]

    def encoded(self, event: Event) -> bytes:
        return dumps(event) + b"\n"

    def totals(self) -> list[Event]:
        """The last line. The prompt is read until the first token, and the text is written from there on."""
        used, clock = usage(self.answer), self.answer.sequences[0].clock
        total = clock.total
        first = total if clock.time_to_first_token is None else clock.time_to_first_token
        figures = {
            **self._end,
            "total_duration": _nanoseconds(perf_counter() - self._arrived),
            "load_duration": _nanoseconds(self._waited),
            "prompt_eval_count": used["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first - clock.queued),
            "eval_count": used["completion_tokens"],
            "eval_duration": _nanoseconds(total - first),
        }
        self.result = _line(self._body, self._text, self._thought, self._calls) | figures
        return [_line(self._body) | figures]


def _line(
    body: OllamaRequest, text: str = "", thought: str = "", calls: Sequence[Any] = (), done: bool = True
) -> Event:
    """A line of an answer."""
    head = {"model": body.model, "created_at": datetime.now(UTC).isoformat()}
    more = ({"thinking": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
    said = {"message": {"role": "assistant", "content": text, **more}} if body.is_chat else {"response": text, **more}
    return {**head, **said, "done": done}


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def install(app: FastAPI, pool: ModelPool, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. documented: what is answered."""

    async def answer(body: OllamaChatRequest | OllamaGenerateRequest, request: Request) -> Response:
        arrived, ends = perf_counter(), body.empty and body.keep == 0
        if ends and pool.find(body.name).service is None:
            return json_response(_line(body) | {"done_reason": "unload"})
        service = await pool.lend(body.name, request, keep=body.keep)
        if body.empty:
            return json_response(_line(body) | {"done_reason": "unload" if ends else "load"})
        made = body.request(service.encoder.max_length, bool(service.template))
        make = partial(OllamaWriter, body=body, arrived=arrived, waited=request.state.waited)
        return await service.respond(made, request, make)

    @app.post("/api/chat", responses=documented)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer messages. Needs a model with a chat template."""
        return await answer(body, request)

    @app.post("/api/generate", responses=documented)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt, continue it with raw, or fill the gap before a suffix."""
        return await answer(body, request)

    @app.get("/api/tags", responses=documented)
    async def tags() -> Response:
        """List the models that are served."""
        return json_response({"models": [described(one) for one in pool.models]})

    @app.get("/api/ps", responses=documented)
    async def running() -> Response:
        """List the models that are loaded, and until when."""
        return json_response({"models": [present(one, one.service) for one in pool.models if one.service]})

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
                "model_info": {
                    "general.architecture": kind,
                    "general.basename": about["name"],
                    f"{kind}.context_length": service.encoder.max_length,
                },
                "capabilities": capable,
                "modified_at": about["modified_at"],
            }
        )

    @app.get("/api/version", responses=documented)
    async def version() -> Response:
        """The version of Ollama whose API is spoken, and that of outrider."""
        return json_response({"version": API_VERSION, "outrider": __version__})

    @app.post("/api/embed", responses=documented)
    @app.post("/api/embeddings", responses=documented)
    async def embed() -> Response:
        """Refused."""
        raise Refused(
            "the models here write texts and were not trained for embeddings; ask a server with an embedding model"
        )

    @app.post("/api/pull", responses=documented)
    async def pull() -> Response:
        """Refused."""
        raise Refused("models are fetched before the server starts: outrider pull NAME, then: outrider serve NAME")

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

    def present(one: PooledModel, service: Service) -> dict[str, Any]:
        until = FOREVER if one.expires is None else datetime.fromtimestamp(one.expires, UTC).isoformat()
        room = service.encoder.max_length
        return described(one) | {"size": one.bytes, "size_vram": 0, "expires_at": until, "context_length": room}


def family(service: Service) -> str:
    """The kind of a model, by transformers' name."""
    return str(getattr(service.runtime.loaded.config, "model_type", "") or UNKNOWN)


def details(one: PooledModel) -> dict[str, Any]:
    """What Ollama's clients show beside a name. The kind and the precision are known of a model that is loaded."""
    kind, weights, level = UNKNOWN, "", ""
    if one.service is not None:
        model, kind = one.service.runtime.loaded, family(one.service)
        weights = level = model.weights
        if weights == "gguf":
            level = getattr(model.config, "quantization_level", weights)
    gguf = weights == "gguf" or one.settings.model.endswith(".gguf")
    return {
        "parent_model": "",
        "format": "gguf" if gguf else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": "",
        "quantization_level": level,
    }
