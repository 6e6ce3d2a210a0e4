"""`outrider serve` and `outrider chat`. Imports nothing heavy until a command runs."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.terminal import DIM, Debug, TraceDetail, loading, option, paint, readable, speculation

if TYPE_CHECKING:
    import uvicorn

    from outrider.serve.service import Service
    from outrider.serve.spans import Spans


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub name or a built-in model.")],
    speculative_config: Annotated[
        str,
        option(
            "Speculation", 'Who guesses, as JSON or a file; {"method": "none"} is plain decoding.', metavar="JSON|FILE"
        ),
    ] = '{"method": "auto"}',
    host: Annotated[str, option("Server", "The address to listen at; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, option("Server", "0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, option("Server", "What clients must send; better in the environment.", envvar="OUTRIDER_API_KEY")
    ] = None,
    served_model_name: Annotated[
        str | None, option("Model", "The name clients use; the model's own if not given.")
    ] = None,
    dtype: Annotated[str, option("Model", "auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, option("Model", "auto, cpu or cuda.")] = "auto",
    quantization: Annotated[str | None, option("Model", "int8 or int4 weights, on the CPU.")] = None,
    chat_template: Annotated[
        Path | None, option("Model", "A file with a chat template, in place of the model's.")
    ] = None,
    tool_call_parser: Annotated[
        str,
        option(
            "Model", "How it writes calls of tools: auto (by its chat template), none, hermes, llama3_json, mistral."
        ),
    ] = "auto",
    max_model_len: Annotated[int | None, option("Engine", "Tokens of prompt and output together.")] = None,
    max_num_seqs: Annotated[int, option("Engine", "Texts that are written side by side.", min=1)] = 8,
    max_queue: Annotated[int, option("Engine", "Texts that may wait; beyond it clients get 429.", min=0)] = 64,
    kv_tokens: Annotated[int | None, option("Engine", "Tokens that all texts together may hold in the cache.")] = None,
    kv_cache_memory_bytes: Annotated[
        int | None,
        option("Engine", "Bytes that keys and values may take, drafters' and prefix cache's among them.", min=1),
    ] = None,
    prefix_cache: Annotated[int, option("Engine", "MiB for prompts that start alike; 0 is off.", min=0)] = 256,
    prefill_chunk: Annotated[int, option("Engine", "Prompt tokens per step while others write.", min=1)] = 64,
    request_timeout: Annotated[float, option("Limits", "Seconds for a request, waiting included.")] = 600.0,
    shutdown_timeout: Annotated[float, option("Limits", "Seconds that texts may go on after SIGTERM.")] = 30.0,
    max_connections: Annotated[int, option("Limits", "Requests at once; beyond it clients get 503.", min=1)] = 256,
    max_body: Annotated[int, option("Limits", "KiB of a request.", min=1)] = 4096,
    pad_stream: Annotated[
        float | None,
        option("Privacy", "Milliseconds between stream events, one token each, so that timing tells nothing."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, option("Privacy", "A page's origin that may ask; may be repeated.")
    ] = None,
    log_file: Annotated[Path | None, option("Output", "Write the log there, not to standard error.")] = None,
    log_prompts: Annotated[bool, option("Privacy", "Write prompts to the log.", "--log-prompts")] = False,
    metrics_prefix: Annotated[str, option("Output", "Of the names at /metrics; vllm for its dashboards.")] = "outrider",
    trace: Annotated[
        Path | None,
        option("Output", "Write every step there, for outrider replay; numbers only, no prompt.", metavar="FILE"),
    ] = None,
    trace_detail: TraceDetail = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            "Output", "Send a span of each request to a collector, as http://127.0.0.1:4318/v1/traces.", metavar="URL"
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a model as OpenAI's API does, with guesses for every request and the text each would have alone."""
    with readable(debug):
        config = speculation(speculative_config)
        with loading(model):
            try:
                from outrider.serve import logs
                from outrider.serve.metrics import Metrics
                from outrider.serve.settings import Settings
            except ImportError as error:
                raise ValueError(
                    f"the server's packages are missing ({error.name}); pip install 'outrider[serve]'"
                ) from None
            from outrider.engine import Engine
            from outrider.llm import LLM
            from outrider.serve.app import create_app
            from outrider.serve.service import Service
            from outrider.serve.tools import PARSERS
            from outrider.trace import asked

            if tool_call_parser not in PARSERS:
                raise ValueError(f"--tool-call-parser is one of {', '.join(PARSERS)}, got {tool_call_parser!r}")
            spans = None if otlp_traces_endpoint is None else _spans(otlp_traces_endpoint)
            written = asked(trace, trace_detail, "counts")
            started = perf_counter()
            llm = LLM(
                model,
                speculative_config=config,
                dtype=dtype,
                device=device,
                quantization=quantization,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                trace=written,
            )
        if chat_template is not None:
            if llm.tokenizer is None:
                raise ValueError(f"{model} has no tokenizer, so a chat template is of no use")
            llm.tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        name = served_model_name or llm.loaded.name
        settings = Settings(
            model_name=name,
            api_key=api_key,
            metrics_prefix=metrics_prefix,
            request_timeout=request_timeout,
            shutdown_timeout=shutdown_timeout,
            pad_stream=None if pad_stream is None else pad_stream / 1000,
            log_prompts=log_prompts,
            cors=tuple(cors_origin or ()),
            tool_call_parser=tool_call_parser,
            max_body=max_body << 10,
            max_connections=max_connections,
        )
        metrics = Metrics(metrics_prefix, name)
        logs.start(log_file, metrics.log_failures.inc)
        engine = Engine(
            llm,
            max_queue=max_queue,
            kv_tokens=kv_tokens,
            prefix_bytes=prefix_cache << 20,
            prefill_chunk=prefill_chunk,
            memory=kv_cache_memory_bytes,
            observer=metrics,
            trace=written,
        )
        metrics.attach(engine)
        service = Service(llm, engine, settings)
        what = f"{name} is ready after {perf_counter() - started:.1f} s: {'+'.join(llm.config.methods)}, "
        what += f"{engine.decoder.guarantee.value}, {max_num_seqs} texts of {engine.decoder.max_length} tokens"
        _run(create_app(service, metrics, spans), service, host, port, what)


