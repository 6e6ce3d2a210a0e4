"""Counts what a request passes on its way: python docs/walk.py [--where]. --where prints the names, too.

The first two numbers are the way of a chat body: its files, and its functions. A name that comes twice counts once.

It runs one streamed chat request with a tool through the server's application, and one `LLM.generate`. Both write with
`builtin:code` and `auto`. An earlier request has made what is made once.

A function counts once in each part of the way. Properties, lambdas, comprehensions and methods such as `__init__` do not count.
What the server, the engine and the combiner of drafters call counts. What the parts below call themselves does not: a forward
is one function, and so are a plan and the proposal of one drafter. A type of the package counts if such a function makes, takes
or gives an object of it that was not there before the request.
"""

from __future__ import annotations

import asyncio
import dis
import gc
import inspect
import json
import sys
import threading
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[1] / "outrider")
ROOMS = ("serve", "engine", "drafters/planned")  # whose calls are counted
BODY = {
    "messages": [{"role": "user", "content": "def add(a, b):\n    return"}],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
    "max_tokens": 4,
    "temperature": 0.7,
    "seed": 1,
    "stream": True,
}


class Walk:
    """Watches the calls of every thread that starts after it. functions, types: names by part of the way, in order."""

    def __init__(self) -> None:
        self.part, self.functions, self.types = "", dict[str, dict[str, None]](), dict[str, None]()
        self._engine, self._old, self._before = "", set[int](), list[Any]()
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def begin(self, part: str) -> None:
        """Count from now on."""
        gc.unfreeze()
        self._before = gc.get_objects()  # kept alive: a new object could get the id of one that is gone
        self._old, self._engine, self.part = {id(x) for x in self._before}, "first step", part

    def end(self) -> None:
        """Count nothing any more."""
        self.part = ""

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not self.part or event not in ("call", "return"):
            return
        made = code.co_name in ("__init__", "__new__") and code.co_filename.startswith((PACKAGE, "<string>"))
        if not made and not code.co_filename.startswith(PACKAGE):
            return
        caller = frame.f_back
        while caller is not None and (
            not caller.f_code.co_filename.startswith(PACKAGE) or "<" in caller.f_code.co_name
        ):
            caller = caller.f_back
        if caller is not None and not _room(caller).startswith(ROOMS):
            return
        engine = threading.current_thread().name == "outrider-engine"
        name = code.co_name
        if engine and name == "_tell" and event == "call":
            self._engine = "out"
        part = self._engine if engine else self.part
        if part and made:
            self._see(frame.f_locals.get("self", arg))
        elif part and not name.startswith("__") and "<" not in name and not _is_property(frame):
            if event == "call" and not _goes_on(frame):
                self.functions.setdefault(part, {})[f"{_room(frame)} {code.co_qualname}"] = None
            for value in (*frame.f_locals.values(), arg) if event == "call" else (arg,):
                self._see(value)
        if event == "return" and engine and name == "_tell":
            self._engine = ""  # later steps are as the first one
        if event == "return" and name == "add" and self.part == "to the queue":
            self.part = "out"

    def _see(self, value: Any) -> None:
        for one in [value, *(value[:1] if type(value) in (list, tuple) else ())]:
            kind = type(one)
            if kind.__module__.startswith("outrider") and id(one) not in self._old:
                self.types[kind.__name__] = None


def _room(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(PACKAGE + "/").removesuffix(".py")


def _goes_on(frame: FrameType) -> bool:
    """A coroutine or a generator runs again after it waited."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return at >= 0 and dis.opname[code[at]] == "RESUME" and code[at + 1] & 3 != 0


def _is_property(frame: FrameType) -> bool:
    own = frame.f_locals.get("self")
    static = inspect.getattr_static(type(own), frame.f_code.co_name, None)
    return isinstance(static, (property, cached_property))


async def post(app: Any, path: str, body: dict[str, Any]) -> bytes:
    """What the application answers."""
    sent, parts = json.dumps(body).encode(), list[bytes]()
    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "root_path": ""}
    messages = [{"type": "http.request", "body": sent}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return b"".join(parts)


def served() -> Walk:
    """The walk of a chat request."""
    walk = Walk()
    from outrider.serve.app import create_app
    from outrider.serve.options import ServeOptions
    from outrider.serve.pool import ModelPool

    pool = ModelPool.of([ServeOptions(model="builtin:code")])
    pool.start()
    app = create_app(pool)

    async def run() -> None:
        await post(app, "/v1/chat/completions", {**BODY, "seed": 2})
        walk.begin("to the queue")
        answer = await post(app, "/v1/chat/completions", BODY)
        walk.end()
        assert answer.endswith(b"data: [DONE]\n\n"), answer
        await pool.close()

    asyncio.run(run())
    return walk


def generated() -> Walk:
    """The walk of a text of `LLM.generate`."""
    from outrider import LLM, SamplingParams

    walk = Walk()
    llm = LLM("builtin:code", speculative_config={"method": "auto"})
    llm.generate("def f(", SamplingParams(max_tokens=4))
    walk.begin("LLM.generate")
    llm.generate("def g(", SamplingParams(max_tokens=4, temperature=0.7, seed=1))
    walk.end()
    return walk


if __name__ == "__main__":
    for walk in (served(), generated()):
        way = {name: None for part in ("to the queue", "out") for name in walk.functions.get(part, ())}
        if way:
            files = len({name.split()[0] for name in way})
            print(f"{files:>7}  files that a chat body passes to the queue and out  (goal 6)")
            print(f"{len(way):>7}  functions of ours that it passes on this way  (goal 35)")
        for part, names in [*walk.functions.items(), ("types of it", walk.types)]:
            print(f"{len(names):>7}  {part}")
            for name in names if "--where" in sys.argv else ():
                print(f"         {name}")
