"""The prompts of a certificate: from a file, or a small set that is installed."""

from __future__ import annotations

import json
from pathlib import Path

from outrider_certify.lines import read_lines

_FOLDER = Path(__file__).parent / "data"
SETS = ("code", "chat")
EXAMPLE = '{"prompt": "def area(r):"}  or  {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'


def read_prompts(source: str, most: int) -> list[str]:
    """The first prompts of a file, or of a set of `SETS`.

    A `.txt` file has one prompt a line. Any other file has lines of JSON with "prompt" or "messages", of which the last one
    counts; in OpenAI's batch format they are in "body". Raises FileNotFoundError, or ValueError with file, line and reason.
    """
    path = Path(source)
    if source in SETS and not path.is_file():  # a folder named code is no file of prompts
        path = _FOLDER / f"{source}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {source}; give a .jsonl or .txt file of prompts, or {', '.join(SETS)}"
        )
    return read_lines(path, str if path.suffix == ".txt" else _prompt, EXAMPLE, most)


def _prompt(line: str) -> str:
    parsed = json.loads(line)
    body = parsed.get("body", parsed)
    if "messages" in body:
        content = body["messages"][-1]["content"]
        prompt = content if isinstance(content, str) else "".join(part["text"] for part in content if "text" in part)
    else:
        prompt = body["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("the prompt must be a text that is not empty")
    return prompt
