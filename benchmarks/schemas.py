"""Speed under a JSON schema: `python -m benchmarks.schemas MODEL`. Tokens a second under a schema over those of free text.

A server answers each question twice in turns, freely and under a schema, with the same number of tokens at most. The ratio is of
whole requests, each schema's first request left out: it is shown by itself, because it compiles. `--beside CHECKOUT` starts a
second server from another checkout of this repository, and asks both in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.intervals import interval

TEXT, COUNT = {"type": "string"}, {"type": "integer"}


def record(required: int | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties][:required],
        "additionalProperties": False,
    }


SCHEMAS = [
    record(name=TEXT, year=COUNT, about=TEXT, tags={"type": "array", "items": TEXT, "maxItems": 5}),
    record(title=TEXT, level={"enum": ["easy", "middle", "hard"]}, steps={"type": "array", "items": TEXT}),
    record(people={"type": "array", "items": record(first=TEXT, last=TEXT, age=COUNT, active={"type": "boolean"})}),
    record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, reason=TEXT),
]
SUBJECTS = ["the city of Oslo", "a bicycle", "Python generators", "the French Revolution", "a cup of green tea"]


def rest(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, head), timeout=600
    ) as reply:
        return json.load(reply) if body is not None else {}


@contextlib.contextmanager
def server(checkout: Path, model: str, method: str) -> Iterator[int]:
    """A server of a checkout. Yields its port.

    Args:
        checkout: The root of the repository's checkout.
        model: A model, as `outrider serve` takes it.
        method: A value of `--method`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [sys.executable, "-m", "outrider", "serve", model, "--method", method, "--port", str(port)]
    process = subprocess.Popen(
        line,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            with contextlib.suppress(OSError):
                rest(port, "/health")
                break
            if process.poll() is not None:
                sys.exit(f"the server of {checkout} ended with {process.returncode}: {' '.join(line)}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def ask(port: int, subject: str, schema: dict[str, Any] | None, length: int) -> tuple[float, int, str]:
    """Seconds, output tokens and text of one answer."""
    text = f"Describe {subject} as a JSON object. Its JSON schema: {json.dumps(schema or SCHEMAS[0])}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": length}
    if schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    begin = time.perf_counter()
    answer = rest(port, "/v1/chat/completions", body)
    return time.perf_counter() - begin, answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--beside", type=Path, help="another checkout, to compare with")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    here = Path(__file__).resolve().parent.parent
    with contextlib.ExitStack() as stack:
        ports = {
            str(root): stack.enter_context(server(root, args.model, args.method))
            for root in [here, *([args.beside.resolve()] if args.beside else [])]
        }
        free: dict[str, list[float]] = {root: [] for root in ports}
        kept: dict[str, list[float]] = {root: [] for root in ports}
        valid = dict.fromkeys(ports, 0)
        for root, port in ports.items():
            ask(port, "a chair", None, args.max_tokens)
            first = [ask(port, "a chair", schema, args.max_tokens)[0] for schema in SCHEMAS]
            print(f"{root}: the first request of each schema took {', '.join(f'{s:.1f}' for s in first)} s", flush=True)
        for subject in SUBJECTS:
            for schema in SCHEMAS:
                for root, port in ports.items():
                    for schema_or_none, rows in ((None, free), (schema, kept)):
                        seconds, tokens, text = ask(port, subject, schema_or_none, args.max_tokens)
                        rows[root].append(seconds / tokens)
                        if schema_or_none:
                            with contextlib.suppress(ValueError):
                                json.loads(text)
                                valid[root] += 1
        for root in ports:
            ratio = interval(np.array([free[root], kept[root]]).T)
            print(
                f"{root}: {1 / np.mean(free[root]):.1f} tokens/s free, {1 / np.mean(kept[root]):.1f} under a schema: "
                f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}); {valid[root]} of {len(kept[root])} whole JSON"
            )
        if args.beside:
            a, b = ports
            ratio = interval(np.array([kept[b], kept[a]]).T)
            print(
                f"under a schema, this checkout over the other: {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
            )


if __name__ == "__main__":
    main()
