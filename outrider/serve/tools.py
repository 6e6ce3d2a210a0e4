"""Calls of tools: read from the text as it grows, in the ways that families of models write them, and the grammar that makes
sure of one.

A call is handed out whole, once its JSON is complete and names a tool that was offered. What looks like a call and is none
(broken JSON, another name, a text that ended too soon) is handed out as text: it is what the model said.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Format:
    """How a family writes calls. opening: what begins them, unless the text may be `bare` JSON. closing: what ends one; may be
    missing at the end of a text. sign: what its chat templates hold, if not the opening. key: its word for arguments (both
    words are read). The rest is what a forced answer is made of: `before` (`begin` JSON `end`, `between` each two) `after`."""

    opening: str
    closing: str = ""
    sign: str = ""
    key: str = "arguments"
    bare: bool = False
    before: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    after: str = ""


FORMATS = {  # by vLLM's names
    "hermes": Format("<tool_call>", "</tool_call>", begin="<tool_call>\n", end="\n</tool_call>", between="\n"),
    "llama3_json": Format(
        "<|python_tag|>", sign='"parameters": dictionary of argument', key="parameters", bare=True, between="; "
    ),
    "mistral": Format("[TOOL_CALLS]", before="[TOOL_CALLS][", between=", ", after="]"),
}
PLAIN = Format("", bare=True, between="\n")  # a forced call where nothing is known of the model
PARSERS = ("auto", "none", *FORMATS)

_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\])?\s*(?=\{)")  # Mistral's newer NAME{...}
_BETWEEN = re.compile(r"[\s;,]*")
_SPACE = re.compile(r"\s*")


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def chosen(parser: str, template: Any) -> Format | None:
    """The format of a `--tool-call-parser`: by what the chat template holds for `auto`; None where nothing is known."""
    if parser != "auto":
        return FORMATS.get(parser)
    held = str(template or "")
    if "<function=" in held:  # calls in XML
        return None
    return next((f for f in FORMATS.values() if f.opening in held or (f.sign and f.sign in held)), None)


@dataclass(frozen=True)
class Call:
    """One call. arguments: JSON. id: nine characters, which is what Mistral's templates insist on."""

    name: str
    arguments: str
    id: str

    @property
    def shape(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Offer:
    """What a request says of tools. tools: schema of the arguments by name. forced: the answer must be a call; of one tool if
    `only` is its name. many: it may be several."""

    tools: Mapping[str, Any]
    forced: bool = False
    only: str | None = None
    many: bool = True

    @property
    def names(self) -> list[str]:
        return [self.only] if self.only else list(self.tools)

    def grammar(self, form: Format) -> dict[str, Any]:
        """The structural tag, as xgrammar has it, of an answer that is calls and nothing else."""
        tags = [
            {
                "type": "tag",
                "begin": f'{form.begin}{{"name": {json.dumps(name)}, "{form.key}": ',
                "content": {"type": "json_schema", "json_schema": self.tools[name]},
                "end": "}" + form.end,
            }
            for name in self.names
        ]
        calls = {"type": "tags_with_separator", "tags": tags, "separator": form.between, "at_least_one": True}
        calls["stop_after_first"] = not self.many or self.only is not None
        around = [{"type": "const_string", "value": x} for x in (form.before, form.after)]
        parts = [around[0]] * bool(form.before) + [calls] + [around[1]] * bool(form.after)
        return {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}


def offered(tools: Sequence[Any] | None, choice: Any, many: bool) -> Offer | None:
    """What a request's `tools`, `tool_choice` and `parallel_tool_calls` ask for; None for no calls. Raises ValueError."""
    given: dict[str, Any] = {}
    for number, tool in enumerate(tools or ()):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name):
            raise ValueError(
                f'tools.{number} is {{"type": "function", "function": {{"name": ..., "parameters": a JSON schema}}}}, '
                "the name of up to 64 letters, digits, _, - and ."
            )
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise ValueError(f"tools.{number}.function.parameters is the JSON schema of an object")
        given[name] = parameters
    if choice == "none" or (not given and choice in (None, "auto")):
        return None
    if choice in (None, "auto"):
        return Offer(given, many=many)
    if not given:
        raise ValueError("tool_choice asks for a call, and there are no tools")
    if choice == "required":
        return Offer(given, True, many=many)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise ValueError('tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')
    if not isinstance(name, str) or name not in given:
        raise ValueError(f"tool_choice names {str(name)[:80]!r}, which is none of the tools")
    return Offer(given, True, name, False)


