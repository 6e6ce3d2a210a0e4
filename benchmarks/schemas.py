"""Speed under a JSON schema: `python -m benchmarks.schemas MODEL`. Tokens a second under a schema over those of free text.

A server answers each question twice in turns, freely and under a schema, with the same number of tokens at most. The ratio is of
whole requests, each schema's first request left out: it is shown by itself, because it compiles. `--beside CHECKOUT` starts a
second server from another checkout of this repository, and asks both in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.serve import ROOT, own_server
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


def ask(url: str, subject: str, schema: dict[str, Any] | None, length: int) -> tuple[float, int, str]:
    """Seconds, output tokens and text of one answer."""
    text = f"Describe {subject} as a JSON object. Its JSON schema: {json.dumps(schema or SCHEMAS[0])}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": length}
    if schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    begin = time.perf_counter()
    answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    return time.perf_counter() - begin, answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--beside", type=Path, help="another checkout, to compare with")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        more = "--method", args.method, "--log-file", "/dev/null"
        urls = {
            str(root): stack.enter_context(own_server(args.model, *more, checkout=root))[0]
            for root in [ROOT, *([args.beside.resolve()] if args.beside else [])]
        }
        free: dict[str, list[float]] = {root: [] for root in urls}
        kept: dict[str, list[float]] = {root: [] for root in urls}
        valid = dict.fromkeys(urls, 0)
        for root, url in urls.items():
            ask(url, "a chair", None, args.max_tokens)
            first = [ask(url, "a chair", schema, args.max_tokens)[0] for schema in SCHEMAS]
            print(f"{root}: the first request of each schema took {', '.join(f'{s:.1f}' for s in first)} s", flush=True)
        for subject in SUBJECTS:
            for schema in SCHEMAS:
                for root, url in urls.items():
                    for asked, rows in ((None, free), (schema, kept)):
                        seconds, tokens, text = ask(url, subject, asked, args.max_tokens)
                        rows[root].append(seconds / tokens)
                        if asked:
                            with contextlib.suppress(ValueError):
                                json.loads(text)
                                valid[root] += 1
        for root in urls:
            ratio = interval(np.array([free[root], kept[root]]).T)
            print(
                f"{root}: {1 / np.mean(free[root]):.1f} tokens/s free, {1 / np.mean(kept[root]):.1f} under a schema: "
                f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}); {valid[root]} of {len(kept[root])} whole JSON"
            )
        if args.beside:
            a, b = urls
            ratio = interval(np.array([kept[b], kept[a]]).T)
            print(
                f"under a schema, this checkout over the other: {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
            )


if __name__ == "__main__":
    main()
