"""From chat messages to the prompt of a model: one way for the library, the command line and every protocol of the server.

What a template can read is found by trials, once for each template. What it cannot show is refused, never left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names that clients give a thought
Message = dict[str, Any]
Check = Callable[[bytes], object]
# the field of a part that has its text, by the type of the part
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MARK = f"q{secrets.token_hex(6)}q"  # no text has it
_SHORT_IDS = re.compile(r"\|\s*length\s*(!=|<)\s*9\b")  # Mistral's templates take ids of nine characters
_THINKING = re.compile(r"""\.thinking\b|\[["']thinking["']\]""")

PLAIN = """\
{% if tools %}
# tools: {% for tool in tools %}{{ tool.function.name }}{{ ", " if not loop.last }}{% endfor +%}
{% endif %}
{% for message in messages %}
{% if message.role == "assistant" %}
{{ message.content }}
{% else %}
# {{ message.content | replace("\\n", "\\n# ") }}
{% endif %}
{% endfor %}
"""  # of a built-in model that has none


class LostMessage(ValueError):
    """A message of which the prompt has nothing."""


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continued: bool = False,
    check: Check = lambda _: None,
    **variables: Any,
) -> str:
    """The prompt of a chat, without the tokens that begin other prompts.

    Args:
        tokenizer: has a chat template.
        messages: as OpenAI's API has them.
        tools: that the prompt tells of, in OpenAI's form.
        continued: the answer goes on from the text of the last message.
        check: raises ValueError for JSON that is too large to be read.
        variables: of the template, `add_generation_prompt` among them.

    Raises ValueError for messages that are not valid, that the template refuses, or that it leaves out.
    """
    if not messages:
        raise ValueError("there are no messages; send at least one")
    tools = [_described(tool) for tool in tools or ()] or None
    chat = [_normal(message, f"messages.{number}") for number, message in enumerate(messages)]
    if continued and chat[-1].get("tool_calls"):
        raise ValueError(
            "the last message has tool_calls, after which no text goes on; leave out continue_final_message"
        )
    source = source_of(tokenizer, bool(tools), "documents" in variables)
    tokens = getattr(tokenizer, "special_tokens_map", None) or {}
    special = {k: v if isinstance(v, list) else str(v) for k, v in tokens.items() if v is not None}
    return _template(source).prompt(chat, tools, continued, check, special | variables)


def source_of(tokenizer: Any, tools: bool = False, documents: bool = False) -> str:
    """The text of the chat template for a chat with or without tools and documents. A tokenizer may have one for each."""
    templates = tokenizer.chat_template
    if not isinstance(templates, Mapping):
        return templates
    names = ["tool_use"] * tools + ["rag"] * documents + ["default", *templates]
    return next(templates[name] for name in names if name in templates)


def text_of(content: Any, where: str, kind: str = "text") -> str:
    """A string, or the joined texts of a list of text parts. kind: how errors call a part. Raises ValueError."""
    if isinstance(content, str):
        return content
    form = f'{{"type": "{kind}", "text": ...}}'
    if not isinstance(content, list):
        raise ValueError(f"{where} is a string or a list of {form}; this model reads text only")
    texts = list[str]()
    for number, part in enumerate(content):
        type_ = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get(_TEXTS.get(type_, "")) if isinstance(type_, str) else None
        if not isinstance(text, str):
            got = f", got type {type_!r:.40}" if type_ not in (None, kind) else ""
            raise ValueError(f"{where}.{number} is {form}{got}; this model reads text only")
        texts.append(text)
    return "".join(texts)


def check_role(role: Any, where: str) -> None:
    """Raise ValueError for what is no role of a message."""
    if role not in ROLES:
        raise ValueError(f"{where}.role is one of {', '.join(ROLES)}, got {role!r:.40}")


def set_chat_template(tokenizer: Any, model: str, source: str | None) -> str | None:
    """Give the tokenizer of a model this template, if there is one. Returns a note for the user, or None.

    A built-in model that has none gets a plain one, so that every chat client works: messages are comments, and answers
    are code. Raises ValueError for a model without a tokenizer, and for a text that is no template.
    """
    if source is not None:
        if tokenizer is None:
            raise ValueError(f"{model} has no tokenizer, so it cannot use a chat template; leave out --chat-template")
        check_template(source)
        tokenizer.chat_template = source
    elif tokenizer is not None and not tokenizer.chat_template and model.startswith("builtin:"):
        tokenizer.chat_template = PLAIN
        return "it has no chat template, so chat messages reach it as comments before code"
    return None


def check_template(source: str) -> None:
    """Raise ValueError for a text that is no chat template."""
    from jinja2 import TemplateSyntaxError

    try:
        ChatTemplate(source).rendered([{"role": "user", "content": "x"}])
    except TemplateSyntaxError as error:
        raise ValueError(f"this is no chat template: {error.message}, in line {error.lineno}") from error
    except Exception:  # it may refuse this chat, and take others
        return


class ChatTemplate:
    """One template, and what it reads.

    developer: it knows the role. lists: roles whose content it reads as a list of parts only. json_arguments: it reads the
    arguments of a call as JSON text only.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.developer = re.search(r"""["']developer["']""", source) is not None
        self.lists, self.json_arguments = frozenset[str](), False
        user, last = {"role": "user", "content": "x"}, {"content": _MARK}
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
        called = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for role, before, after in (
            ("user", [], []),
            ("system", [], [user]),
            ("assistant", [user], [user]),
            ("tool", called, []),
        ):
            chat = [*before, {"role": role, "tool_call_id": "000000000", **last}, *after]
            if not self._shows(chat):
                alone, self.lists = self.lists, self.lists | {role, *["developer"] * (role == "system")}
                self.lists = self.lists if self._shows(chat) else alone
        asked, text = self._trial([user, _with_arguments(called[1], lambda _: {_MARK: 1})]) or "", f'{{"{_MARK}": 1}}'
        if _MARK not in asked or f"'{_MARK}'" in asked:  # it raises, or writes an object as Python does
            self.json_arguments = self._shows([user, _with_arguments(called[1], lambda _: text)])

    def prompt(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        continued: bool,
        check: Check,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt of messages that are valid; see `chat_prompt`. Where the template refuses a chat, or would leave a message
        out, forms with the same texts are tried."""
        chat = self._readable(messages, check)
        # a text of blanks, and what stands beside calls, may go
        needed = {n for n, m in enumerate(chat) if m["content"].strip() and "tool_calls" not in m}
        marked = [{**m, "content": m["content"] + f"{_MARK}{n}x" * (n in needed)} for n, m in enumerate(chat)]
        first, left_out = None, False
        for form in (list if self.developer else _without_developer, _one_system, _without_thoughts, _system_to_user):
            if first is not None and form(chat) == chat:
                continue
            if form is _system_to_user and not left_out:
                break
            chat, marked = form(chat), form(marked)
            try:
                text = _tried(partial(self._until, chat, continued, tools, variables))
            except ValueError as error:
                first = first or error
                continue
            shown = self._trial(marked, tools, variables)
            seen = needed if shown is None else set(map(int, re.findall(_MARK + "([0-9]+)x", shown)))
            if needed <= seen:
                return text
            lost, left_out = min(needed - seen), left_out or first is None
            role, said = messages[lost]["role"], messages[lost]["content"]
            first = first or LostMessage(
                f"the model's chat template shows nothing of messages.{lost} ({role}: {said!r:.40}); send it in another role, "
                "such as user, or start the server with --chat-template FILE"
            )
        assert first is not None
        raise first

    def _until(
        self, chat: list[Message], continued: bool, tools: list[Message] | None, variables: Mapping[str, Any]
    ) -> str:
        """The whole prompt, or up to the end of the text that goes on."""
        if not continued:
            return self.rendered(chat, tools, variables)
        chat = [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + _MARK}]
        text, mark, _ = self.rendered(chat, tools, variables).rpartition(_MARK)
        if not mark:
            raise ValueError("the answer cannot go on from the last message, which the template leaves out")
        return text

    def _readable(self, messages: list[Message], check: Check) -> list[Message]:
        """The messages with the roles and the fields that the template knows."""
        chat = list[Message]()
        for message in _paired(messages, "tool_call_id" in self.source, _SHORT_IDS.search(self.source) is not None):
            message = _with_arguments(message, _as_json if self.json_arguments else partial(_loaded, check=check))
            if "tool_calls" in message and "tool_calls" not in self.source:  # as the model wrote them
                texts = [json.dumps(call["function"], ensure_ascii=False) for call in message.pop("tool_calls")]
                message["content"] = "\n".join([message["content"]] * bool(message["content"]) + texts)
            if "reasoning_content" in message and _THINKING.search(self.source):
                message["thinking"] = message["reasoning_content"]
            chat.append(message)
        return chat

    def rendered(
        self,
        chat: list[Message],
        tools: list[Message] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """What the template makes of messages as they are. Raises what it raises."""
        shaped = [
            {**m, "content": [{"type": "text", "text": m["content"]}]} if m["role"] in self.lists else m for m in chat
        ]
        return render(self.source, shaped, tools, variables)

    def _trial(self, *arguments: Any) -> str | None:
        """What the template makes of messages; None if it raises."""
        try:
            return self.rendered(*arguments)
        except Exception:  # a template is a program and fails in its own ways
            return None

    def _shows(self, *arguments: Any) -> bool:
        return _MARK in (self._trial(*arguments) or "")


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """What a template makes of messages as they are. Raises what it raises."""
    usual = {"documents": None, "add_generation_prompt": False, "bos_token": "", "eos_token": ""}
    return _program(source).render({**usual, **variables}, messages=messages, tools=tools)


@lru_cache(16)
def _program(source: str) -> Template:
    """A template in a sandbox, with the filters, functions and tags that transformers has for it."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class MarkedAnswer(Extension):
        """{% generation %}: marks the words of the assistant, for training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)  # jinja's own writes < as \u003c

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[MarkedAnswer, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made.from_string(source)


_template = lru_cache(16)(ChatTemplate)


def _tried(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:  # a template is a program and fails in its own ways
        raise ValueError(f"the model's chat template does not take these messages: {error!s:.500}") from error


def _normal(given: Mapping[str, Any], where: str) -> Message:
    """A message in one form: its content a string, and no field that is null. Raises ValueError."""
    role = given.get("role")
    check_role(role, where)
    message: Message = {name: value for name, value in given.items() if value is not None}
    if unread := next((name for name in ("audio", "images") if message.get(name)), None):
        raise ValueError(f"{where} has {unread}; this model reads text only")
    content, refusal = message.get("content"), message.pop("refusal", None)
    thoughts = [message.pop(name, None) for name in THOUGHTS]
    if isinstance(content, list) and role == "assistant":  # a thought may be a part
        parts = [p for p in content if isinstance(p, dict) and p.get("type") in ("thinking", "reasoning")]
        thoughts += ["".join(str(p.get("thinking") or p.get("text") or "") for p in parts)]
        content = [p for p in content if p not in parts]
    if content is None and role in ("user", "system", "developer"):
        raise ValueError(f"{where} has no content; send a text")
    message["content"] = text_of((refusal or "") if content is None else content, f"{where}.content")
    if thought := next((x for x in thoughts if isinstance(x, str) and x), None):
        message["reasoning_content"] = thought
    calls, older = message.pop("tool_calls", None) or [], message.pop("function_call", None)
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls is a list of calls")
    if calls := [*calls, *([{"function": older}] if older else [])]:
        message["tool_calls"] = [_normal_call(call, f"{where}.tool_calls.{n}") for n, call in enumerate(calls)]
    message["role"] = "tool" if role == "function" else role
    return message


def _normal_call(given: Any, where: str) -> Message:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'{where} is {{"type": "function", "function": {{"name": ..., "arguments": a JSON object as text}}}}'
        )
    named = {"id": given["id"]} if isinstance(given.get("id"), str) else {}
    return named | {"type": "function", "function": {"name": function["name"], "arguments": function.get("arguments")}}


def _described(tool: Mapping[str, Any]) -> Message:
    """A tool without the fields that are null."""
    out = {name: value for name, value in tool.items() if value is not None}
    if isinstance(function := out.get("function"), Mapping):
        out["function"] = {name: value for name, value in function.items() if value is not None}
    return out


def _paired(messages: Sequence[Message], ids: bool, short: bool) -> list[Message]:
    """Results with the names of their calls. ids: calls and results get an id. short: of nine letters and digits."""
    out, names, numbers, unanswered = list[Message](), dict[str, str](), count(), list[Message]()

    def shortened(name: str) -> str:
        fits = not short or re.fullmatch("[A-Za-z0-9]{9}", name)
        return name if fits else hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:9]

    for message in messages:
        entry = dict(message)
        if "tool_calls" in entry:
            entry["tool_calls"] = calls = [dict(call) for call in entry["tool_calls"]]
            for call in calls:
                if ids:
                    call["id"] = shortened(call.get("id", f"call{next(numbers):05}"))
                names[call.get("id", "")] = call["function"]["name"]
            unanswered += calls
        if entry["role"] == "tool":
            call_id, name = entry.get("tool_call_id"), entry.get("name")
            if isinstance(call_id, str):
                call_id = shortened(call_id)
                name = names.get(call_id)
                unanswered = [call for call in unanswered if call.get("id") != call_id]
            elif left := [c for c in unanswered if not isinstance(name, str) or c["function"]["name"] == name]:
                unanswered.remove(call := left[0])
                call_id, name = call.get("id"), call["function"]["name"]
            entry = ({"name": name} if name else {}) | entry | ({"tool_call_id": call_id} if ids and call_id else {})
        out.append(entry)
    return out


def _with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    """The message with the arguments of its calls in another form."""

    def changed(call: Message) -> Message:
        return {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}

    return message | ({"tool_calls": list(map(changed, message["tool_calls"]))} if "tool_calls" in message else {})


def _loaded(arguments: Any, check: Check) -> Any:
    """Arguments as an object, as most templates need them. What is no JSON stays."""
    if isinstance(arguments, str):
        try:
            check(arguments.encode())
            arguments = json.loads(arguments.strip() or "{}")
        except (ValueError, RecursionError):
            return arguments
    return {} if arguments is None else arguments


def _as_json(arguments: Any) -> str:
    """Arguments as JSON text."""
    return (arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)) or "{}"


def _joined(first: Message, *others: Message) -> Message:
    return {**first, "content": "\n\n".join(m["content"] for m in (first, *others) if m["content"])}


def _without_developer(chat: list[Message]) -> list[Message]:
    """`developer` is a newer name of `system`: all such messages are one, with the first system message if there is one."""
    out, head = list[Message](), -1  # the place of the first
    newer = False  # it came from the newer role, so a system message right behind it is of the same text
    for message in chat:
        developer = message["role"] == "developer"
        if head >= 0 and (developer or (newer and head == len(out) - 1 and message["role"] == "system")):
            out[head] = _joined(out[head], message)
            continue
        if head < 0 and message["role"] in ("system", "developer"):
            head, newer = len(out), developer
        out.append({**message, "role": "system"} if developer else message)
    return out


def _one_system(chat: list[Message]) -> list[Message]:
    """One system message, the first of all: many templates take no other."""
    system = [m for m in chat if m["role"] in ("system", "developer")]
    return [_joined(*system), *(m for m in chat if m["role"] not in ("system", "developer"))] if system else chat


def _without_thoughts(chat: list[Message]) -> list[Message]:
    """Templates leave out the thoughts of earlier turns, and some take none beside a text and calls."""
    return [{k: v for k, v in m.items() if k not in THOUGHTS} for m in chat]


def _system_to_user(chat: list[Message]) -> list[Message]:
    """The system text at the beginning of the first message of the user."""
    place = next((n for n, m in enumerate(chat) if m["role"] == "user"), 0)
    if chat[0]["role"] not in ("system", "developer") or not place:
        return chat
    return [*chat[1:place], {**chat[place], "content": _joined(chat[0], chat[place])["content"]}, *chat[place + 1 :]]
