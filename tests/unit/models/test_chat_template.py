"""Chats of every kind through templates of many families: each text is in the prompt, or the chat is refused with the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.models.builtin.shipped import builtin_folder
from outrider.models.chat_template import PLAIN, ChatTemplate, LostMessage, chat_prompt, check_template, source_of
from outrider.models.gguf import reader
from outrider.models.tokenizer import tokenizer_of

FOLDER = Path(__file__).parents[2] / "data" / "templates"
MODELS = Path(os.environ.get("OUTRIDER_TEST_MODELS", "models"))  # a folder with GGUF files
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks for a word.",
            "strict": None,
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, word: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": json.dumps({"word": word})}}


SYSTEM, ASKED, ANSWER, NEXT = (
    say("system", "the system text"),
    say("user", "the question"),
    say("assistant", "the answer"),
    say("user", "the next question"),
)
NEWER = say("developer", "the developer's text")
NULLS = dict.fromkeys(("tool_calls", "function_call", "refusal", "audio", "name", "reasoning_content", "annotations"))
ONE = [
    say("assistant", None, tool_calls=[call("call_01234567", "fox")]),
    say("tool", "a fox", tool_call_id="call_01234567"),
]
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [ASKED, ANSWER, NEXT],
    "system": [SYSTEM, ASKED],
    "developer": [NEWER, ASKED],
    "system and developer": [SYSTEM, NEWER, ASKED],
    "developer and system": [NEWER, SYSTEM, ASKED],
    "developer later": [SYSTEM, ASKED, ANSWER, NEWER, NEXT],
    "two of system": [SYSTEM, say("system", "the other system text"), ASKED],
    "system later": [ASKED, ANSWER, say("system", "the later system text"), NEXT],
    "users in a row": [ASKED, NEXT],
    "nulls": [ASKED, {**ANSWER, **NULLS}, NEXT],
    "no calls": [ASKED, {**ANSWER, "tool_calls": []}, NEXT],
    "parts": [
        say("system", [{"type": "text", "text": "the system text"}]),
        say("user", [{"type": "text", "text": "two"}, {"type": "input_text", "text": " parts"}]),
        say("assistant", [{"type": "output_text", "text": "the answer"}, {"type": "refusal", "refusal": ", refused"}]),
        NEXT,
    ],
    "names": [{**ASKED, "name": "ann"}, ANSWER, {**NEXT, "name": "bob"}],
    "a thought": [ASKED, {**ANSWER, "reasoning_content": "hm"}, NEXT],
    "a refusal": [ASKED, say("assistant", None, refusal="the refusal"), NEXT],
    "a call": [SYSTEM, ASKED, *ONE],
    "an answered call": [SYSTEM, ASKED, *ONE, ANSWER, NEXT],
    "an older call": [
        ASKED,
        say("assistant", None, function_call={"name": "look", "arguments": '{"word": "fox"}'}),
        say("function", "a fox", name="look"),
        ANSWER,
        NEXT,
    ],
    "a call without an id": [
        ASKED,
        say("assistant", "", tool_calls=[{"function": {"name": "look", "arguments": {"word": "fox"}}}]),
        say("tool", "a fox", name="look"),
    ],
    "a thought, a text and a call": [ASKED, {**ONE[0], "content": "So.", "reasoning": "hm"}, ONE[1]],
    "two calls": [
        SYSTEM,
        ASKED,
        say("assistant", "", tool_calls=[call("a", "fox"), call("b", "owl")]),
        say("tool", "a fox", tool_call_id="a"),
        say("tool", 'the "owl"\n', tool_call_id="b"),
        ANSWER,
        NEXT,
    ],
}
CALLS = {kind for kind in KINDS if "call" in kind and kind != "no calls"}
SYSTEMS = {kind for kind, chat in KINDS.items() if chat[0]["role"] in ("system", "developer")}
ROLE, TURNS = "system is not supported", "alternate"
# what a template refuses, with its words or with ours; anything else must be in the prompt
REFUSED: dict[str, dict[str, str]] = {
    "command-r": {"users in a row": TURNS},
    "gemma-2": dict.fromkeys(CALLS | {"system later", "users in a row"}, TURNS) | dict.fromkeys(SYSTEMS, ROLE),
    "gemma-3": dict.fromkeys(CALLS | {"users in a row"}, TURNS),
    "llama-3.1": {"two calls": "one call in a turn only"},
    "mistral-nemo": {"users in a row": TURNS},
    "mistral-small-3": dict.fromkeys(CALLS, "Only user, system and assistant roles are supported"),
    "olmo-2": dict.fromkeys(CALLS, r"shows nothing of messages\.\d \(tool: "),
    "phi-4": dict.fromkeys(CALLS, r"shows nothing of messages\.\d \(tool: "),
}
FAMILIES = sorted({path.name.split(".jinja")[0].removesuffix(".tool_use") for path in FOLDER.glob("*.jinja")})
FILES = ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]


def tokenizer(template: Any) -> Any:
    return SimpleNamespace(chat_template=template, special_tokens_map={"eos_token": "</s>", "pad_token": None})


def family(name: str) -> Any:
    """A tokenizer with the templates of a family, with that of a file, or with the built-in one."""
    if name == "plain":
        return tokenizer(PLAIN)
    if name in FILES:
        path = MODELS / f"{name}.gguf"
        if not path.is_file():
            pytest.skip(f"there is no {path}; OUTRIDER_TEST_MODELS names a folder with it")
        return tokenizer(reader.read([path]).metadata["tokenizer.chat_template"])
    others = {p.name.split(".")[-2]: p.read_text() for p in FOLDER.glob(f"{name}.tool_use.jinja")}
    default = (FOLDER / f"{name}.jinja").read_text()
    return tokenizer({"default": default, **others} if others else default)


def prompt(template: Any, chat: list[dict[str, Any]], **more: Any) -> str:
    found = chat_prompt(template, chat, **{"add_generation_prompt": True, **more})
    assert isinstance(found, str)
    return found


def texts(message: dict[str, Any]) -> list[str]:
    """What must be in the prompt. Beside a call, families leave out a text."""
    content, calls = message["content"] or message.get("refusal") or "", message.get("tool_calls")
    if isinstance(content, list):
        content = "".join(part.get("text") or part["refusal"] for part in content)
    older = message.get("function_call")
    calls = calls or ([older] if older else [])
    return ["look", *("owl" if "owl" in str(c) else "fox" for c in calls)] if calls else [content]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FAMILIES, "plain", *FILES])
def test_each_text_is_in_the_prompt_or_the_chat_is_refused_with_the_reason(name: str, kind: str) -> None:
    chat, template = KINDS[kind], family(name)
    tools = TOOLS if kind in CALLS else None
    if (words := REFUSED.get(name, {}).get(kind)) is not None:
        with pytest.raises(ValueError, match=words):
            prompt(template, chat, tools=tools)
        return
    found = prompt(template, chat, tools=tools)
    for text in (text for message in chat for text in texts(message)):
        if name == "gpt-oss" and text == "owl":  # the family writes one call in a turn
            continue
        forms = (text.strip(), json.dumps(text)[1:-1], text.replace("\n", "\n# "))
        assert any(form in found for form in forms), (text, found)
    assert "None" not in found


@pytest.mark.parametrize("name", [*FAMILIES, "plain", *FILES])
def test_a_text_goes_on_exactly_where_it_ended(name: str) -> None:
    chat = [ASKED, say("assistant", "the answer begins \n ")]
    found = prompt(family(name), chat, continued=True, add_generation_prompt=False)
    assert found.endswith("the answer begins \n ")
    with pytest.raises(ValueError, match="has tool_calls, after which no text goes on"):
        prompt(family(name), [ASKED, ONE[0]], continued=True, add_generation_prompt=False)


def test_a_message_that_a_template_knows_is_as_the_family_writes_it() -> None:
    """What needs no help is not changed by one character."""
    for name in FAMILIES:
        template = family(name)
        source = source_of(template)
        for kind in ("plain", "system"):
            shown = ChatTemplate(source)
            if kind not in REFUSED.get(name, {}):
                found = shown.rendered(KINDS[kind], variables={"add_generation_prompt": True, "eos_token": "</s>"})
                assert prompt(template, KINDS[kind]) == found


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    for name in set(FAMILIES) - {"gpt-oss", "gemma-2"}:
        template = family(name)
        one = say("system", "the system text\n\nthe developer's text")
        for chat in ([SYSTEM, NEWER, ASKED], [SYSTEM, ASKED, ANSWER, NEWER, NEXT]):
            rest = [m for m in chat if m not in (SYSTEM, NEWER)]
            assert prompt(template, chat) == prompt(template, [one, *rest]), name
        assert prompt(template, [NEWER, ASKED]) == prompt(template, [{**NEWER, "role": "system"}, ASKED]), name
    # a template that knows it reads the role
    knows = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
    assert prompt(tokenizer(knows), [SYSTEM, NEWER, ASKED]) == (
        "<system>the system text<developer>the developer's text!<user>the question"
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        *[({"role": role, "content": "x"}, r"messages\.1\.role is one of system, developer, user") for role in
          ("User", "bogus", "", None, 5, ["user"], "ipython")],
        ({"role": "user"}, r"messages\.1 has no content"),
        ({"role": "system", "content": None}, r"messages\.1 has no content"),
        (say("user", 5), r"messages\.1\.content is a string or a list of"),
        (say("user", [{"type": "image_url", "image_url": {"url": "x"}}]), r"content\.0 is .*'image_url'; this model"),
        (say("user", [{"type": "text", "text": "x"}, {"type": "input_audio"}]), r"content\.1 is .*'input_audio'"),
        (say("user", [{"type": "file", "file": {}}]), r"content\.0 is .*'file'"),
        (say("user", [{"type": ["text"], "text": "x"}]), r"content\.0 is"),
        (say("user", ["x"]), r"content\.0 is"),
        (say("user", [{"type": "text", "text": None}]), r"content\.0 is"),
        (say("assistant", None, audio={"id": "x"}), r"messages\.1 has audio"),
        (say("assistant", "x", tool_calls={"a": 1}), r"messages\.1\.tool_calls is a list"),
        (say("assistant", "x", tool_calls=[7]), r"messages\.1\.tool_calls\.0 is \{"),
        (say("assistant", "x", tool_calls=[{"function": {"arguments": "{}"}}]), r"messages\.1\.tool_calls\.0 is"),
        (say("assistant", "x", function_call="look"), r"messages\.1\.tool_calls\.0 is"),
    ],
)  # fmt: skip
def test_a_message_that_is_not_valid_is_named(message: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prompt(tokenizer(CHATML), [ASKED, message])


def test_a_message_without_a_trace_is_refused_and_a_text_of_blanks_is_not() -> None:
    some = tokenizer("{% for m in messages %}{% if m.role == 'user' %}{{ m.content|trim }}{% endif %}{% endfor %}")
    assert prompt(some, [say("user", "the"), say("user", "the")]) == "thethe"
    with pytest.raises(LostMessage, match=r"shows nothing of messages\.0 \(assistant: 'the'\)"):
        prompt(some, [say("assistant", "the"), say("user", "the answer")])  # also where its text stands elsewhere
    assert prompt(some, [say("assistant", " \n"), say("assistant", ""), ASKED]) == "the question"
    # a system text that has no place of its own goes to the user
    assert prompt(some, [SYSTEM, ASKED]) == "the system text\n\nthe question"
    with pytest.raises(LostMessage):
        prompt(tokenizer("{{ messages[0].content }}"), [ASKED, ANSWER, NEXT])


def test_arguments_are_objects_and_text_for_a_template_that_takes_no_object() -> None:
    body = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ SHOWN }}{% endfor %}{{ m.content }}{% endfor %}"
    for shown, expected in (
        ("c.function.arguments|tojson", '{"word": "fox"}'),
        ("c.function.arguments.word", "fox"),
        ("'=' + c.function.arguments", '={"word": "fox"}'),
        ("c.function.arguments", '{"word": "fox"}'),
    ):
        for arguments in ('{"word": "fox"}', {"word": "fox"}):
            chat = [say("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])]
            assert prompt(tokenizer(body.replace("SHOWN", shown)), chat) == expected
    for empty in ("", None, " "):
        chat = [say("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": empty}}])]
        assert prompt(tokenizer(body.replace("SHOWN", "c.function.arguments|tojson")), chat) == "{}"
    # a template without calls gets them as the model wrote them
    assert prompt(tokenizer(CHATML), [ASKED, ONE[0]]).count('{"name": "look", "arguments": {"word": "fox"}}') == 1


def test_ids_of_calls_have_the_length_that_mistral_takes() -> None:
    found = prompt(family("mistral-nemo"), KINDS["two calls"], tools=TOOLS)
    first, second = (found.split(f'"{word}"}}, "id": "')[1][:9] for word in ("fox", "owl"))
    assert first != second
    for name, result in ((first, "a fox"), (second, 'the "owl"\n')):
        assert f'{{"content": {result}, "call_id": "{name}"}}' in found
    ids = [{**call("abcdefghi", "fox")}]
    kept = prompt(family("mistral-nemo"), [ASKED, say("assistant", "", tool_calls=ids)])
    assert '"id": "abcdefghi"' in kept


@pytest.mark.parametrize("name", ["command-r", "hermes-3"])
def test_a_chat_with_tools_gets_the_template_for_it(name: str) -> None:
    template = family(name)
    assert "Looks for a word" in prompt(template, [ASKED], tools=TOOLS) or "word: str" in prompt(
        template, [ASKED], tools=TOOLS
    )
    assert "word" not in prompt(template, [ASKED])
    assert "word" not in prompt(template, [ASKED], tools=[])
    assert source_of(tokenizer({"x": "1"}), True) == "1"
    assert source_of(tokenizer({"default": "1", "rag": "2"}), False, True) == "2"


@pytest.mark.parametrize("form", ["files", "list"])
def test_a_folder_may_have_several_templates(form: str, tmp_path: Path) -> None:
    tokenizer_of(str(builtin_folder("builtin:code"))).save_pretrained(tmp_path)
    one = "{{ messages[0].content }}"
    texts = {"default": one, "tool_use": "{{ tools|length }}: " + one}
    if form == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(texts["default"])
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
    else:
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        settings["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    made = tokenizer_of(str(tmp_path))
    assert [prompt(made, [ASKED]), prompt(made, [ASKED], tools=TOOLS)] == ["the question", "1: the question"]


def test_variables_reach_the_template() -> None:
    assert prompt(family("qwen3"), [ASKED], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert "Reasoning: high" in prompt(family("gpt-oss"), [ASKED], reasoning_effort="high")
    documents = [{"doc_id": 1, "text": "the document"}]
    assert "the document" in prompt(family("granite-3.3"), [ASKED], documents=documents)
    assert "Date: today" in prompt(family("llama-3.1"), [ASKED], date_string="today")
    assert prompt(
        tokenizer("{{ bos_token + eos_token }}{{ pad_token is defined }}{{ messages[0].content }}"), [ASKED]
    ) == ("</s>Falsethe question")


def test_a_file_that_is_no_template_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"this is no chat template: .*, in line 2"):
        check_template("x\n{% for %}")
    with pytest.raises(ValueError, match="no chat template: No filter named 'fromjson'"):
        check_template("{{ messages[0].content | fromjson }}")
    check_template("{{ raise_exception('not this') }}")


def test_a_template_fails_in_its_own_ways() -> None:
    for source in ("{{ messages[0].none.x }}", "{{ 1 / 0 }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}",
                   "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages[0].content + 1 }}"):  # fmt: skip
        with pytest.raises(ValueError, match="the model's chat template"):
            prompt(tokenizer(source), [ASKED])
