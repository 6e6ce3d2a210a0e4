"""The answers of Anthropic's Messages API: one message, or a stream of events.

See https://docs.anthropic.com/en/api/messages-streaming.
"""

from __future__ import annotations

import json
from typing import Any

from outrider.serve.errors import Refused
from outrider.serve.openai.thinking import ThinkingReader
from outrider.serve.openai.translated import AnswerTranslator, Event, check_whole


class MessagesWriter(AnswerTranslator):
    """Writes one message."""

    def __init__(
        self, name: str, model: str, prompt_tokens: int, max_tokens: int, thinking: ThinkingReader | None
    ) -> None:
        """name: of the request. model: its served name. max_tokens: that were asked for. thinking: of a model that thinks."""
        self._max_tokens, self._thinking = max_tokens, thinking
        self._open: dict[str, Any] | None = None  # the block that text goes to
        self.answer: dict[str, Any] = {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt_tokens, 0, 0),
        }
        start = {"type": "message_start", "message": {**self.answer, "content": []}}
        self.begin = self.encoded(start) + self.encoded({"type": "ping"})

    def chunk(self, chunk: dict[str, Any]) -> list[Event]:
        if not chunk["choices"]:
            return self._end(chunk)
        choice = chunk["choices"][0]
        delta, finish = choice["delta"], choice["finish_reason"]
        events = self._read(delta.get("content") or "", finish is not None or bool(delta.get("tool_calls")))
        for call in delta.get("tool_calls") or ():
            events += self._call(call)
        if finish is None:
            return events
        check_whole(choice)
        self.answer |= {"stop_reason": finish, "seed": choice["seed"], "guarantee": chunk["guarantee"]}
        if "note" in choice:
            self.answer["note"] = choice["note"]
        if finish == "tool_calls":
            self.answer["stop_reason"] = "tool_use"
        elif finish == "stop":
            named = isinstance(choice["stop_reason"], str)
            self.answer["stop_reason"] = "stop_sequence" if named else "end_turn"
            self.answer["stop_sequence"] = choice["stop_reason"] if named else None
        return [*events, *self._close()]

    def failed(self, refused: Refused) -> list[Event]:
        return [refused.messages_body]

    def _end(self, totals: dict[str, Any]) -> list[Event]:
        used = totals["usage"]
        written, cached = used["completion_tokens"], used["prompt_tokens_details"]["cached_tokens"]
        if self.answer["stop_reason"] == "length":
            full = written < self._max_tokens
            self.answer["stop_reason"] = "model_context_window_exceeded" if full else "max_tokens"
        self.answer |= {"usage": _usage(used["prompt_tokens"], cached, written), "metrics": totals["metrics"]}
        delta = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        ours = {name: self.answer[name] for name in ("seed", "guarantee", "note", "metrics") if name in self.answer}
        end = {"type": "message_delta", "delta": delta, "usage": self.answer["usage"], **ours}
        return [end, {"type": "message_stop"}]

    def _read(self, text: str, last: bool) -> list[Event]:
        thought = ""
        if self._thinking is not None:
            thought, text = self._thinking.feed(text, last)
        events = self._grow("thinking", thought) if thought else []
        return [*events, *(self._grow("text", text) if text else [])]

    def _grow(self, kind: str, text: str) -> list[Event]:
        """More text of a kind, in the block that is open or in a new one."""
        events = list[Event]()
        if self._open is None or self._open["type"] != kind:
            events += self._close()
            more = {"signature": ""} if kind == "thinking" else {}
            events += self._begin({"type": kind, kind: "", **more})
        assert self._open is not None
        self._open[kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: dict[str, Any]) -> list[Event]:
        function = call["function"]
        events = [
            *self._close(),
            *self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}),
        ]
        assert self._open is not None
        self._open["input"] = json.loads(function["arguments"])
        events.append(self._delta({"type": "input_json_delta", "partial_json": function["arguments"]}))
        return [*events, *self._close()]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        self._open = block
        self.answer["content"].append(block)
        return [{"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _close(self) -> list[Event]:
        """End the block that is open, if one is. A thought has a signature: its message."""
        if self._open is None:
            return []
        events = list[Event]()
        if self._open["type"] == "thinking":
            self._open["signature"] = self.answer["id"]
            events.append(self._delta({"type": "signature_delta", "signature": self.answer["id"]}))
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.answer["content"]) - 1


def _usage(prompt: int, cached: int, written: int) -> dict[str, int]:
    """Anthropic's counts: what the cache had is no input. Nothing is paid for what the cache keeps, so that is zero."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }
