"""Tool calls and thoughts, read from the text as it grows: the formats of several model families, and the grammar of a call.

A thought is what a model writes between marks before its answer. A call is returned whole, when its JSON is complete and its
name is that of an offered tool. Text that only looks like a call stays text: invalid JSON, another name, a text that ended too
soon.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from outrider.core.params import BadParameter


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes calls.

    A forced answer is `before`, then `begin` JSON `end` with `between` between two, then `after`.
    """

    opening: str  # the text before calls
    closing: str = ""  # the text after each call; it may be missing at the end of a text
    sign: str = ""  # what the chat template contains, if not the opening
    key: str = "arguments"  # both names of them are read
    bare: bool = False  # calls may also be JSON without the opening
    before: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    after: str = ""


# by vLLM's names
FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", begin="<tool_call>\n", end="\n</tool_call>", between="\n"),
    "llama3_json": ToolFormat(
        "<|python_tag|>", sign='"parameters": dictionary of argument', key="parameters", bare=True, between="; "
    ),
    "mistral": ToolFormat("[TOOL_CALLS]", before="[TOOL_CALLS][", between=", ", after="]"),
}
PLAIN = ToolFormat("", bare=True, between="\n")  # a forced call of a model whose format is not known
PARSERS = ("auto", "none", *FORMATS)
THOUGHT = "<think>", "</think>"
THOUGHT_TOKENS = 64  # of a prompt's end that may show that the template began a thought

# Mistral's newer NAME{...}
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = re.compile(r"\A[\s;,]+")


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number, strict=False)  # models write line breaks in strings


@lru_cache(16)
def chosen(parser: str, template: str) -> ToolFormat | None:
    """The format of a `--tool-call-parser`. `auto` looks into the chat template. None if the format is not known."""
    if parser != "auto":
        return FORMATS.get(parser)
    if "<function=" in template:  # calls in XML, which no format here reads
        return None
    return next((f for f in FORMATS.values() if f.opening in template or (f.sign and f.sign in template)), None)


