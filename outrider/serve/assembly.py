"""A server from its options: model, engine, service, metrics. For a process of its own, and for a replica among many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from outrider.engine import Engine
from outrider.llm import LLM
from outrider.serve.metrics import Metrics
from outrider.serve.service import Service
from outrider.serve.settings import Settings, answered_hosts, served_name
from outrider.serve.templates import set_chat_template
from outrider.serve.tools import PARSERS
from outrider.trace import Recorder


class ServerOptions(BaseModel):
    """What a server is made of. Names and meanings are those of the options of `outrider serve`.

    host: where it listens; "" if that is not known here. chat_template: its text. kv_cache_memory_bytes: bytes. prefix_cache:
    MiB. max_body: KiB. pad_stream: milliseconds. Times are seconds.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    speculative_config: dict[str, Any] = Field(default_factory=lambda: {"method": "auto"})
    served_model_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = Field(8, ge=1)
    max_queue: int = Field(64, ge=0)
    kv_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    prefix_cache: int = Field(256, ge=0)
    prefill_chunk: int = Field(64, ge=1)
    request_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    max_connections: int = Field(256, ge=1)
    max_body: int = Field(4096, ge=1)
    pad_stream: float | None = None
    cors_origin: list[str] = Field(default_factory=list)
    log_prompts: bool = False
    metrics_prefix: str = "outrider"
    api_key: str | list[str] | None = None
    allowed_host: list[str] = Field(default_factory=list)
    host: str = ""
    monitor_port: int | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def settings(self) -> Settings:
        """The settings of the server. Raises ValueError for a parser of tool calls that does not exist."""
        if self.tool_call_parser not in PARSERS:
            raise ValueError(f"--tool-call-parser is one of {', '.join(PARSERS)}, got {self.tool_call_parser!r}")
        keys = (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key or ())
        if not all(key.strip() for key in keys):
            raise ValueError("an API key is empty; leave out --api-key for a server without one")
        return Settings(
            model_name=self.served_model_name or served_name(self.model),
            aliases=() if self.served_model_name else (self.model,),
            api_keys=keys,
            hosts=answered_hosts(self.host, keys, self.allowed_host),
            monitor_port=self.monitor_port,
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
            metrics_prefix=self.metrics_prefix,
            request_timeout=self.request_timeout,
            shutdown_timeout=self.shutdown_timeout,
            pad_stream=None if self.pad_stream is None else self.pad_stream / 1000,
            log_prompts=self.log_prompts,
            cors=tuple(self.cors_origin),
            tool_call_parser=self.tool_call_parser,
            max_body=self.max_body << 10,
            max_connections=self.max_connections,
        )


@dataclass(frozen=True)
class Assembly:
    """A server without an address. notes: what its user should know. chats: the model has a chat template of its own."""

    service: Service
    metrics: Metrics
    notes: list[str]
    chats: bool


class ModelOptions(Protocol):
    """The options of a model that writes for many. Names and meanings are those of `LLM`; chat_template is its text."""

    @property
    def model(self) -> str: ...
    @property
    def speculative_config(self) -> dict[str, Any] | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def quantization(self) -> str | None: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def chat_template(self) -> str | None: ...


def load_llm(options: ModelOptions, recorder: Recorder | None = None) -> tuple[LLM, str | None]:
    """Load the model and its drafter. Returns it, and what its user should know of its chat template.

    Raises what `LLM` raises.
    """
    llm = LLM(
        options.model,
        speculative_config=options.speculative_config,
        dtype=options.dtype,
        device=options.device,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        trace=recorder,
    )
    return llm, set_chat_template(llm, options.chat_template)


def assemble(options: ServerOptions, recorder: Recorder | None = None) -> Assembly:
    """Load the model and start its engine. recorder: where steps are written.

    Raises what `LLM` and `Engine` raise for options that are wrong and models that cannot be had.
    """
    settings = options.settings()
    llm, note = load_llm(options, recorder)
    metrics = Metrics(settings.metrics_prefix, settings.model_name)
    engine = Engine(
        llm,
        max_queue=options.max_queue,
        kv_tokens=options.kv_tokens,
        prefix_bytes=options.prefix_cache << 20,
        prefill_chunk=options.prefill_chunk,
        memory=options.kv_cache_memory_bytes,
        observer=metrics,
        trace=recorder,
    )
    metrics.attach(engine)
    chats = note is None and bool(getattr(llm.tokenizer, "chat_template", None))
    return Assembly(Service(llm, engine, settings), metrics, [*llm.notes, *([note] if note else [])], chats)
