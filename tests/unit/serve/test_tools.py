"""Calls of tools: every format, however the text is cut; what is broken is text; a call that is asked for is certain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from grammars import accepts
from hypothesis import given
from hypothesis import settings as quick
from hypothesis import strategies as st
from serving import TEMPLATE, Live, builtin, serving

from outrider.core.outputs import Delta
from outrider.core.params import SamplingParams
from outrider.core.stopping import StopChecker
from outrider.engine.request import Request, Sequence
from outrider.serve.answer import ChoiceReader
from outrider.serve.grammar import Grammar, Grammars
from outrider.serve.tools import FORMATS, PLAIN, ToolCall, ToolCallReader, ToolOffer, chosen, offered

LOOK = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "stop", "description": "no arguments"}},
]
ONE, TWO = '{"name": "look", "arguments": {"x": 1}}', '{"name": "stop", "arguments": {}}'
LOOKS, STOPS = ("look", {"x": 1}), ("stop", {})
TRICKY = '{"name": "look", "arguments": {"x": "</tool_call> [TOOL_CALLS] \\" }"}}'
TRICK = ("look", {"x": '</tool_call> [TOOL_CALLS] " }'})
# (format, text, content, calls)
TEXTS = [
    ("hermes", "just text", "just text", []),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [LOOKS]),
    ("hermes", f"I look. \n<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>\n", "I look.", [LOOKS, STOPS]),
    ("hermes", f"<tool_call>\n{TRICKY}\n</tool_call> after", " after", [TRICK]),
    ("hermes", f"<tool_call>{ONE}", "", [LOOKS]),  # the closing mark is often forgotten
    ("hermes", '<tool_call>\n{"name": "look", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [LOOKS]),
    ("hermes", "<tool_call>\n{nonsense\n</tool_call> more", "<tool_call>\n{nonsense\n</tool_call> more", []),
    ("hermes", f"<tool_call>{{</tool_call>\n<tool_call>{ONE}</tool_call>", "<tool_call>{</tool_call>", [LOOKS]),
    ("hermes", '<tool_call>{"name": "look", "arg', '<tool_call>{"name": "look", "arg', []),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>', ..., []),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"x": NaN}}</tool_call>', ..., []),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"x": 1e999}}</tool_call>', ..., []),
    ("hermes", "<tool_call>" + "[" * 100_000, ..., []),
    ("hermes", "a < b <tool", ..., []),
    ("hermes", '<tool_call>\n{"name": "look", "arguments": {"x": "x\ny\t"}}\n</tool_call>', "", [("look", {"x": "x\ny\t"})]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": null}</tool_call><tool_call>{"name": "stop"}</tool_call>', "",
     [STOPS] * 2),
    ("hermes", '<tool_call>{"arguments": {"x": "</tool_call> \u5317\u4eac \U0001f642"}, "name": "look"}', "",
     [("look", {"x": "</tool_call> \u5317\u4eac \U0001f642"})]),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call><tool_call>{"name": "stop"}</tool_call>',
     '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', [STOPS]),
    ("hermes", '<tool_call>{{"name": "stop"}}</tool_call>', ..., []),
    ("llama3_json", ONE.replace("arguments", "parameters"), "", [LOOKS]),
    ("llama3_json", f"\n {ONE}; {TWO}", "", [LOOKS, STOPS]),
    ("llama3_json", f"<|python_tag|>{ONE}", "", [LOOKS]),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", '{"name": "look", "par', '{"name": "look", "par', []),
    ("llama3_json", "  As JSON: " + ONE, "  As JSON: " + ONE, []),
    ("mistral", f"[TOOL_CALLS] [{ONE}, {TWO}]</s>", "", [LOOKS, STOPS]),
    ("mistral", 'Well. [TOOL_CALLS]look{"x": 1}[TOOL_CALLS]stop[ARGS]{}</s>', "Well.", [LOOKS, STOPS]),
    ("mistral", "[TOOL_CALLS] [{]", "[TOOL_CALLS] [{]", []),
    ("mistral", "no call</s>", "no call", []),
    ("mistral", "[TOOL_CALLS]look", "[TOOL_CALLS]look", []),
]  # fmt: skip


def fed(reader: ToolCallReader, text: str, last: bool) -> tuple[str, list[ToolCall]]:
    """More of a text: all of the content, and all of the calls."""
    parts = reader.parts(text, last)
    return "".join(p for p in parts if isinstance(p, str)), [p for p in parts if isinstance(p, ToolCall)]


def read(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, dict]]]:
    reader = ToolCallReader(FORMATS[name], ["look", "stop"], ["</s>"] if name == "mistral" else [])
    content, calls = "", []
    for n, piece in enumerate([*pieces, ""]):
        more, new = fed(reader, piece, n == len(pieces))
        content += more
        calls += new
    assert reader.called == len(calls)
    assert len({c.id for c in calls}) == len(calls)
    return content, [(c.name, json.loads(c.arguments)) for c in calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), TEXTS, ids=[f"{t[0]} {t[1][:30]}" for t in TEXTS])
def test_calls_are_read_and_what_is_none_is_text(name: str, text: str, content: str, calls: list) -> None:
    expected = (text if content is ... else content, calls)
    assert read(name, [text]) == expected
    if len(text) < 1000:
        assert read(name, list(text)) == expected


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    ONE,
    TWO,
    TRICKY,
    "look",
    "{",
    "}",
    '"',
    "</s>",
]
FRAGMENTS += [" ", "\n", ";", "word", "[", "]", ONE[:20], '"x</tool_call>', "<tool"]


@quick(max_examples=400)
@given(st.sampled_from(list(FORMATS)), st.lists(st.sampled_from(FRAGMENTS), max_size=8), st.data())
def test_how_the_text_is_cut_changes_nothing(name: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, pieces) == read(name, [text])


def test_the_parser_is_chosen_by_the_template() -> None:
    assert chosen("auto", "{{ '<tool_call>' }}") is FORMATS["hermes"]
    assert chosen("auto", str({"default": "[TOOL_CALLS]"})) is FORMATS["mistral"]
    assert chosen("auto", "<|python_tag|>") is FORMATS["llama3_json"]
    assert chosen("auto", '{"name": function name, "parameters": dictionary of argument name') is FORMATS["llama3_json"]
    assert chosen("auto", "<tool_call><function=") is None is chosen("auto", "")
    assert chosen("none", "<tool_call>") is None
    assert chosen("mistral", "<tool_call>") is FORMATS["mistral"]


def test_what_a_request_says_of_tools() -> None:
    named = {"type": "function", "function": {"name": "stop"}}
    assert offered(TOOLS, None, True) == offered(TOOLS, "auto", True) == ToolOffer({"look": LOOK, "stop": ANY})
    assert offered(TOOLS, "none", True) is None is offered(None, None, True)
    assert offered(TOOLS, "required", False) == ToolOffer({"look": LOOK, "stop": ANY}, True, None, False)
    asked = offered(TOOLS, named, True)
    assert asked is not None
    assert asked.names == ["stop"]
    for tools, choice, words in (
        ([{"type": "function"}], None, "tools.0 is"),
        ([{"function": {"name": "a b"}}], None, "tools.0 is"),
        ([{"function": {"name": "a", "parameters": {"type": "string"}}}], None, "schema of an object"),
        (None, "required", "the request has no tools"),
        (TOOLS, "sometimes", 'tool_choice is "none"'),
        (TOOLS, {"function": {"name": "rm"}}, "not one of the tools"),
    ):
        with pytest.raises(ValueError, match=words):
            offered(tools, choice, True)


ANY = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(2)) as live:
        yield live


def test_calls_that_a_model_writes_of_itself_and_broken_ones(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is set by a grammar of one choice: what a model would write."""
    live.service.settings = live.service.settings.with_(tool_call_parser="auto")
    monkeypatch.setattr(live.service.prompts.tokenizer, "chat_template", TEMPLATE + "{# <tool_call> #}")
    for text, content, calls in (
        (
            f"Yes. <tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>",
            "Yes.",
            [("look", '{"x": 1}'), ("stop", "{}")],
        ),
        ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", []),
        ("plain", "plain", []),
        ("held back <tool", "held back <tool", []),
    ):
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": TOOLS,
            "n": 2,
            "structured_outputs": {"choice": [text]},
        }
        body |= {"logprobs": True}
        whole = httpx.post(live.url + "/v1/chat/completions", json=body).json()
        for choice in whole["choices"]:
            message = choice["message"]
            assert message["content"] == content
            found = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
            assert found == calls
            assert all(c["type"] == "function" and len(c["id"]) == 9 for c in message.get("tool_calls", ()))
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        with httpx.stream("POST", live.url + "/v1/chat/completions", json={**body, "stream": True}) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line and not line.endswith("[DONE]")]
        for index in (0, 1):
            own = [c for e in events for c in e["choices"] if c["index"] == index]
            assert "".join(c["delta"].get("content") or "" for c in own) == content
            deltas = [d for c in own for d in c["delta"].get("tool_calls", ())]
            assert [(d["index"], d["function"]["name"]) for d in deltas] == list(enumerate(n for n, _ in calls))
            assert own[-1]["finish_reason"] == ("tool_calls" if calls else "stop")
            tokens = [t["token"] for c in own if c["logprobs"] for t in c["logprobs"]["content"]]
            assert "".join(tokens).startswith(text)


