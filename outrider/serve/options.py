"""What a server, a deployment or a batch is made of. Imports nothing large.

Each option is declared once, here: type with its unit, heading, help, limits, default. The command line is made from it, files
are read with it, and the server reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from outrider.core.files import MEMORY_DAYS, MEMORY_DISK, PREFIX_DISK, byte_count, public_name

PANELS = (
    "Model", "Training", "What", "How", "Hardware", "Demand", "Speculation", "Server", "Replicas", "Engine", "Limits",
    "Privacy", "Sampling", "Conversation", "Output",
)  # fmt: skip
"""The headings of the help page, in its order."""


def setting(
    default: Any,
    panel: str,
    text: str,
    *names: str,
    kind: Any = None,
    envvar: str | None = None,
    metavar: str | None = None,
    **limits: Any,
) -> Any:
    """An option that the command line has, too. kind: its type there, if that is another. limits: as of `Field`."""
    there = {"envvar": envvar, "metavar": metavar, "min": limits.get("ge"), "max": limits.get("le")}
    extra = {"panel": panel, "names": list(names), "kind": kind, "typer": there}
    return Field(default, description=text, json_schema_extra=extra, **limits)


def shown(options: type[Options]) -> dict[str, FieldInfo]:
    """The options that the command line has, in the order of the help page."""
    fields = options.model_fields.items()
    visible = {name: field for name, field in fields if field.json_schema_extra and name not in options.hidden}
    return dict(sorted(visible.items(), key=lambda pair: PANELS.index(panel(pair[1]))))


def panel(field: FieldInfo) -> str:
    """The heading of an option; empty if the command line has it not."""
    extra = field.json_schema_extra
    return str(extra["panel"]) if isinstance(extra, dict) else ""


def _texts(given: Any) -> Any:
    return [given] if isinstance(given, str) else given or []


def _contents(given: Any) -> Any:
    """A file on the command line stands for its text."""
    return given.read_text(encoding="utf-8") if isinstance(given, Path) else given


def _size(given: str | None) -> str | None:
    """Raises ValueError for a text that is no number of bytes."""
    if given is not None:
        byte_count(given)
    return given


class Options(BaseModel):
    """Options that belong together. A group does not change, and takes no name that it does not know.

    hidden: those of the group above that the command line has not here.
    """

    hidden: ClassVar[frozenset[str]] = frozenset()
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    def with_(self, **changes: Any) -> Self:
        """The same with other values."""
        return type(self).model_validate({**self.model_dump(), **changes})


class PrecisionOptions(Options):
    """How the weights of a model are kept. The names are those of `load`."""

    dtype: str = setting("auto", "Model", "auto (as in the checkpoint), float32, bfloat16 or float16.")
    quantization: str | None = setting(None, "Model", "int8 or int4 weights, on the CPU.")


class LoadOptions(PrecisionOptions):
    """How a model is loaded. The names are those of `load` and `LLM`."""

    device: str = setting("auto", "Model", "auto, cpu or cuda.")
    kv_cache_dtype: str = setting(
        "auto", "Model", "Keys and values: auto (bfloat16, or float32 for such weights), float32, bfloat16 or int8."
    )


class FolderOptions(Options):
    """What is kept for later processes."""

    prefix_dir: str | None = setting(
        None,
        "Engine",
        "A folder that keeps what was read of prompts, so that a later start need not read it again.",
        envvar="OUTRIDER_PREFIX_DIR",
        metavar="DIR",
    )
    prefix_disk: Annotated[str, AfterValidator(_size)] = setting(
        PREFIX_DISK, "Engine", "What the folder may take.", envvar="OUTRIDER_PREFIX_DISK", metavar="SIZE"
    )
    memory_dir: str | None = setting(
        None,
        "Privacy",
        "A folder that keeps the texts of requests, to draft later ones from. Off by default: they are a secret to guard.",
        envvar="OUTRIDER_MEMORY_DIR",
        metavar="DIR",
    )
    memory_disk: Annotated[str, AfterValidator(_size)] = setting(
        MEMORY_DISK, "Privacy", "What that folder may take.", metavar="SIZE"
    )
    memory_days: float = setting(MEMORY_DAYS, "Privacy", "Days until a text is forgotten.")
    memory_by: str = setting("client", "Privacy", "Whose texts a draft may come from: client (the same) or all.")


class ModelOptions(LoadOptions, FolderOptions):
    """A model that writes for many. chat_template: its text."""

    model: str
    speculative_config: dict[str, Any] = {"method": "auto"}
    served_model_name: str | None = setting(
        None, "Model", "The name that clients use; without it, the model's own, from the last colon on."
    )
    chat_template: Annotated[str | None, BeforeValidator(_contents)] = setting(
        None, "Model", "A file with a chat template, in place of the model's.", kind=Path | None
    )
    max_model_len: int | None = setting(
        None, "Engine", "Tokens of prompt and output together, at most; without it, as many as the model can read."
    )
    max_num_seqs: int = setting(8, "Engine", "Sequences in a batch, at most.", ge=1)

    def of_llm(self) -> dict[str, Any]:
        """The arguments of `LLM`."""
        return self.model_dump(exclude={"served_model_name", "chat_template"}, include=set(ModelOptions.model_fields))


class ServeOptions(ModelOptions):
    """What a server is made of. Options without help are not on the command line."""

    tool_call_parser: str = setting(
        "auto",
        "Model",
        "How the model writes tool calls: auto (by its chat template), none, hermes, llama3_json, mistral.",
    )
    host: str = setting("127.0.0.1", "Server", "The address to listen at; 0.0.0.0 is every address.")
    port: int = setting(8000, "Server", "0 takes a free port.", ge=0, le=65535)
    allowed_host: list[str] = setting(
        [], "Server", "A name that clients use for the server, beside localhost and the address. May be repeated."
    )
    api_key: Annotated[list[str], BeforeValidator(_texts)] = setting(
        [], "Server", "A key; better set by the variable. May be repeated.", envvar="OUTRIDER_API_KEY", repr=False
    )
    api_key_file: Path | None = setting(None, "Server", "A file with keys, one a line.")
    max_queue: int = setting(64, "Engine", "Sequences that may wait. Beyond it clients get 429.", ge=0)
    kv_tokens: int | None = setting(None, "Engine", "Tokens of all sequences in the cache, at most.")
    kv_cache_memory_bytes: int | None = setting(
        None, "Engine", "Bytes of keys and values, at most; those of drafters and the prefix cache included.", ge=1
    )
    memory: Annotated[str | None, AfterValidator(_size)] = setting(
        None,
        "Engine",
        "What weights, keys and values of all models may take; models leave for others. Without it, what is free.",
        metavar="SIZE",
    )
    prefix_cache: int = setting(256, "Engine", "MiB for prompts with a common beginning; 0 is off.", ge=0)
    prefill_chunk: int = setting(64, "Engine", "Prompt tokens per step while other sequences generate.", ge=1)
    request_timeout: float = setting(600.0, "Limits", "Seconds for a request, waiting included.")
    shutdown_timeout: float = setting(30.0, "Limits", "Seconds for running requests after SIGTERM.")
    max_connections: int = setting(256, "Limits", "Requests at once. Beyond it clients get 503.", ge=1)
    max_body: int = setting(4096, "Limits", "KiB of a request.", ge=1)
    pad_stream: float | None = setting(
        None,
        "Privacy",
        "Milliseconds between stream events of one token each. Then timing does not show what was accepted.",
    )
    cors_origin: list[str] = setting(
        [], "Privacy", "The origin of a web page that may call the server. May be repeated."
    )
    log_prompts: bool = setting(False, "Privacy", "Write prompts to the log.")
    metrics_prefix: str = setting(
        "outrider", "Output", "Prefix of the names at /metrics; vllm fits dashboards made for vLLM."
    )
    body_timeout: float = 30.0  # seconds for a client to send its request
    send_timeout: float = 60.0  # seconds for a client to receive a part of the response
    stall_timeout: float = 120.0  # seconds for one step of the engine; after it `/health` reports that the engine hangs
    replica_name: str = ""  # of this server among others; the ids of its responses end with it

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, given: Any) -> Any:
        """Put the keys of a file in its place."""
        if not isinstance(given, dict) or not (file := given.get("api_key_file")):
            return given
        keys = Path(file).read_text(encoding="utf-8").split()
        if not keys:
            raise ValueError(f"{file} has no key; write one on each line")
        return {**given, "api_key": [*_texts(given.get("api_key")), *keys], "api_key_file": None}

    @model_validator(mode="after")
    def _usable(self) -> Self:
        from outrider.serve.tools import PARSERS

        if self.tool_call_parser not in PARSERS:
            raise ValueError(f"--tool-call-parser is one of {', '.join(PARSERS)}, got {self.tool_call_parser!r}")
        if not all(key.strip() for key in self.api_key):
            raise ValueError("an API key is empty; leave out --api-key for a server without one")
        return self

    @cached_property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.served_model_name or served_name(self.model)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        return (self.model_name,) if self.served_model_name else (self.model_name, self.model)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names in the header `Host` that are answered; none for all."""
        return answered_hosts(self.host, self.api_key, self.allowed_host)

    @property
    def body_bytes(self) -> int:
        """Bytes of a request, at most."""
        return self.max_body << 10


