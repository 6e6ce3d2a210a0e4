"""The settings of a server, and the limits that protect it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds.

    model_name: what answers call the model. aliases: other names that requests may use.
    api_keys: one of them is what clients must send as `Authorization: Bearer ...`; none for no check.
    hosts: names in the header `Host` that are answered; none for all. ssl_certfile, ssl_keyfile: for HTTPS.
    monitor_port: answers `/health` and `/metrics` only.
    request_timeout: for a request, its time in the queue included. shutdown_timeout: for requests after SIGTERM.
    body_timeout: for a client to send its request. send_timeout: for a client to receive a part of the response.
    stall_timeout: for one step of the engine; after it `/health` reports that the engine hangs.
    pad_stream: between the events of a stream, one token each; None sends tokens as they come.
    log_prompts: write prompts to the log. cors: origins that may call the server from a browser; none by default.
    tool_call_parser: how the model writes tool calls, one of `outrider.serve.tools.PARSERS`.
    max_connections: requests at once, those for `/health` and `/metrics` beside. max_choices: prompts times n of one request.
    max_stop_length: characters. max_logprobs: of one token, for prompt and output. max_bias: entries of logit_bias,
    bad_words, allowed_token_ids and stop_token_ids. max_speculative_tokens: that a request may ask for. max_responses,
    max_response_bytes: that are kept to go on from, see `ResponseStore`.
    replica: the name of this server among others; the ids of its responses end with it.
    """

    model_name: str = "model"
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    monitor_port: int | None = None
    metrics_prefix: str = "outrider"
    request_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    body_timeout: float = 30.0
    pad_stream: float | None = None
    log_prompts: bool = False
    cors: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    stall_timeout: float = 120.0
    send_timeout: float = 60.0
    max_body: int = 4 << 20
    max_connections: int = 256
    max_choices: int = 16
    max_stops: int = 16
    max_stop_length: int = 256
    max_logprobs: int = 20
    max_bias: int = 1024
    max_speculative_tokens: int = 16
    max_responses: int = 256
    max_response_bytes: int = 32 << 20
    replica: str = ""


def served_name(name: str) -> str:
    """The name that clients use for a model, from the name that it was loaded by.

    It has no colon. Ray Serve LLM and others read `base:adapter` in a name with one, and shells and addresses need care.
    """
    return public_name(name).rpartition(":")[2].removesuffix(".gguf")


def public_name(name: str) -> str:
    """A model's name without the folders of this machine: what clients may see."""
    path = os.path.isabs(name) or os.path.exists(name)
    return os.path.basename(os.path.abspath(name)) if path else name


def answered_hosts(host: str, keys: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """`Settings.hosts` of a server that listens at `host`.

    A web page can give its own name the address 127.0.0.1 and then read a server that listens there, unless that asks for a
    key or for its own name.
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
