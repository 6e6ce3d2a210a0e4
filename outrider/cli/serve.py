"""`outrider serve`. Imports nothing large until the command runs."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.options import (
    Debug,
    Device,
    Dtype,
    KvCacheDtype,
    ModelArgument,
    ModelInstead,
    Quantization,
    SpeculationOptions,
    TraceOptions,
    one_model,
    option,
)
from outrider.cli.terminal import DIM, loading, paint, readable

if TYPE_CHECKING:
    from outrider.serve.assembly import Assembly
    from outrider.serve.settings import Settings
    from outrider.serve.spans import Spans


@dataclass(frozen=True)
class AddressOptions:
    """Where the server listens, the names that it answers to, and the keys that clients need."""

    host: Annotated[str, option("Server", "The address to listen at; 0.0.0.0 is every address.")] = "127.0.0.1"
    port: Annotated[int, option("Server", "0 takes a free port.", min=0, max=65535)] = 8000
    allowed_host: Annotated[
        list[str] | None,
        option("Server", "A name that clients use for the server, beside localhost and the address. May be repeated."),
    ] = None
    api_key: Annotated[
        list[str] | None,
        option("Server", "A key; better set by the variable. May be repeated.", envvar="OUTRIDER_API_KEY"),
    ] = None
    api_key_file: Annotated[Path | None, option("Server", "A file with keys, one a line.")] = None
    ssl_certfile: Annotated[Path | None, option("Server", "A certificate, as PEM: the server then speaks HTTPS.")] = (
        None
    )
    ssl_keyfile: Annotated[Path | None, option("Server", "The certificate's private key, as PEM.")] = None

    def for_server(self) -> dict[str, Any]:
        """The options of `ServerOptions`. Raises ValueError for a file that has no keys, and for half of a certificate."""
        keys = list(self.api_key or [])
        if self.api_key_file is not None:
            found = self.api_key_file.read_text(encoding="utf-8").split()
            if not found:
                raise ValueError(f"{self.api_key_file} has no key; write one on each line")
            keys += found
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs the certificate, too: --ssl-certfile FILE")
        if self.ssl_certfile is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except OSError as error:
                raise ValueError(
                    f"{self.ssl_certfile} is no certificate with the key {self.ssl_keyfile or 'in it'}: {error}"
                ) from None
        return {
            "host": self.host,
            "api_key": keys,
            "allowed_host": self.allowed_host or [],
            "ssl_certfile": self.ssl_certfile and str(self.ssl_certfile),
            "ssl_keyfile": self.ssl_keyfile and str(self.ssl_keyfile),
        }


@dataclass(frozen=True)
class ServedModelOptions:
    """How the model is loaded, and what clients see of it."""

    served_model_name: Annotated[
        str | None, option("Model", "The name that clients use; without it, the model's own, from the last colon on.")
    ] = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    quantization: Quantization = None
    kv_cache_dtype: KvCacheDtype = "auto"
    chat_template: Annotated[Path | None, option("Model", "A file with a chat template, in place of the model's.")] = (
        None
    )
    tool_call_parser: Annotated[
        str,
        option(
            "Model",
            "How the model writes tool calls: auto (by its chat template), none, hermes, llama3_json, mistral.",
        ),
    ] = "auto"

    def for_server(self) -> dict[str, Any]:
        """The same for a server, which gets the text of the chat template and not the file."""
        file = self.chat_template
        return {**asdict(self), "chat_template": None if file is None else file.read_text(encoding="utf-8")}


@dataclass(frozen=True)
class EngineOptions:
    """How much the engine handles at once."""

    max_model_len: Annotated[int | None, option("Engine", "Tokens of prompt and output together, at most.")] = None
    max_num_seqs: Annotated[int, option("Engine", "Sequences in a batch, at most.", min=1)] = 8
    max_queue: Annotated[int, option("Engine", "Sequences that may wait. Beyond it clients get 429.", min=0)] = 64
    kv_tokens: Annotated[int | None, option("Engine", "Tokens of all sequences in the cache, at most.")] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        option("Engine", "Bytes of keys and values, at most; those of drafters and the prefix cache included.", min=1),
    ] = None
    prefix_cache: Annotated[int, option("Engine", "MiB for prompts with a common beginning; 0 is off.", min=0)] = 256
    prefill_chunk: Annotated[int, option("Engine", "Prompt tokens per step while other sequences generate.", min=1)] = (
        64
    )


@dataclass(frozen=True)
class LimitOptions:
    """What a client may take."""

    request_timeout: Annotated[float, option("Limits", "Seconds for a request, waiting included.")] = 600.0
    shutdown_timeout: Annotated[float, option("Limits", "Seconds for running requests after SIGTERM.")] = 30.0
    max_connections: Annotated[int, option("Limits", "Requests at once. Beyond it clients get 503.", min=1)] = 256
    max_body: Annotated[int, option("Limits", "KiB of a request.", min=1)] = 4096


@dataclass(frozen=True)
class PrivacyOptions:
    """What others can learn about a request."""

    pad_stream: Annotated[
        float | None,
        option(
            "Privacy",
            "Milliseconds between stream events of one token each. Then timing does not show what was accepted.",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None, option("Privacy", "The origin of a web page that may call the server. May be repeated.")
    ] = None
    log_prompts: Annotated[bool, option("Privacy", "Write prompts to the log.", "--log-prompts")] = False


@dataclass(frozen=True)
class MonitorOptions:
    """Where the log goes, and the names of the metrics."""

    log_file: Annotated[Path | None, option("Output", "Write the log to this file, not to standard error.")] = None
    metrics_prefix: Annotated[
        str, option("Output", "Prefix of the names at /metrics; vllm fits dashboards made for vLLM.")
    ] = "outrider"
    monitor_port: Annotated[
        int | None, option("Output", "A further port, for /health and /metrics only.", min=1, max=65535)
    ] = None


def serve(
    model: ModelArgument = None,
    *,
    model_option: ModelInstead = None,
    speculation: SpeculationOptions,
    address: AddressOptions,
    served: ServedModelOptions,
    engine_options: EngineOptions,
    limits: LimitOptions,
    privacy: PrivacyOptions,
    monitor: MonitorOptions,
    trace: TraceOptions,
    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            "Output",
            "Send a span of each request to this collector, for example http://127.0.0.1:4318/v1/traces.",
            metavar="URL",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a model with OpenAI's API. Requests are batched, and each gets the text that it would get alone."""
    with readable(debug):
        model = one_model(model, model_option)
        config = speculation.config(model)
        with loading(model):
            try:
                from outrider.serve import logs
                from outrider.serve.assembly import ServerOptions, assemble
                from outrider.serve.connection import bound
            except ImportError as error:
                raise ValueError(
                    f"the server's packages are missing ({error.name}); pip install 'outrider[serve]'"
                ) from None
            from outrider.serve.app import create_app
            from outrider.serve.settings import public_name

            options = ServerOptions(
                model=model,
                speculative_config=config,
                **address.for_server(),
                monitor_port=monitor.monitor_port,
                pad_stream=privacy.pad_stream,
                cors_origin=privacy.cors_origin or [],
                log_prompts=privacy.log_prompts,
                metrics_prefix=monitor.metrics_prefix,
                **served.for_server(),
                **asdict(engine_options),
                **asdict(limits),
            )
            options.settings()  # what is wrong is said before the model is loaded
            ports = [address.port, *([] if monitor.monitor_port is None else [monitor.monitor_port])]
            sockets = [one for port in ports for one in bound(address.host, port)]
            spans = None if otlp_traces_endpoint is None else _spans(otlp_traces_endpoint)
            started = perf_counter()
            made = assemble(options, trace.recorder("counts"))
        service, llm, engine = made.service, made.service.llm, made.service.engine
        logs.start(monitor.log_file, made.metrics.log_failures.inc)
        name, notes = service.settings.model_name, made.notes
        shown = served.served_model_name or public_name(llm.loaded.name)
        what = f"{shown} is ready after {perf_counter() - started:.1f} s: {'+'.join(llm.config.methods)}, "
        what += f"{engine.decoder.guarantee.value}, {engine_options.max_num_seqs} sequences of {engine.decoder.max_length} tokens"
        what += f", {served.kv_cache_dtype} keys and values" if served.kv_cache_dtype != "auto" else ""
        if name != shown:
            notes.append(f"clients call it {name}")
        what += "".join(f"; {note}" for note in notes)
        _run(create_app(service, made.metrics, spans), made, address.host, sockets, what)