class BatchOptions(ModelOptions):
    """What a batch runs on."""

    seed: int = setting(0, "Sampling", "Gives each request without a seed its own, from its custom_id.")

    @property
    def of_texts(self) -> dict[str, Any]:
        """The options that may change a text. Drafters do not, unless the verifier only keeps the distribution."""
        keep = self.model_dump(exclude={"speculative_config", "max_num_seqs", *FolderOptions.model_fields})
        if self.chat_template is not None:
            keep["chat_template"] = hashlib.sha256(self.chat_template.encode()).hexdigest()[:24]
        config = self.speculative_config
        return keep if config.get("verifier", "match") == "match" else {**keep, "speculative_config": config}


def served_name(name: str) -> str:
    """The name that clients use for a model, from the name that it was loaded by.

    It has no colon. Ray Serve LLM and others read `base:adapter` in a name with one, and shells and addresses need care.
    """
    return public_name(name).rpartition(":")[2].removesuffix(".gguf")


def answered_hosts(host: str, keys: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """`ServeOptions.hosts` of a server that listens at `host`.

    A web page can give its own name the address 127.0.0.1 and then read a server that listens there. A server that asks for a
    key or for its own name is safe from it.
    """
    if not allowed and (keys or not is_local(host)):
        return ()
    return ("localhost", "127.0.0.1", "::1", host.lower(), *(name.lower() for name in allowed))


def is_local(host: str) -> bool:
    """Whether only programs of this machine reach this address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
