"""Speed under a JSON schema: `python -m benchmarks.schemas MODEL`. Tokens a second under a schema over those of free text.

A server answers each question twice in turns, freely and under a schema, with the same number of tokens at most. The ratio is of
whole requests, each schema's first request left out: it is shown by itself, because it compiles. `--beside CHECKOUT` starts a
second server from another checkout of this repository, and asks both in turns.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from benchmarks import ROOT
from benchmarks.ruler import parser, shown, speedup, turns
from benchmarks.serve import own_server

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
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("--beside", type=Path, help="another checkout, to compare with")
    options.add_argument("--method", default="auto")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--subjects", type=int, default=len(SUBJECTS), help="questions for each schema")
    args = options.parse_args()
    with contextlib.ExitStack() as stack:
        more = "--method", args.method, "--log-file", "/dev/null"
        urls = {
            str(root): stack.enter_context(own_server(args.model, *more, checkout=root))[0]
            for root in [ROOT, *([args.beside.resolve()] if args.beside else [])]
        }
        seconds: dict[tuple[str, bool], list[float]] = {(root, form): [] for root in urls for form in (False, True)}
        valid = dict.fromkeys(urls, 0)
        for root, url in urls.items():
            ask(url, "a chair", None, args.max_tokens)
            first = [ask(url, "a chair", schema, args.max_tokens)[0] for schema in SCHEMAS]
            print(f"{root}: the first request of each schema took {', '.join(f'{s:.1f}' for s in first)} s", flush=True)
        questions = [(subject, schema) for subject in SUBJECTS[: args.subjects] for schema in SCHEMAS]
        for number, (root, form) in turns([*seconds], len(questions), warm=0):
            subject, schema = questions[number]
            took, tokens, text = ask(urls[root], subject, schema if form else None, args.max_tokens)
            seconds[root, form].append(took / tokens)
            with contextlib.suppress(ValueError):
                json.loads(text)
                valid[root] += form
    for root in urls:
        free, formed = seconds[root, False], seconds[root, True]
        print(
            f"{root}: {1 / fmean(free):.1f} tokens/s free, {1 / fmean(formed):.1f} under a schema: "
            f"{shown(speedup(free, formed))}; {valid[root]} of {len(formed)} whole JSON"
        )
    if args.beside:
        this, other = (seconds[root, True] for root in urls)
        print(f"under a schema, this checkout over the other: {shown(speedup(other, this))}")


if __name__ == "__main__":
    main()
