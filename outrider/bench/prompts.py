"""What a measurement asks: a user's own prompts from a file, or a small set that comes along."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.stopping import content_text
from outrider.core.suggest import did_you_mean

FOLDER = Path(__file__).resolve().parent.parent / "data" / "prompts"
SETS = {
    "code": "12 beginnings of Python, six of them from HumanEval",
    "chat": "16 questions of Spec-Bench, for a chat model",
}
RIGHT = '{"prompt": "def area(r):"}  or  {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
_BATCH = {"custom_id", "method", "url", "body"}
_FIELDS = {"prompt", "messages", "id", "category", "max_tokens", "prediction"}


@dataclass(frozen=True)
class Ask:
    """One prompt. prompt: a text, or chat messages. max_tokens: None for what all get. prediction: a text that the answer
    will mostly repeat."""

    id: str
    category: str
    prompt: str | list[dict[str, Any]]
    max_tokens: int | None = None
    prediction: str | None = None

    @property
    def text(self) -> str:
        """What a reader wants to see: the text, or the last message."""
        return self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1]["content"])


def read(source: str, count: int | None = None) -> tuple[list[Ask], list[str]]:
    """The prompts of a file or a named set, the first `count` of them, and notes on what of the file was not used.

    Files are UTF-8. `.txt`: a prompt per line, empty lines are none. Else JSON lines: {"prompt": ...} or {"messages": [...]},
    with "id", "category", "max_tokens" and "prediction" where wanted; or OpenAI's batch format, the same in "body", the id in
    "custom_id". Raises FileNotFoundError, and ValueError with file, line and reason.
    """
    path = Path(source)
    if source in SETS and not path.exists():
        path = FOLDER / f"{source}.jsonl"
    elif not path.is_file():
        raise FileNotFoundError(
            f"there is no file {source}{did_you_mean(source, SETS)}; prompts are a .jsonl or .txt file, or a set: "
            + "; ".join(f"{name} ({what})" for name, what in SETS.items())
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{source}, line {number}: this is not UTF-8 text ({error.reason})") from None
    asks, unused = list[Ask](), dict[str, int]()
    known: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            ask = Ask(str(number), "all", line.rstrip("\r")) if path.suffix == ".txt" else _ask(line, number, unused)
            ask.text.encode()
            if ask.id in known:
                raise ValueError(f"the id {ask.id!r} is that of line {known[ask.id]}, too")
        except UnicodeEncodeError:
            raise ValueError(f"{source}, line {number}: the prompt holds half of a surrogate pair") from None
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}; a right line is {RIGHT}") from None
        known[ask.id] = number
        asks.append(ask)
        if len(asks) == count:
            break
    if not asks:
        raise ValueError(f"{source} holds no prompts; a right line is {RIGHT}")
    notes = [f"{name!r} in {n} line{'s' * (n > 1)} of {source} is not used" for name, n in unused.items()]
    return asks, notes


def _ask(line: str, number: int, unused: dict[str, int]) -> Ask:
    """One JSON line. Counts the fields that are not used; raises ValueError with the reason alone."""
    try:
        given = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(given, dict):
        raise ValueError(f"a line is an object, this is {_kind(given)}")
    body, head = given, given
    if isinstance(given.get("body"), dict):
        body = given["body"]
        body = {**body, "max_tokens": body.get("max_completion_tokens", body.get("max_tokens"))}
        head = {"id": given.get("custom_id"), "category": given.get("category")}
        unused_now = set(given) - _BATCH - {"category"} | set(body) - _FIELDS - {"max_completion_tokens", "model"}
    else:
        unused_now = set(given) - _FIELDS
    for name in sorted(unused_now):
        unused[name] = unused.get(name, 0) + 1
    limit = body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"max_tokens is a whole number from 1 on, got {limit!r}")
    names = [
        str(default if head.get(key) is None else head[key]) for key, default in (("id", number), ("category", "all"))
    ]
    return Ask(names[0], names[1], _prompt(body), limit, _prediction(body.get("prediction")))


def _prompt(body: dict[str, Any]) -> str | list[dict[str, Any]]:
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError(
            "it has both prompt and messages" if prompt is not None else "it has no prompt and no messages"
        )
    if messages is None:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"the prompt is a text that is not empty, got {_kind(prompt)}")
        return prompt
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is a list that is not empty, got {_kind(messages)}")
    return list(_messages(messages))


def _messages(messages: list[Any]) -> Iterator[dict[str, Any]]:
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {at} has no role")
        yield {**message, "content": _text(message.get("content"), f"the content of message {at}")}


def _prediction(given: Any) -> str | None:
    """A text, or OpenAI's {"type": "content", "content": ...}."""
    if given is None:
        return None
    return _text(given.get("content") if isinstance(given, dict) else given, "the prediction")


def _text(content: Any, what: str) -> str:
    """A string, or the text parts of a list put together."""
    text = content_text(content)
    if text is None:
        raise ValueError(f"{what} is text, got {_kind(content)}")
    return text


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "an empty text" if value == "" else "a text"}.get(
        type(value), json.dumps(value)
    )
