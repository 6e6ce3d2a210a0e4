"""The answers of OpenAI's Responses API: one object, or a stream of typed events.

See https://platform.openai.com/docs/api-reference/responses-streaming. A whole answer is what its events add up to.
"""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import Any

from outrider.serve.errors import Refused
from outrider.serve.openai.protocol import ChatRequest
from outrider.serve.openai.responses_request import ResponsesRequest
from outrider.serve.openai.translated import AnswerTranslator, Event


class ResponsesWriter(AnswerTranslator):
    """Writes one response."""

    def __init__(
        self,
        name: str,
        model: str,
        body: ResponsesRequest,
        chat: ChatRequest,
        keep: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        """name: the id, from `resp_` on. model: its served name. body: the request. chat: what it stands for. keep: takes the
        response before its last event, so that the client can go on from it."""
        self._name, self._number, self._keep = name.removeprefix("resp_"), 0, keep
        self._message: dict[str, Any] | None = None  # the item that text goes to
        self.answer: dict[str, Any] = {
            "id": name,
            "object": "response",
            "created_at": int(time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if chat.temperature is None else chat.temperature,
            "text": {"format": _format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if chat.top_p is None else chat.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }
        started = [self._event(f"response.{kind}", response=self._shown()) for kind in ("created", "in_progress")]
        self.begin = b"".join(map(self.encoded, started))

    def chunk(self, chunk: dict[str, Any]) -> list[Event]:
        if not chunk["choices"]:
            return self._end(chunk)
        choice = chunk["choices"][0]
        delta, logprobs = choice["delta"], (choice["logprobs"] or {}).get("content") or []
        events = list[Event]()
        if delta.get("content") or logprobs:
            events += self._text(delta.get("content") or "", logprobs)
        for call in delta.get("tool_calls") or ():
            events += self._call(call)
        if (finish := choice["finish_reason"]) is not None:
            self.answer |= {"seed": choice["seed"], "guarantee": chunk["guarantee"]}
            if "note" in choice:
                self.answer["note"] = choice["note"]
            if not self.answer["output"]:
                events += self._text("", [])
            events += self._close("completed" if finish in ("stop", "tool_calls") else "incomplete")
            self.answer["status"] = {"length": "incomplete", "abort": "failed"}.get(finish, "completed")
            if finish == "length":
                self.answer["incomplete_details"] = {"reason": "max_output_tokens"}
            elif finish == "abort":
                self.answer["error"] = {"code": "server_error", "message": str(choice["stop_reason"])}
        return events

    def failed(self, refused: Refused) -> list[Event]:
        events = self._close("incomplete") if self._message is not None else []
        self.answer |= {"status": "failed", "error": {"code": "server_error", "message": refused.message}}
        return [*events, self._event("response.failed", response=self._shown())]

    def _end(self, totals: dict[str, Any]) -> list[Event]:
        used = totals["usage"]
        self.answer |= {
            "completed_at": int(time()) if self.answer["status"] == "completed" else None,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": used["completion_tokens_details"],
                "total_tokens": used["total_tokens"],
            },
            "metrics": totals["metrics"],
        }
        if self.answer["store"] and self.answer["status"] != "failed":
            self._keep(self.answer)
        return [self._event(f"response.{self.answer['status']}", response=self._shown())]

    def _text(self, text: str, logprobs: list[Any]) -> list[Event]:
        events = list[Event]()
        if self._message is None:
            number = len(self.answer["output"])
            self._message = _message(f"msg_{self._name}_{number}")
            events.append(self._event("response.output_item.added", item=dict(self._message), output_index=number))
            self._message["content"] = [_part("", [])]
            self.answer["output"].append(self._message)
            events.append(self._event("response.content_part.added", **self._place(), part=_part("", [])))
        part = self._message["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            events.append(self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs))
        return events

    def _call(self, call: dict[str, Any]) -> list[Event]:
        events = self._close("completed") if self._message is not None else []
        place, function = len(self.answer["output"]), call["function"]
        item = {
            "id": f"fc_{self._name}_{place}",
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": "",
            "status": "in_progress",
        }
        events.append(self._event("response.output_item.added", item=item, output_index=place))
        done = {**item, "arguments": function["arguments"], "status": "completed"}
        self.answer["output"].append(done)
        where = {"item_id": item["id"], "output_index": place}
        for kind, fields in (
            ("delta", {"delta": done["arguments"]}),
            ("done", {"arguments": done["arguments"], "name": done["name"]}),
        ):
            events.append(self._event(f"response.function_call_arguments.{kind}", **where, **fields))
        return [*events, self._event("response.output_item.done", item=done, output_index=place)]

    def _close(self, status: str) -> list[Event]:
        """End the message that is open, if one is."""
        if self._message is None:
            return []
        message, place = self._message, self._place()
        message["status"], part = status, message["content"][0]
        self._message = None
        return [
            self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", item=message, output_index=place["output_index"]),
        ]

    def _place(self) -> dict[str, Any]:
        assert self._message is not None
        return {"item_id": self._message["id"], "output_index": len(self.answer["output"]) - 1, "content_index": 0}

    def _shown(self) -> dict[str, Any]:
        return {**self.answer, "output": list(self.answer["output"])}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _message(name: str) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _format(body: ResponsesRequest) -> dict[str, Any]:
    given = None if body.text is None else body.text.format
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)
