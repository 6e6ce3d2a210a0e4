"""`outrider chat`: a conversation in the terminal. The window title counts the accepted draft tokens as they come."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import sys
from collections.abc import Iterator
from typing import Annotated, Any, TextIO
from urllib.parse import urlsplit

import typer

from outrider.bench.sse import events
from outrider.cli.options import ApiKey, Debug, option
from outrider.cli.terminal import DIM, paint, printable, readable


class Talk:
    """A conversation with a server. Raises ConnectionError if none answers, ValueError for what the server refuses."""

    def __init__(self, url: str, model: str | None, api_key: str | None, **options: Any) -> None:
        parts = urlsplit(url if "//" in url else "http://" + url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server; an example: http://127.0.0.1:8000")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._open = lambda: kind(parts.hostname or "", parts.port, timeout=600)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._options = options
        self.messages: list[dict[str, str]] = []
        self.model = model or self._ask("GET", "/v1/models")["data"][0]["id"]
        self._template = True  # until the server says that the model has no chat template

    def run(self, system: str | None, seed: int, lines: TextIO, prompt: bool) -> None:
        """Read messages, one a line, and show the answers, until there are no more lines."""
        if system:
            self.messages.append({"role": "system", "content": system})
        print(paint(f"{self.model}, seed {seed}; ctrl-D ends", DIM))
        while True:
            if prompt:
                print(paint("> ", DIM), end="", flush=True)
            if not (line := lines.readline()):
                break
            if line.strip():
                self._options["seed"] = seed
                self.say(line.rstrip("\n"))

    def say(self, text: str) -> None:
        """Send a message. Show the answer as it comes, then a line of facts about it."""
        self.messages.append({"role": "user", "content": text})
        answer, finish, facts = "", "nothing", ""
        for event in self._events():
            for choice in event.get("choices", ()):
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                answer += piece
                sys.stdout.write(printable(piece))
                finish = choice.get("finish_reason") or finish
            if (now := event.get("so_far")) and sys.stdout.isatty():
                title = f"{now['tokens']} tokens, {now['accepted']} of {now['drafted']} draft tokens accepted"
                sys.stdout.write(f"\x1b]0;{title}\x07")
            if event.get("usage"):
                facts = _facts(event, finish)
            sys.stdout.flush()
        print("\n" + paint(facts or finish, DIM))
        self.messages.append({"role": "assistant", "content": answer})

    def _events(self) -> Iterator[dict[str, Any]]:
        """The events of an answer: of a chat, or of a plain text completion if the model has no chat template."""
        stream = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": self.model, "stream": True, "stream_options": stream, **self._options}
        if self._template:
            try:
                yield from self._stream("/v1/chat/completions", {**body, "messages": self.messages})
                return
            except ValueError as error:
                if "no chat template" not in str(error):
                    raise
                self._template = False
                print(paint("this model has no chat template, so it continues the text of the conversation", DIM))
        text = "\n".join(m["content"] for m in self.messages)
        yield from self._stream("/v1/completions", {**body, "prompt": text})

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection, response = self._send("POST", path, body)
        try:
            for event in events(iter(lambda: response.read1(1 << 16), b"")):
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                yield event
        finally:
            connection.close()

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        connection, response = self._send(method, path, None)
        try:
            return json.loads(response.read())
        finally:
            connection.close()

    def _send(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._open()
        try:
            connection.request(method, self._base + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except OSError as error:
            raise ConnectionError(
                f"no server answers at {connection.host}:{connection.port} ({error}); start one: outrider serve builtin:code"
            ) from error
        if response.status != 200:
            try:
                raise ValueError(json.loads(response.read())["error"]["message"])
            except (KeyError, json.JSONDecodeError):
                raise ValueError(f"{connection.host} answers {response.status} to {path}") from None
        return connection, response


def _facts(event: dict[str, Any], finish: str) -> str:
    """One line about an answer, from its last event. `metrics` and `guarantee` may be absent: other servers lack them."""
    metrics = event.get("metrics") or {}
    parts = [f"{event['usage']['completion_tokens']} tokens"]
    if speed := metrics.get("tokens_per_second"):
        parts.append(f"{speed:.1f} tokens/s")
    if spec := metrics.get("speculative_decoding"):
        accepted, drafted = spec["num_accepted_draft_tokens"], spec["num_draft_tokens"]
        parts.append(f"acceptance length {spec['mean_acceptance_length']:.2f}")
        parts.append(f"{accepted} of {drafted} draft tokens accepted")
    return ", ".join([*parts, finish, *([event["guarantee"]] if "guarantee" in event else [])])


def chat(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where a server listens.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, option("Model", "A model of the server; without it, the first.", "--model", "-m")
    ] = None,
    system: Annotated[str | None, option("Model", "The system message.")] = None,
    temperature: Annotated[float, option("Sampling", "0 is greedy.", "--temperature", "-t")] = 0.7,
    max_tokens: Annotated[int, option("Sampling", "Tokens of an answer, at most.", "--max-tokens", "-n")] = 512,
    seed: Annotated[int | None, option("Sampling", "Without it, a seed is drawn.")] = None,
    api_key: ApiKey = None,
    debug: Debug = False,
) -> None:
    """Chat with a server in the terminal. Each line is a message; ctrl-D ends. The title shows the accepted draft tokens."""
    with readable(debug):
        talk = Talk(url, model, api_key, temperature=temperature, max_tokens=max_tokens, seed=seed)
        talk.run(system, secrets.randbits(32) if seed is None else seed, sys.stdin, os.isatty(0))
