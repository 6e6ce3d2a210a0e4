"""`outrider serve`. Imports nothing large until the command runs."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.command import as_command
from outrider.cli.options import NO_MODEL, Config, ServedSpeculationOptions, TraceOptions
from outrider.cli.terminal import DIM, command, loading, paint, working, wrapped
from outrider.core.extras import needs
from outrider.core.files import public_name
from outrider.serve.options import ServeOptions, served_name

if TYPE_CHECKING:
    from outrider.serve.pool import ModelPool


@as_command(
    "Use",
    "outrider serve builtin:code",
    "outrider serve ./my-model -d ./my-small-model -k 4",
    "outrider serve smollm2 ./coder.gguf --memory 12GiB --speculative-config coder=coder.json",
    "OUTRIDER_API_KEY=... outrider serve builtin:code --host 0.0.0.0 --metrics-prefix vllm",
    usual="-d -k --method --config --host --port --api-key --served-model-name --quantization --max-model-len --max-num-seqs",
)
def serve(
    model: list[str] | None = None,
    *,
    speculation: ServedSpeculationOptions,
    config_file: Config = None,
    given: Annotated[dict[str, Any], ServeOptions],
    log_file: Path | None = None,
    trace: TraceOptions,
) -> None:
    """Serve a model, or several. Requests are batched, and each gets the text that it would get alone.

    Args:
        model: A folder, a GGUF file, a hub name or a built-in model. Several: each is loaded when asked for.
        log_file: Write the log to this file, not to standard error.
    """
    if not model:
        raise ValueError(NO_MODEL)
    settings = _settings(model, speculation, given)
    options = settings[0]
    if len(model) > 1 and trace.trace is not None:
        raise ValueError(
            f"--trace {trace.trace} holds the steps of one model, and there are {len(model)}; serve one of them"
        )
    with needs("serve", "the server"):
        from outrider.serve.connection import bound
    sockets = bound(options.host, options.port)  # before seconds of imports
    with loading(model[0]):
        with needs("serve", "the server"):
            from outrider.serve import logs
            from outrider.serve.app import create_app
            from outrider.serve.pool import ModelPool, prepare, weights_of
        from outrider.drafters.config import SpeculativeConfig
        from outrider.engine.memory import gib

        for one in settings:  # a pipe hears what is wrong before it hears that something is loaded
            SpeculativeConfig.of(one.speculative_config)
            weights_of(one)
    with working(f"loading {model[0]}"):
        started = perf_counter()
        pool = ModelPool.of(settings, trace.recorder("counts"), fit=True)
        service = pool.start()
        prepare()
    engine, runtime = service.engine, service.runtime
    logs.start(log_file, pool.metrics.log_failures.inc)
    name, said = options.model_name, options.served_model_name or public_name(runtime.loaded.name)
    facts = [
        f"{said} is ready after {perf_counter() - started:.1f} s: {'+'.join(runtime.config.methods)}",
        engine.decoder.guarantee.value,
        f"{options.max_num_seqs} sequence{'s'[: options.max_num_seqs - 1]} of {engine.decoder.max_length} tokens",
        f"at most {gib(engine.memory.most)} of keys and values",
        *([f"kept as {options.kv_cache_dtype}"] if options.kv_cache_dtype != "auto" else []),
    ]
    notes = [*service.notes, *([f"clients call it {name}"] if name != said else [])]
    if speculation.draft_model is not None and speculation.method is None:
        notes.append(f"only {speculation.draft_model} drafts; --method auto drafts from earlier text, too")
    what = "; ".join([", ".join(facts), *notes])
    if others := [f"{one.name} ({gib(one.weights)})" for one in pool.models[1:]]:
        what += (
            f"\nloaded when asked for: {', '.join(others)}; all that are loaded take at most {gib(int(pool.memory))}"
        )
    _run(create_app(pool), pool, sockets, what, service.chats)


def _settings(models: list[str], speculation: ServedSpeculationOptions, given: dict[str, Any]) -> list[ServeOptions]:
    """The options of each model. Raises ValueError for those of one model, if there are several."""
    for name in ("served_model_name", "chat_template"):
        if len(models) > 1 and given.get(name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is for one model, and there are {len(models)}; serve that one alone"
            )
    named = {given.get("served_model_name") or served_name(model): model for model in models}
    if len(named) < len(models):
        raise ValueError(
            f"two models are called alike: {', '.join(models)}; give one of the files or folders another name"
        )
    configs = speculation.configs(named)
    return [ServeOptions(model=m, speculative_config=configs[name], **given) for name, m in named.items()]


def _run(app: Any, pool: ModelPool, sockets: list[socket.socket], what: str, chats: bool) -> None:
    """Serve at sockets that are bound. what: is said when it is ready. chats: the first model does."""
    from outrider.serve.connection import ManyWaiting, http_config
    from outrider.serve.logs import log

    options, port = pool.settings, sockets[0].getsockname()[1]

    class Server(ManyWaiting):
        """Says when it is ready. When stopped, it lets requests finish for a while, then returns what they have."""

        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(wrapped(what))
                ready_lines(options, port, chats, "ctrl-C")

        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            running = sum(service.engine.stats.running for service in pool.loaded)
            log.info("stopping: %g s for %d running requests", options.shutdown_timeout, running)
            pool.drain(options.shutdown_timeout)
            await super().shutdown(sockets)
            log.info("stopped")

    Server(http_config(app, options)).run(sockets)
    for service in pool.loaded:
        if service.engine.problem:
            raise RuntimeError(service.engine.problem)


def ready_lines(options: ServeOptions, port: int, chat: bool, stop: str) -> None:
    """Print a request that can be copied, and where the pages are. port: that was found. chat: the model answers messages.

    stop: what ends the server.
    """
    host = options.host
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    at = f"http://{host}:{port}"
    bearer = ["-H 'Authorization: Bearer '$OUTRIDER_API_KEY"] if options.api_key else []
    body: dict[str, Any] = {"model": options.model_name}
    if chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Write a story about a dog."}]
    else:
        path, body["prompt"] = "/v1/completions", "def quicksort(xs):"
    sent = json.dumps({**body, "max_tokens": 64, "stream": True})
    print(command(f"curl -N {at}{path}", *bearer, "-H 'Content-Type: application/json'", f"-d '{sent}'"))
    print(wrapped(f"in a browser: {at}/   dashboard: {at}/dashboard"))
    print(paint(wrapped(f"health: {at}/health   metrics: {at}/metrics   stop: {stop}"), DIM), flush=True)