@dataclass(frozen=True)
class ToolCall:
    """One call. arguments: JSON. id: nine characters, because Mistral's templates require that."""

    name: str
    arguments: str
    id: str

    @property
    def shape(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def literal(text: str) -> str:
    """A text in the language of `Grammar.lark`, and in JSON."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class ToolOffer:
    """The tools of a request."""

    tools: Mapping[str, Any]  # the JSON schema of the arguments, by name
    forced: bool = False  # the answer must be a call
    only: str | None = None  # the one tool that may be called
    many: bool = True  # several calls are allowed

    @property
    def names(self) -> list[str]:
        return [self.only] if self.only else list(self.tools)

    def grammar(self, form: ToolFormat) -> str:
        """An answer that has only calls, as `Grammar.lark`. @s0, @s1, ...: the schemas of arguments, in the order of `names`."""
        begins = [literal(f'{form.begin}{{"name": {literal(name)}, "{form.key}": ') for name in self.names]
        calls = [f"{begin} @s{n} {literal('}' + form.end)}" for n, begin in enumerate(begins)]
        more = f" ({literal(form.between)} call)*" if self.many and self.only is None else ""
        around = [literal(text) if text else "" for text in (form.before, form.after)]
        return f"start: {around[0]} call{more} {around[1]}\ncall: {' | '.join(calls)}"


@dataclass(frozen=True)
class ToolForm:
    """What a protocol asks of a tool."""

    shown: str = '{"type": "function", "function": {"name": ..., "parameters": a JSON schema}}'  # its form, in messages
    schema: str = "function.parameters"  # where the schema is
    names: str = r"[\w.-]{1,64}"  # what a name may be
    said: str = "a name has up to 64 letters, digits, _, - and ."


OPENAI = ToolForm()


def with_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body with `tools` and `tool_choice` as chat completions have them. It may have those of the other protocols."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if isinstance(tools, list):
        tools = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            if isinstance(tool, dict) and tool.get("type") == "function" and "name" in tool and "function" not in tool
            else tool
            for tool in tools
        ]
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("auto", "none", "required", "any"):
        choice = "required" if kind == "any" else kind
    elif isinstance(choice, dict) and kind in ("function", "tool") and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(choice, dict) and kind == "allowed_tools":
        choice = choice["allowed_tools"] if isinstance(choice.get("allowed_tools"), dict) else choice
        listed = choice.get("tools")
        allowed = [function_of(tool).get("name") for tool in listed] if isinstance(listed, list) else []
        if isinstance(tools, list):
            tools = [tool for tool in tools if function_of(tool).get("name") in allowed] or None
        choice = choice.get("mode", choice)
    return {**body, "tools": tools, "tool_choice": choice}


def function_of(tool: Any) -> dict[str, Any]:
    """The function of a tool, which may be flat; empty if it has none."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def check_own(tools: Sequence[dict[str, Any]] | None, kind: str, form: ToolForm) -> None:
    """Raise BadParameter for a tool that the server would have to run. kind: the type of those that clients run."""
    for number, tool in enumerate(tools or ()):
        if (type_ := tool.get("type", kind)) != kind:
            raise BadParameter(
                f"tools.{number} has type {str(type_)[:40]!r}; this server runs no tools of its own, and offers those of the "
                f"client: {form.shown}",
                "tools",
            )


def offered(tools: Sequence[Any] | None, choice: Any, many: bool, form: ToolForm = OPENAI) -> ToolOffer | None:
    """The offer of a request: its `tools`, `tool_choice`, `parallel_tool_calls`. form: of a tool in its protocol.

    None: no calls. Raises BadParameter.
    """
    schemas: dict[str, Any] = {}
    for number, tool in enumerate(tools or ()):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not re.fullmatch(form.names, name):
            got = "" if name is None else f", got {name!r:.80}"
            raise BadParameter(f"tools.{number} is {form.shown}; {form.said}{got}", "tools")
        for field, kind in (("strict", bool), ("description", str)):
            if not isinstance(function.get(field), kind | None):
                raise BadParameter(f"tools.{number}: {field} is a {kind.__name__}", "tools")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise BadParameter(f"tools.{number}.{form.schema} is the JSON schema of an object", "tools")
        schemas[name] = parameters
    if choice in (None, "auto", "none"):
        return ToolOffer(schemas, many=many) if schemas and choice != "none" else None
    if not schemas:
        raise BadParameter("tool_choice asks for a call, and the request has no tools", "tool_choice")
    if choice == "required":
        return ToolOffer(schemas, True, many=many)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise BadParameter(
            'tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if not isinstance(name, str) or name not in schemas:
        raise BadParameter(f"tool_choice names {str(name)[:80]!r}, which is not one of the tools", "tool_choice")
    return ToolOffer(schemas, True, name, False)


class ToolCallReader:
    """Splits the text of one answer into content and calls. How the text is cut into pieces changes nothing."""

    def __init__(self, form: ToolFormat, names: Sequence[str], special: Sequence[str] = (), many: bool = True) -> None:
        """names: of the offered tools. special: texts of special tokens, which are not content. many: without it only the first
        call counts."""
        self.form, self.names, self.called, self._many = form, frozenset(names), 0, many
        self._special = [s for s in special if s and s != form.opening]
        self._marks = [*self._special, *([form.opening] if form.opening else [])]
        self._text = ""  # not returned yet
        self._inside, self._fresh = False, True  # after an opening; only space so far

    def parts(self, text: str, last: bool = False) -> list[str | ToolCall]:
        """Add text. Returns the content and the calls that are certain now, in their order. last: there is no more text."""
        self._text += text
        parts = list[str | ToolCall]()
        while self._text:
            if not self._inside:
                parts.append(self._content(last))
                if not self._inside:
                    break
            elif (result := self._calls(last)) is None:
                break
            else:
                end, new = result
                if new is None:
                    parts.append(self._clean(self._text[:end]))
                    self._fresh = False
                else:
                    new = new if self._many else new[: 1 - self.called]
                    parts += new
                    self.called += len(new)
                self._text = self._text[end:]
                self._inside = new is not None and self.form.bare
        runs = ((kind, list(run)) for kind, run in groupby(parts, type))
        joined = [part for kind, run in runs for part in (["".join(map(str, run))] if kind is str else run)]
        return [part for part in joined if part]

    def _content(self, last: bool) -> str:
        """The content up to an opening, or up to a text that may become one."""
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
            sure = self._ended(text[: len(text) - max((begun(text, mark) for mark in self._marks), default=0)])
            self._text = text[len(sure) :]
            sure = self._clean(sure)
        self._fresh = self._fresh and not sure
        return sure

    def _calls(self, last: bool) -> tuple[int, list[ToolCall] | None] | None:
        """Read calls from an opening on: (where they end, the calls or None for text). None alone: wait for more."""
        text, closing = self._text, self.form.closing
        opened = bool(self.form.opening) and text.startswith(self.form.opening)
        left = text[len(self.form.opening) :].lstrip() if opened else _BETWEEN.sub("", text)
        start = len(text) - len(left)
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
            left = text[end:].lstrip()
            if left.startswith(closing):
                end = len(text) - len(left) + len(closing)
            elif not last and closing.startswith(left):
                return None
        return end, self._valid({"name": named[1], "arguments": value} if named else value)

    def _valid(self, value: Any) -> list[ToolCall] | None:
        """The calls in a JSON value; None if it is not a call of an offered tool."""
        items = value if isinstance(value, list) else [value]
        calls = list[ToolCall]()
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str) or item["name"] not in self.names:
                return None
            arguments = item.get("arguments", item.get("parameters"))
            arguments = {} if arguments is None else arguments
            try:
                arguments = _JSON.decode(arguments) if isinstance(arguments, str) else arguments
                written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            except (ValueError, RecursionError):  # also for a number too large for a float
                return None
            if not isinstance(arguments, dict):
                return None
            calls.append(ToolCall(item["name"], written, secrets.token_hex(5)[:9]))
        return calls or None

    def _ended(self, text: str) -> str:
        """The text without spaces and special tokens at its end."""
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


class ThinkingReader:
    """Splits the text of one answer into thought and content. How the text is cut into pieces changes nothing."""

    def __init__(self, prompt: str = "") -> None:
        """prompt: its end, or all of it. Some templates begin the thought themselves."""
        self._inside, self._text = prompt.rstrip().endswith(THOUGHT[0]), ""
        self._over, self._trim = False, self._inside  # no thought can follow; space before the next text goes

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """Add text. Returns the thought and the content that are certain now. last: there is no more text."""
        self._text += text
        thought = content = ""
        if not self._inside and not self._over:
            start = self._text.lstrip()
            if start.startswith(THOUGHT[0]):
                self._text, self._inside, self._trim = start[len(THOUGHT[0]) :], True, True
            elif last or not THOUGHT[0].startswith(start):
                self._over = True
        if self._inside:
            self._trimmed()
            thought, closed, rest = self._text.partition(THOUGHT[1])
            if closed:
                self._text, self._inside, self._over, self._trim = rest, False, True, True
            else:
                sure = len(thought if last else thought[: len(thought) - begun(thought, THOUGHT[1])].rstrip())
                thought, self._text = thought[:sure], thought[sure:]
            thought = thought.rstrip()
        if self._over:
            self._trimmed()
            content, self._text = self._text, ""
        return thought, content

    def _trimmed(self) -> None:
        """Leave out the space at the beginning of a part."""
        if self._trim:
            self._text = self._text.lstrip()
            self._trim = not self._text


def thinks(template: Any) -> bool:
    """Whether a chat template is one of a model that thinks."""
    return THOUGHT[1] in str(template or "")


def begun(text: str, mark: str) -> int:
    """The number of characters at the end of a text that may begin a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