def _spans(endpoint: str) -> Spans:
    try:
        from outrider.serve.spans import Spans
    except ImportError as error:
        raise ValueError(
            f"spans need OpenTelemetry, of which {error.name} is missing; pip install 'outrider[otel]', or leave out "
            "--otlp-traces-endpoint"
        ) from None
    return Spans(endpoint)


def _run(app: Any, service: Service, host: str, port: int, what: str) -> None:
    import uvicorn

    settings = service.settings

    class Server(uvicorn.Server):
        """Tells when it is ready; told to stop, lets texts go on for a while and then hands back what there is."""

        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                _ready(self, settings.model_name, settings.api_key is not None, host, what)

        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            service.engine.drain(settings.shutdown_timeout)
            await super().shutdown(sockets)

    patience = int(settings.shutdown_timeout) + 5
    Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=patience,
            h11_max_incomplete_event_size=64 << 10,
        )
    ).run()
    if not service.engine.alive and service.engine.problem:
        raise RuntimeError(service.engine.problem)


def _ready(server: uvicorn.Server, name: str, key: bool, host: str, what: str) -> None:
    port = server.servers[0].sockets[0].getsockname()[1]
    at = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    bearer = " -H 'Authorization: Bearer '$OUTRIDER_API_KEY" if key else ""
    body = json.dumps({"model": name, "prompt": "def quicksort(xs):", "max_tokens": 64, "stream": True})
    print(what)
    print(f"curl -N {at}/v1/completions{bearer} -H 'Content-Type: application/json' -d '{body}'")
    print(paint(f"health: {at}/health   metrics: {at}/metrics   stop: ctrl-C", DIM), flush=True)


def chat(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where a server listens.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, option("Model", "A model of the server; its first if not given.", "--model", "-m")
    ] = None,
    system: Annotated[str | None, option("Model", "What the model is told first.")] = None,
    temperature: Annotated[float, option("Sampling", "0 is greedy.", "--temperature", "-t")] = 0.7,
    max_tokens: Annotated[int, option("Sampling", "Tokens of an answer at most.", "--max-tokens", "-n")] = 512,
    seed: Annotated[int | None, option("Sampling", "Drawn if not given.")] = None,
    api_key: Annotated[str | None, option("Server", "The server's key.", envvar="OUTRIDER_API_KEY")] = None,
    debug: Debug = False,
) -> None:
    """Talk to a server in the terminal and watch its guesses come true. A line is a message; ctrl-D ends."""
    with readable(debug):
        from outrider.cli.chat import Talk

        talk = Talk(url, model, api_key, temperature=temperature, max_tokens=max_tokens, seed=seed)
        talk.run(system, secrets.randbits(32) if seed is None else seed, sys.stdin, os.isatty(0))
