"""Servers of others, for a load to be put on: each started on a free port, with the body fields that make it do the same.

    llama.cpp              llama-server, plain
    llama.cpp:draft:5      with a draft model and at most so many guesses
    transformers           transformers serve
    transformers:batch     with its continuous batching

transformers serve needs packages that nothing else here does: `pip install 'transformers[serving]'`, or
`pip install --no-deps --target work/peers/serving accelerate psutil`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import PEERS
from benchmarks.peers.llama_cpp import converted, installed
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.side import free_port


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, what it calls its model, and what each request must say beside the usual. unknown: usual
    fields that it refuses."""

    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


@contextmanager
def started(
    name: str, target: Path, draft: Path | None, kind: str, clients: int, length: int, tokens: int
) -> Iterator[Endpoint]:
    """A peer by its name above. kind: GGUF type for llama.cpp, and by it the precision for transformers. length: tokens of
    prompt and text of one of so many clients. tokens: of each text, which must not end before."""
    who, _, how = name.partition(":")
    if who == "llama.cpp":
        if how and draft is None:
            raise ValueError(f"{name} needs a draft: --draft FOLDER")
        small = str(converted(draft, kind)) if how and draft else None
        longest = int(how.partition(":")[2] or 4)
        program, model = installed() / "build" / "bin" / "llama-server", str(converted(target, kind))
        with LlamaServer(program, model, small, longest=longest, slots=clients, length=length) as server:
            yield Endpoint(server.url, target.name, {"cache_prompt": False})
    elif who == "transformers":
        with _transformers(how, target, kind, tokens) as endpoint:
            yield endpoint
    else:
        raise ValueError(
            f"there is no peer {name!r}; there are llama.cpp, llama.cpp:draft:N, transformers, transformers:batch"
        )


@contextmanager
def _transformers(how: str, target: Path, kind: str, tokens: int) -> Iterator[Endpoint]:
    port = free_port()
    environment, url = dict(os.environ), f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(target), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32" if kind == "f32" else "bfloat16"]
    command += ["--continuous-batching"] * (how == "batch")
    environment["PYTHONPATH"] = os.pathsep.join([str(PEERS / "serving"), environment.get("PYTHONPATH", "")])
    endless = json.dumps({"min_new_tokens": tokens, "pad_token_id": 0, "do_sample": False})
    unknown = ("ignore_eos", "stream_options", "temperature", "seed")
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            _wait(url + "/health", process)
            yield Endpoint(url, str(target), {"generation_config": endless}, unknown)
        finally:
            process.terminate()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"transformers serve did not start (status {process.poll()})")
