"""A stream that outlives the replica that writes it.

It reads the events of a stream, remembers the token ids, and says with which request another replica goes on. Noise is
keyed by position, so the rest of the text is the same. The client sees one stream: nothing twice, nothing left out.
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

from outrider.engine.decoder import draw_seed
from outrider.engine.scheduler import CLOSING
from outrider.serve.errors import dumps
from outrider.serve.ray.calls import ReplicaLost

END = b"data: [DONE]\n\n"
MOVES = frozenset({"stopped", "aborted", "unhealthy"})  # codes of errors that another replica does not have


class ResumableStream:
    """One streamed answer. body: the client's request, a JSON object. done: its last event was read."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.done, self._started = False, perf_counter()
        self._shows_ids = bool(body.get("return_token_ids"))
        self._shows_empty = self._shows_ids or body.get("logprobs") not in (None, False)
        self._body = {**body, "return_token_ids": True}
        if self._body.get("seed") is None:
            self._body["seed"] = draw_seed() % 2**53  # what goes on elsewhere needs the same one
        self._prompts, self._tokens = _texts(body)
        self._opened, self._ended = set[int](), set[int]()
        self._head: dict[str, Any] | None = None  # of the first chunk: an answer keeps its id
        self._rest, self._moved = b"", False

    def request(self) -> bytes:
        """The body of the request that writes what is missing."""
        body = self._body
        if any(self._tokens):
            body = {**body, "continued_tokens": self._tokens}
            if self._prompts is not None:
                body["prompt"] = self._prompts
        if isinstance(body.get("timeout"), (int, float)):
            body = {**body, "timeout": max(0.001, body["timeout"] - (perf_counter() - self._started))}
        return dumps(body)

    def move(self) -> None:
        """The replica is lost. The next events come from another one."""
        self._moved, self._rest = True, b""

    def read(self, data: bytes) -> bytes:
        """The events in the next part of the body, as the client is to see them.

        Raises ReplicaLost if they say that this replica does not go on.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._event(event) for event in events)

    def _event(self, event: bytes) -> bytes:
        if event == END.rstrip():
            self.done = True
            return END
        chunk = json.loads(event.removeprefix(b"data: "))
        if "choices" not in chunk:
            if chunk.get("error", {}).get("code") in MOVES:
                raise ReplicaLost(chunk["error"]["message"])
            return event + b"\n\n"
        self._head = self._head or {name: chunk[name] for name in ("id", "created") if name in chunk}
        chunk |= self._head
        for choice in chunk["choices"]:
            if not self._wanted(choice, chunk):
                return b""
        if not self._shows_ids:
            chunk.pop("prompt_token_ids", None)
        return b"data: " + dumps(chunk) + b"\n\n"

    def _wanted(self, choice: dict[str, Any], chunk: dict[str, Any]) -> bool:
        """Take over the tokens of a choice, and its ids out of it. False if the client is not to see it."""
        index = choice["index"]
        opening = "prompt_token_ids" in choice or "prompt_token_ids" in chunk
        if index in self._ended or (opening and index in self._opened):
            return False
        if choice.get("finish_reason") == "abort" and choice.get("stop_reason") == CLOSING:
            raise ReplicaLost(CLOSING)
        tokens = choice.get("token_ids", [])
        self._tokens[index] += tokens
        if opening:
            self._opened.add(index)
        if choice.get("finish_reason") is not None:
            self._ended.add(index)
            return True
        if not self._shows_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        delta = choice.get("delta", {})
        shown = choice.get("text") or delta.get("content") or "role" in delta or "tool_calls" in delta
        return bool(shown or (opening and self._shows_ids) or (self._shows_empty and not opening))


def _texts(body: dict[str, Any]) -> tuple[list[Any] | None, list[list[int]]]:
    """The prompts if tokens of the answer were cut from them, and the tokens so far of each choice.

    The replica judges the request first, so what is not valid here only needs some value.
    """
    prompt, n, before = body.get("prompt"), body.get("n"), body.get("continued_tokens")
    single = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
    prompts: list[Any] = [prompt] if single else list(prompt or ())
    count = len(prompts) * (n if isinstance(n, int) and 0 < n <= 1024 else 1)
    if isinstance(before, int) and before > 0 and all(isinstance(p, list) for p in prompts):
        return [p[:-before] for p in prompts], [list(p[-before:]) for p in prompts]
    if isinstance(before, list) and before:
        lists = [list(x) for x in before] if isinstance(before[0], list) else [list(before)]
        return None, lists if len(lists) == count else [[] for _ in range(count)]
    return None, [[] for _ in range(count)]