class Reader:
    """Parts the text of one answer into content and calls, as it comes. How it is cut into pieces changes nothing."""

    def __init__(self, form: Format, names: Sequence[str], special: Sequence[str] = ()) -> None:
        """names: of the tools offered. special: texts of special tokens, which are no content."""
        self.form, self.names, self.called = form, frozenset(names), 0
        self._special = [s for s in special if s and s != form.opening]
        self._marks = [*self._special, *([form.opening] if form.opening else [])]
        self._text = ""  # not handed out yet
        self._inside, self._fresh = False, True  # behind an opening; nothing but space so far

    def feed(self, text: str, last: bool = False) -> tuple[str, list[Call]]:
        """More of the text, or the last of it; what is sure of it now."""
        self._text += text
        content, calls = "", list[Call]()
        while self._text:
            if not self._inside:
                content += self._content(last)
                if not self._inside:
                    break
            elif (found := self._calls(last)) is None:
                break
            else:
                end, new = found
                if new is None:
                    content += self._clean(self._text[:end])
                    self._fresh = False
                else:
                    calls += new
                    self.called += len(new)
                self._text = self._text[end:]
                self._inside = new is not None and self.form.bare
        return content, calls

    def _content(self, last: bool) -> str:
        """Text up to an opening, or up to what may become one."""
        text = self._text
        if self.form.bare and self._fresh:
            start = text.lstrip()
            if start.startswith("{"):
                self._text, self._inside = start, True
                return ""
            if not start and not last:
                return ""
        at = text.find(self.form.opening) if self.form.opening else -1
        if at >= 0:
            self._text, self._inside = text[at:], True
            sure = self._clean(text[:at]).rstrip()
        elif last:
            self._text = ""
            sure = self._clean(text)
            sure = "" if self.called and not sure.strip() else sure
        else:
            sure = self._ended(text[: len(text) - max((_begun(text, mark) for mark in self._marks), default=0)])
            self._text = text[len(sure) :]
            sure = self._clean(sure)
        self._fresh = self._fresh and not sure
        return sure

    def _calls(self, last: bool) -> tuple[int, list[Call] | None] | None:
        """(where they end, the calls or None for what is none) of the text from an opening on; None to wait for more."""
        text, closing = self._text, self.form.closing
        opened = bool(self.form.opening) and text.startswith(self.form.opening)
        start = _end(_SPACE, text, len(self.form.opening)) if opened else _end(_BETWEEN, text, 0)
        if not opened and start < len(text) and text[start] != "{":  # bare calls are over
            return 0, None
        named = None if closing or self.form.bare else _NAMED.match(text, start)
        try:
            value, end = _JSON.raw_decode(text, named.end() if named else start)
        except (ValueError, RecursionError) as error:
            endless = "Unterminated string" in str(error)
            at = text.find(closing, start if endless else getattr(error, "pos", start)) if closing else -1
            if at >= 0 and (last or not endless):
                return at + len(closing), None
            return (len(text), None if text[start:] or opened else []) if last else None
        if closing:
            after = _end(_SPACE, text, end)
            if text.startswith(closing, after):
                end = after + len(closing)
            elif not last and closing.startswith(text[after:]):
                return None
        return end, self._valid({"name": named[1], "arguments": value} if named else value)

    def _valid(self, value: Any) -> list[Call] | None:
        """The calls that a JSON value stands for, or None."""
        items = value if isinstance(value, list) else [value]
        calls = list[Call]()
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str) or item["name"] not in self.names:
                return None
            arguments = item.get("arguments", item.get("parameters", {}))
            if isinstance(arguments, str):
                try:
                    arguments = _JSON.decode(arguments)
                except (ValueError, RecursionError):
                    return None
            if not isinstance(arguments, dict):
                return None
            try:
                written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            except ValueError:  # a number too large for a float
                return None
            calls.append(Call(item["name"], written, secrets.token_hex(5)[:9]))
        return calls or None

    def _ended(self, text: str) -> str:
        """A text without the space and the special tokens at its end."""
        while True:
            short = text.rstrip()
            for mark in self._special:
                short = short.removesuffix(mark)
            if short == text:
                return text
            text = short

    def _clean(self, text: str) -> str:
        for mark in self._special:
            text = text.replace(mark, "")
        return text


def spelled_out(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the arguments of earlier calls as objects, which is how chat templates write them."""

    def loaded(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return call
        try:
            arguments = _JSON.decode(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            return call
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        {**m, "tool_calls": [loaded(c) for c in m["tool_calls"]]} if isinstance(m.get("tool_calls"), list) else m
        for m in messages
    ]


def _begun(text: str, mark: str) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
