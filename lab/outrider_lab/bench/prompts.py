"""The prompts of a measurement: from a user's file, or from a small set that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outrider
from outrider.core.suggest import did_you_mean

FOLDER = Path(outrider.__file__).resolve().parent / "data" / "prompts"
SETS = {
    "code": "12 beginnings of Python code, six of them from HumanEval",
    "chat": "16 questions of Spec-Bench, for a chat model",
}
EXAMPLE = '{"prompt": "def area(r):"}  or  {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
_BATCH_FIELDS = {"custom_id", "method", "url", "body"}
_FIELDS = {"prompt", "messages", "id", "category", "max_tokens", "prediction"}


@dataclass(frozen=True)
class Prompt:
    """One prompt of a measurement."""

    id: str
    category: str
    content: str | list[dict[str, Any]]  # a text, or chat messages
    max_tokens: int | None = None  # None for that of the measurement
    prediction: str | None = None  # a text that the answer will mostly repeat
    temperature: float | None = None  # None for that of the measurement

    @property
    def text(self) -> str:
        """What a report shows: the text, or the last message."""
        return self.content if isinstance(self.content, str) else str(self.content[-1]["content"])


def read(source: str, count: int | None = None) -> tuple[list[Prompt], list[str]]:
    """The first `count` prompts of a file or a named set, and notes about fields of the file that are not used.

    Files are UTF-8. `.txt`: one prompt a line, empty lines are skipped. Any other file: JSON lines with "prompt" or "messages",
    and optionally "id", "category", "max_tokens", "prediction". OpenAI's batch format is also read: the same fields in
    "body", the id in "custom_id". Raises FileNotFoundError, or ValueError with file, line and reason.
    """
    path = Path(source)
    if source in SETS and not path.exists():
        path = FOLDER / f"{source}.jsonl"
    elif "://" in source:
        raise ValueError(f"{source} is a server, and prompts come first: outrider bench PROMPTS --base-url {source}")
    elif not path.is_file():
        raise FileNotFoundError(
            f"there is no file {source}{did_you_mean(source, SETS)}; give a .jsonl or .txt file of prompts, or a set: "
            + "; ".join(f"{name} ({what})" for name, what in SETS.items())
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{source}, line {number}: this is not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from None
    prompts, unused = list[Prompt](), dict[str, int]()
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = path.suffix == ".txt"
            prompt = Prompt(str(number), "all", line.rstrip("\r")) if text else _parse(line, number, unused)
            prompt.text.encode()
            if prompt.id in line_of:
                raise ValueError(f"line {line_of[prompt.id]} already has the id {prompt.id!r}")
        except UnicodeEncodeError:
            raise ValueError(f"{source}, line {number}: the prompt holds half of a surrogate pair") from None
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}; a correct line is {EXAMPLE}") from None
        line_of[prompt.id] = number
        prompts.append(prompt)
        if len(prompts) == count:
            break
    if not prompts:
        raise ValueError(f"{source} holds no prompts; a correct line is {EXAMPLE}")
    notes = [f"{name!r} in {n} line{'s' * (n > 1)} of {source} is not used" for name, n in unused.items()]
    return prompts, notes


def _parse(line: str, number: int, unused: dict[str, int]) -> Prompt:
    """One JSON line. Counts the fields that are not used. Raises ValueError with the reason only."""
    try:
        parsed = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"a line must be an object, got {_kind(parsed)}")
    body, head = parsed, parsed
    if isinstance(parsed.get("body"), dict):
        body = parsed["body"]
        body = {**body, "max_tokens": body.get("max_completion_tokens", body.get("max_tokens"))}
        head = {"id": parsed.get("custom_id"), "category": parsed.get("category")}
        unused_now = set(parsed) - _BATCH_FIELDS - {"category"}
        unused_now |= set(body) - _FIELDS - {"max_completion_tokens", "model"}
    else:
        unused_now = set(parsed) - _FIELDS
    for name in sorted(unused_now):
        unused[name] = unused.get(name, 0) + 1
    limit = body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"max_tokens must be an integer of at least 1, got {limit!r}")
    names = [
        str(default if head.get(key) is None else head[key]) for key, default in (("id", number), ("category", "all"))
    ]
    return Prompt(names[0], names[1], _content(body), limit, _prediction(body.get("prediction")))


def _content(body: dict[str, Any]) -> str | list[dict[str, Any]]:
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError(
            "it has both prompt and messages" if prompt is not None else "it has no prompt and no messages"
        )
    if messages is None:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"the prompt must be a text that is not empty, got {_kind(prompt)}")
        return prompt
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list that is not empty, got {_kind(messages)}")
    return list(_messages(messages))


def _messages(messages: list[Any]) -> Iterator[dict[str, Any]]:
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {at} has no role")
        yield {**message, "content": _text(message.get("content"), f"the content of message {at}")}


def _prediction(value: Any) -> str | None:
    """A text, or OpenAI's {"type": "content", "content": ...}."""
    if value is None:
        return None
    return _text(value.get("content") if isinstance(value, dict) else value, "the prediction")


def _text(content: Any, what: str) -> str:
    """A string, or the joined text parts of a list."""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{what} must be text, got {_kind(content)}")
    return "".join(texts)


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "an empty text" if value == "" else "a text"}.get(
        type(value), json.dumps(value)
    )
