"""The bodies of Ollama's API, and the requests that they stand for.

See https://docs.ollama.com/api. What the server cannot do is refused, never left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from outrider.serve.errors import Refused
from outrider.serve.openai.protocol import ChatRequest, CompletionRequest, JsonObject, Objects, Texts

_LOGPROBS = "ask for logprobs at /v1/chat/completions"
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
        return {
            "max_tokens": limit or room,
            "max_total_tokens": min(self.num_ctx or room, room),
            "seed": self.seed if self.seed is None or self.seed >= 0 else None,
            "stop": self.stop or None,
            "temperature": self.temperature,
            "top_k": self.top_k or -1,
            "top_p": self.top_p or None,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }


class OllamaRequest(JsonObject):
    """What all requests for a text have. keep_alive: how long the model stays then, in seconds or as Go writes it."""

    model_config = ConfigDict(extra="allow")
    model: str
    stream: bool = True
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = Field(None, description="only false is accepted")

    @property
    def name(self) -> str:
        """The model without the tag that Ollama's clients add."""
        return self.model.removesuffix(":latest")

    @property
    def keep(self) -> float | None:
        """Seconds that the model stays; None for one that stays until others need its memory. Raises Refused."""
        given = self.keep_alive
        if isinstance(given, str):
            parts = re.fullmatch(_DURATION, given)
            if parts is None:
                raise Refused(
                    'keep_alive is a duration such as "5m" or "1h30m", or a number of seconds', param="keep_alive"
                )
            units = re.findall(r"([0-9.]+)(h|ms|m|s)", given) or [(given.lstrip("-"), "s")]
            given = (-1 if given.startswith("-") else 1) * sum(float(number) * _SECONDS[unit] for number, unit in units)
        return given if given is not None and 0 <= given < 1e9 else None

    def _shared(self, room: int) -> dict[str, Any]:
        if self.logprobs:
            raise Refused(_LOGPROBS, param="logprobs")
        return {
            "model": self.name,
            "stream": self.stream,
            "response_format": _format(self.format),
            **(self.options or OllamaOptions.model_validate({})).shared(room),
        }

    @property
    def thinking_wanted(self) -> bool | None:
        """Whether the model is to think; None leaves it to the template. Levels are all a yes."""
        return None if self.think is None else self.think is not False


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat"""

    messages: Objects | None = None
    tools: Objects | None = None

    def chat(self, room: int) -> ChatRequest:
        """The chat request that this one stands for. Raises Refused."""
        messages = [_message(m, f"messages.{n}") for n, m in enumerate(self.messages or ())]
        goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        more = {"messages": messages, "tools": self.tools or None, "continue_final_message": goes_on or None}
        return ChatRequest.model_validate(self._shared(room) | more)


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate"""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = Field(None, description="only the empty text is accepted")
    raw: bool | None = None
    images: list[Any] | None = Field(None, description="only an empty list is accepted")
    context: list[Any] | None = Field(None, description="only an empty list is accepted")

    def request(self, room: int, chats: bool) -> ChatRequest | CompletionRequest:
        """The request that this one stands for. chats: the model has a chat template. Raises Refused."""
        for name, given, why in (
            ("images", self.images, "this model reads text only"),
            (
                "template",
                self.template,
                "templates are the model's here; send raw=true and a prompt that has its marks",
            ),
            ("context", self.context, "this server keeps no context; send the messages to /api/chat"),
        ):
            if given:
                raise Refused(f"{name}: {why}", param=name)
        if self.suffix or self.raw or not chats:
            if self.system:
                raise Refused("system needs a chat template, and this prompt is read as it is", param="system")
            more = {"prompt": self.prompt or "", "suffix": self.suffix or None}
            return CompletionRequest.model_validate(self._shared(room) | more)
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return ChatRequest.model_validate(self._shared(room) | {"messages": messages})


class OllamaModelRequest(JsonObject):
    """POST /api/show"""

    model_config = ConfigDict(extra="allow")
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


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as chat completions have it. Raises Refused."""
    if given.get("images"):
        raise Refused(f"{where} has images; this model reads text only", param="messages")
    made = {"role": given.get("role"), "content": given.get("content") or ""}
    if thought := given.get("thinking"):
        made["reasoning_content"] = thought
    if name := given.get("tool_name"):
        made["name"] = name
    if call_id := given.get("tool_call_id"):
        made["tool_call_id"] = call_id
    if isinstance(calls := given.get("tool_calls"), Sequence) and calls:
        made["tool_calls"] = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
    return made