def test_calls_of_one_step_have_numbers_of_their_own() -> None:
    params = SamplingParams()
    sequence = Sequence(Request(0, [1], params), StopChecker(params, (), 9))
    reader = ChoiceReader(0, sequence, tools=ToolCallReader(FORMATS["hermes"], ["look", "stop"]))
    parts = reader.read(Delta(f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", [5]))
    assert [(part.number, part.call and part.call.name) for part in parts] == [(0, "look"), (1, "stop")]


FORCED = {
    "hermes": ('<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>', "\n", "%s"),
    "llama3_json": ('{"name": %s, "parameters": %s}', "; ", "%s"),
    "mistral": ('{"name": %s, "arguments": %s}', ", ", "[TOOL_CALLS][%s]"),
    "plain": ('{"name": %s, "arguments": %s}', "\n", "%s"),
}


@pytest.mark.parametrize("parser", FORCED)
def test_a_forced_answer_has_only_calls_and_is_read_by_the_reader_of_its_format(live: Live, parser: str) -> None:
    service, form = live.service, FORMATS.get(parser, PLAIN)
    grammars = Grammars(service.prompts.tokenizer, 8192, service.runtime.loaded.end_ids)
    call, between, around = FORCED[parser]
    names = ["look", "a" * 128, 'q"\\/\n\u00e9\u2028𓀀 </tool_call>']
    offer = ToolOffer({name: LOOK if name == "look" else {"type": "object"} for name in names}, True)
    one, two, three = (
        call % (json.dumps(name, ensure_ascii=False), arguments)
        for name, arguments in zip(names, ('{"x": 1}', "{}", '{"x":\n  ["}"]}'), strict=True)
    )

    def takes(offer: ToolOffer, text: str) -> bool:
        grammar = Grammar.tools(offer.grammar(form), [offer.tools[name] for name in offer.names])
        return accepts(service.prompts, grammars, grammar, around % text)

    several = between.join([one, two, one, three])
    assert takes(offer, one)
    assert takes(offer, several)
    content, found = fed(ToolCallReader(form, names), around % several, True)
    assert (content, [c.name for c in found]) == ("", [names[0], names[1], names[0], names[2]])
    for bad in (
        "",
        one + two,
        one + between,
        one[:-1],
        "x" + one,
        call % ('"look"', '{"x": "1"}'),
        call % ('"no"', "{}"),
    ):
        assert not takes(offer, bad), bad
    for single in (replace(offer, many=False), replace(offer, only="look")):
        assert takes(single, one)
        assert not takes(single, one + between + one)
    assert not takes(replace(offer, only="look"), two)


@pytest.mark.parametrize("stream", [False, True])
def test_an_opening_that_is_a_special_token_is_seen_and_other_special_tokens_are_not(
    live: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    tokenizer = live.service.prompts.tokenizer
    monkeypatch.setattr(tokenizer, "all_special_tokens", ["<|endoftext|>", "[TOOL_CALLS]"])
    live.service.settings = live.service.settings.with_(tool_call_parser="mistral")
    for text, content, calls in ((f"So: [TOOL_CALLS][{ONE}]", "So:", ["look"]), ("plain", "plain", [])):
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": TOOLS,
            "structured_outputs": {"choice": [text]},
        }
        with httpx.stream("POST", live.url + "/v1/chat/completions", json={**body, "stream": stream}) as response:
            lines = [x.removeprefix("data: ") for x in response.iter_lines() if x and not x.endswith("[DONE]")]
        parts = [c.get("delta", c.get("message")) for x in lines for c in json.loads(x)["choices"]]
        assert "".join(p.get("content") or "" for p in parts) == content
        assert [c["function"]["name"] for p in parts for c in p.get("tool_calls", ())] == calls
