"""The answers of Ollama's API: one object, or lines of JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from outrider.serve.errors import Refused, dumps
from outrider.serve.openai.thinking import ThinkingReader
from outrider.serve.openai.translated import AnswerTranslator, Event, check_whole


class OllamaWriter(AnswerTranslator):
    """Writes one answer of `/api/chat` or `/api/generate`."""

    media_type, comment = "application/x-ndjson", b""

    def __init__(self, model: str, arrived: float, waited: float, thinking: ThinkingReader | None, chat: bool) -> None:
        """model: as the client calls it. arrived: when its request came, a `perf_counter` time. waited: seconds until the model
        was loaded. thinking: of a model that thinks."""
        self._model, self._arrived, self._waited, self._thinking, self._chat = model, arrived, waited, thinking, chat
        self._text, self._thought, self._calls, self._end = "", "", list[dict[str, Any]](), dict[str, Any]()

    def chunk(self, chunk: dict[str, Any]) -> list[Event]:
        if not chunk["choices"]:
            return self._close(chunk)
        choice = chunk["choices"][0]
        delta, finish = choice.get("delta", {}), choice["finish_reason"]
        text, thought = delta.get("content") or choice.get("text") or "", ""
        calls = [_call(call) for call in delta.get("tool_calls") or ()]
        if self._thinking is not None:
            thought, text = self._thinking.feed(text, finish is not None or bool(calls))
        self._text, self._thought, self._calls = self._text + text, self._thought + thought, self._calls + calls
        check_whole(choice)
        if finish is not None:
            self._end = {"done_reason": "length" if finish == "length" else "stop", "seed": choice["seed"]}
            self._end["guarantee"] = chunk["guarantee"]
        return [self._line(text, thought, calls, done=False)] if text or thought or calls else []

    def failed(self, refused: Refused) -> list[Event]:
        return [{"error": refused.message}]

    def encoded(self, event: Event) -> bytes:
        return dumps(event) + b"\n"

    def _close(self, totals: dict[str, Any]) -> list[Event]:
        """The last line. The prompt is read until the first token, and the text is written from there on."""
        used, times = totals["usage"], totals["metrics"]
        first = times["time_to_first_token"]
        first = times["e2e_latency"] if first is None else first
        figures = {
            **self._end,
            "total_duration": _nanoseconds(perf_counter() - self._arrived),
            "load_duration": _nanoseconds(self._waited),
            "prompt_eval_count": used["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first - times["time_in_queue"]),
            "eval_count": used["completion_tokens"],
            "eval_duration": _nanoseconds(times["e2e_latency"] - first),
        }
        self.answer = self._line(self._text, self._thought, self._calls, done=True) | figures
        return [self._line("", "", [], done=True) | figures]

    def _line(self, text: str, thought: str, calls: list[dict[str, Any]], done: bool) -> Event:
        head = {"model": self._model, "created_at": datetime.now(UTC).isoformat()}
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if not self._chat:
            return {**head, "response": text, **more, "done": done}
        more |= {"tool_calls": calls} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **more}, "done": done}


def loaded(model: str, chat: bool, reason: str) -> Event:
    """The answer to a request without a prompt, which loads a model or lets it go. reason: load or unload."""
    text = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    head = {"model": model, "created_at": datetime.now(UTC).isoformat()}
    return {**head, **text, "done": True, "done_reason": reason}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    made = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    return {"id": call["id"], "function": made}


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
