"""What the scripts for client libraries share: the reference answer, asked without any client library."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "code"
HELLO = [{"role": "user", "content": "sort a list"}]
OPTIONS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sky", "sea"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


def raw(path: str, **body: Any) -> dict[str, Any]:
    """The answer to a request, by the standard library."""
    data = json.dumps({"model": MODEL, **body}).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def text(prompt: str) -> str:
    return raw("/v1/completions", prompt=prompt, **OPTIONS)["choices"][0]["text"]


def said() -> str:
    return raw("/v1/chat/completions", messages=HELLO, **OPTIONS)["choices"][0]["message"]["content"]
