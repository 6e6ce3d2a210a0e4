"""A live server for tests: the built-in pair, a port of the system's choice, in a thread of this process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from patience import PATIENCE
from published import Judged

from outrider import LLM
from outrider.control import Fixed
from outrider.engine import Engine
from outrider.serve.app import create_app
from outrider.serve.connection import http_config
from outrider.serve.dashboard.viewers import Dashboard
from outrider.serve.metrics import Metrics
from outrider.serve.options import ServeOptions
from outrider.serve.pool import ModelPool, PooledModel
from outrider.serve.service import Service

PAIR = {"method": "draft_model", "model": "builtin:code-draft", "num_speculative_tokens": 4}
TEMPLATE = (
    "{% if tools %}# tools: {% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


class Live:
    """A server that runs. url: where. pool, app: its insides. service, metrics: of its first model."""

    def __init__(self, pool: ModelPool, server: uvicorn.Server) -> None:
        self.pool, self.server, self.app = pool, server, server.config.app.app
        self.service, self.registry = pool.loaded[0], pool.metrics.registry
        self.metrics = pool.metrics.of(pool.models[0].name)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> Dashboard:
        return self.pool.dashboard()

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": self.pool.models[0].name, **body})

    def ask(self, path: str = "/v1/completions", **body: Any) -> Any:
        """The answer, which is no error."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """The events of a stream, as OpenAI's are."""
        response = self.post(path, **body, stream=True)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def builtin(rows: int = 4, config: dict | None = PAIR, **options) -> LLM:
    llm = LLM(
        "builtin:code", speculative_config=config, max_num_seqs=rows, controller=Fixed(4), any_method=True, **options
    )
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    return llm


@contextmanager
def serving(llm: LLM, settings: ServeOptions | None = None, **engine_options) -> Iterator[Live]:
    """Start, hand out, stop; the engine's tables must be empty afterwards."""
    settings = settings or ServeOptions(model="code", host="0.0.0.0")
    metrics = Metrics(settings.metrics_prefix, settings.model_name)

    def load(settings: ServeOptions, room: float) -> Service:
        engine = Engine(llm.runtime, observer=metrics.of(settings.model_name), **engine_options)
        return Service(engine, settings)

    pool = ModelPool([PooledModel(settings)], metrics, load)
    pool.start()
    with running(pool) as live:
        yield live


@contextmanager
def running(pool: ModelPool) -> Iterator[Live]:
    """A server of these models, whose first one is loaded; the tables of the engines must be empty afterwards."""
    config = http_config(Judged(create_app(pool)), pool.settings, port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    ready = threading.Event()
    startup = server.startup

    async def started(sockets=None) -> None:
        await startup(sockets)
        ready.set()

    server.startup = started  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield Live(pool, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert [
            service.engine.scheduler.problems() for service in pool.loaded if service.engine.scheduler.problems()
        ] == []


@contextmanager
def server_here(model: str, *options: str, checkout: Path = Path()) -> Iterator[tuple[str, Any]]:
    """In the place of `benchmarks.serve.own_server`: a server in this process, because a new process imports for seconds."""
    with serving(builtin(), ServeOptions(model="model")) as live:
        yield live.url, SimpleNamespace(pid=os.getpid(), returncode=0, kill=lambda: None)
