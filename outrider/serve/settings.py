"""What an operator may choose about a server, and the limits that keep it up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds.

    api_key: what clients must send as `Authorization: Bearer ...`, None for no check. request_timeout: how long a request
    may take, waiting included. shutdown_timeout: how long requests may go on after SIGTERM. body_timeout: how long a client
    may take to send its request. pad_stream: seconds between the events of a stream, one token each; None sends tokens as
    they come. log_prompts: write prompts to the log. cors: origins whose pages may ask, none by default. tool_call_parser: how
    the model writes calls of tools, see `outrider.serve.tools.PARSERS`.
    """

    model_name: str = "model"
    api_key: str | None = None
    metrics_prefix: str = "outrider"
    request_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    body_timeout: float = 30.0
    pad_stream: float | None = None
    log_prompts: bool = False
    cors: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    stall_timeout: float = 120.0  # for one step of the engine; then /health says that it hangs
    send_timeout: float = 60.0  # for a client to take what it is sent
    max_body: int = 4 << 20
    max_connections: int = 256  # requests in work or waiting, of every kind
    max_choices: int = 16  # prompts times n of one request
    max_stops: int = 16
    max_stop_length: int = 256  # characters
    max_logprobs: int = 20
    max_bias: int = 1024  # entries of logit_bias, bad_words, allowed_token_ids and stop_token_ids
    max_speculative_tokens: int = 16  # that a request may ask for