def _spans(endpoint: str) -> Spans:
    try:
        from outrider.serve.spans import Spans
    except ImportError as error:
        raise ValueError(
            f"spans need OpenTelemetry, of which {error.name} is missing; pip install 'outrider[otel]', or leave out "
            "--otlp-traces-endpoint"
        ) from None
    return Spans(endpoint)


def _run(app: Any, made: Assembly, host: str, sockets: list[socket.socket], what: str) -> None:
    """Serve at sockets that are bound; the first is for clients. what: is said when it is ready."""
    import uvicorn

    from outrider.serve.connection import WAITING, http_config

    service, settings, port = made.service, made.service.settings, sockets[0].getsockname()[1]

    class Server(uvicorn.Server):
        """Says when it is ready. When stopped, it lets requests finish for a while, then returns what they have."""

        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            for one in sockets or ():
                one.listen(WAITING)  # in the kernel; asyncio takes few of them at a time
            if self.started:
                print(what)
                ready_lines(settings, host, port, made.chats, "ctrl-C")

        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            service.engine.drain(settings.shutdown_timeout)
            await super().shutdown(sockets)

    Server(http_config(app, settings)).run(sockets)
    if not service.engine.alive and service.engine.problem:
        raise RuntimeError(service.engine.problem)


def ready_lines(settings: Settings, host: str, port: int, chat: bool, stop: str) -> None:
    """Print a request that can be copied, and where the pages are. chat: the model answers messages. stop: what ends it."""
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    at = f"http{'s' if settings.ssl_certfile else ''}://{host}:{port}"
    bearer = " -H 'Authorization: Bearer '$OUTRIDER_API_KEY" if settings.api_keys else ""
    body: dict[str, Any] = {"model": settings.model_name}
    if chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Write a story about a dog."}]
    else:
        path, body["prompt"] = "/v1/completions", "def quicksort(xs):"
    sent = json.dumps({**body, "max_tokens": 64, "stream": True})
    print(f"curl -N {at}{path}{bearer} -H 'Content-Type: application/json' -d '{sent}'")
    print(f"in a browser: {at}/dashboard   how it works: {at}/explain")
    print(paint(f"health: {at}/health   metrics: {at}/metrics   stop: {stop}", DIM), flush=True)
