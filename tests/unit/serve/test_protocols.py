"""The protocols as one table: the same meaning has the same prompt, parameters, tokens and end in each.

`test_published` proves the forms of answers, and that each stream adds up to its whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Live, builtin, serving

from outrider.engine.fingerprint import Fingerprints
from outrider.engine.request import Sequence
from outrider.models.chat_template import chat_prompt
from outrider.serve.options import ServeOptions
from outrider.serve.protocols.anthropic import MessagesRequest
from outrider.serve.tools import ThinkingReader

Json = dict[str, Any]
TEMPLATE = (
    "{# <tool_call> </think> #}{% if tools %}{{ tools|tojson }}\n{% endif %}{% for m in messages %}"
    "# {{ m.role }} {{ m.tool_call_id }}: {{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.id }} {{ c.function.name }} {{ c.function.arguments|tojson }}{% endfor %}"
    "\n{% endfor %}{{ reasoning_effort }}{% if enable_thinking %}think{% endif %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"at": {"enum": ["sky", "sea"]}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = {"name": "look", "description": "Look at a place.", "parameters": SCHEMA}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "sort a list"}
TURNS = [USER, {"role": "assistant", "content": "sorted(xs)"}, {"role": "user", "content": "reverse it"}]
CALLED = [USER, {"role": "assistant", "content": "I look.", "calls": True}, {"role": "tool", "content": "blue"}]
SAMPLING = {
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 30,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
}
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1}


@dataclass
class Meaning:
    """What a request asks for, whichever protocol says it. more: fields of ours, that all bodies but Ollama's take."""

    messages: list[Json]
    sampling: Json
    stop: list[str] | None = None
    tools: tuple[Json, ...] = ()
    schema: Json | None = None
    limit: int = 20
    must_call: bool = False
    more: Json | None = None
    call: str = "c1"  # the id of a call

    @property
    def ours(self) -> Json:
        """The fields that have one name."""
        return {**self.sampling, "seed": 3, **(self.more or {})}

    def turns(self, call: Json) -> list[Json]:
        """The messages as chat completions and Ollama have them. call: what the assistant called."""
        extra = {"assistant": {"tool_calls": [call]}, "tool": {"tool_call_id": self.call}}
        told = [extra[m["role"]] if m["role"] == "tool" or "calls" in m else {} for m in self.messages]
        return [{k: m[k] for k in ("role", "content")} | more for m, more in zip(self.messages, told, strict=True)]


def chat(asked: Meaning) -> Json:
    call = {"id": asked.call, "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    body = {"messages": asked.turns(call), **asked.ours, "max_tokens": asked.limit, "stop": asked.stop}
    body["tools"] = [{"type": "function", "function": tool} for tool in asked.tools] or None
    body["tool_choice"] = "required" if asked.must_call else None
    body["continue_final_message"] = asked.messages[-1]["role"] == "assistant"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked.schema}}
    return body | ({"response_format": form} if asked.schema else {})


def responses(asked: Meaning) -> Json:
    items = list[Json]()
    for m in asked.messages:
        if m["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": asked.call, "output": m["content"]})
        elif m["role"] != "system":
            items.append({"role": m["role"], "content": m["content"]})
        if "calls" in m:
            items.append({"type": "function_call", "call_id": asked.call, "name": "look", "arguments": '{"at": "sky"}'})
    body = {"input": items, **asked.ours, "max_output_tokens": asked.limit, "stop": asked.stop}
    body["instructions"] = SYSTEM["content"] if asked.messages[0] is SYSTEM else None
    body["tools"] = [{"type": "function", **tool} for tool in asked.tools] or None
    body["tool_choice"] = "required" if asked.must_call else None
    return body | (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": asked.schema}}} if asked.schema else {}
    )


def messages(asked: Meaning) -> Json:
    turns = list[Json]()
    for m in asked.messages:
        text = {"type": "text", "text": m["content"]}
        if m["role"] == "tool":
            turns.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": asked.call, "content": [text]}]}
            )
        elif m["role"] != "system":
            use = {"type": "tool_use", "id": asked.call, "name": "look", "input": {"at": "sky"}}
            turns.append({"role": m["role"], "content": [text, *([use] if "calls" in m else [])]})
    body = {"messages": turns, **asked.ours, "max_tokens": asked.limit, "stop_sequences": asked.stop}
    body["system"] = SYSTEM["content"] if asked.messages[0] is SYSTEM else None
    body["tools"] = [
        {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in asked.tools
    ]
    body["tool_choice"] = {"type": "any"} if asked.must_call else None
    return body | (
        {"output_config": {"format": {"type": "json_schema", "schema": asked.schema}}} if asked.schema else {}
    )


def ollama(asked: Meaning) -> Json:
    named = {"repetition_penalty": "repeat_penalty"}
    options = {named.get(k, k): v for k, v in asked.sampling.items()} | {"num_predict": asked.limit, "seed": 3}
    options |= {"top_k": max(options["top_k"], 0)} | ({"stop": asked.stop} if asked.stop else {})
    call = {"id": asked.call, "function": {"name": "look", "arguments": {"at": "sky"}}}
    body = {"messages": asked.turns(call), "options": options, "format": asked.schema, "stream": False}
    return body | ({"tools": [{"type": "function", "function": tool} for tool in asked.tools]} if asked.tools else {})


WAYS: dict[str, Callable[[Meaning], Json]] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/api/chat": ollama,
}


def told(path: str, answer: Json) -> tuple[str, str, list[Json], str]:
    """Thought, text, arguments of calls, and why the answer ended, in the words of its protocol."""
    if path == "/v1/messages":
        blocks = answer["content"]
        join = {kind: "".join(b.get(kind, "") for b in blocks) for kind in ("thinking", "text")}
        return (
            join["thinking"],
            join["text"],
            [b["input"] for b in blocks if b["type"] == "tool_use"],
            answer["stop_reason"],
        )
    if path == "/v1/responses":
        text = "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))
        calls = [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
        return "", text, calls, (answer["incomplete_details"] or {}).get("reason") or answer["status"]
    choice = answer["choices"][0] if "choices" in answer else answer
    message, calls = choice["message"], [c["function"]["arguments"] for c in choice["message"].get("tool_calls", ())]
    calls = [json.loads(call) if isinstance(call, str) else call for call in calls]
    return (
        message.get("thinking", ""),
        message["content"] or "",
        calls,
        choice.get("finish_reason", answer.get("done_reason")),
    )


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = builtin(2, max_model_len=512)
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    with serving(llm, ServeOptions(model="code"), prefix_bytes=1 << 24) as live:
        yield live


@pytest.fixture
def written(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """The texts that the engine was asked for in a test."""
    engine, texts = live.service.engine, list[Sequence]()
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda requests: (texts.extend(new := submit(requests)), new)[1])
    return texts


def post(live: Live, path: str, body: Json, **more: Any) -> httpx.Response:
    return httpx.post(live.url + path, json={"model": "code", **body, **more})


def ask(live: Live, path: str, body: Json, **more: Any) -> Json:
    response = post(live, path, body, **more)
    assert response.status_code == 200, response.text
    return response.json()


def last_event(live: Live, path: str, body: Json, **more: Any) -> Json:
    lines = post(live, path, body, stream=True, **more).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))][-1]


EVERY = tuple(WAYS)
GOES_ON = ("/v1/chat/completions", "/v1/messages", "/api/chat")  # from a text of the assistant
OURS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
SAME: dict[str, tuple[Meaning, tuple[str, ...]]] = {
    "sampling": (Meaning([USER], {**SAMPLING, "repetition_penalty": 1.1}), EVERY),
    "a system message and turns": (Meaning([SYSTEM, *TURNS], SAMPLING), EVERY),
    "stop sequences": (Meaning([USER], GREEDY, stop=["\n", "return"]), EVERY),
    "an answer that goes on": (Meaning(TURNS[:2], SAMPLING), GOES_ON),
    "tools": (Meaning([SYSTEM, USER], SAMPLING, tools=(LOOK,)), EVERY),
    "a tool's result": (Meaning([SYSTEM, *CALLED], SAMPLING, tools=(LOOK,)), EVERY),
    "a schema": (Meaning([USER], GREEDY, schema=SCHEMA, limit=60), EVERY),
    "a call that must come": (Meaning([USER], SAMPLING, tools=(LOOK,), must_call=True, limit=60), OURS),
    "fields of ours": (
        Meaning([USER], SAMPLING, more={"logit_bias": {"11": 2.0}, "bad_words": ["self"], "min_tokens": 2, "ignore_eos": True}),
        OURS,
    ),
    "a thought": (Meaning([USER], GREEDY, limit=60, more={"structured_outputs": {"regex": "<think>hm, ha</think>\nyes"}}), OURS),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_the_same_meaning_has_the_same_tokens(live: Live, written: list[Sequence], case: str) -> None:
    asked, paths = SAME[case]
    if asked.schema or asked.must_call or case == "a thought":
        pytest.importorskip("llguidance")
    found = [told(path, ask(live, path, WAYS[path](asked))) for path in paths]
    requests = [(s.request.prompt, s.request.params.with_(max_tokens=None)) for s in written]
    assert requests == [requests[0]] * len(paths)
    assert [s.output for s in written] == [written[0].output] * len(paths)
    assert written[0].output
    if case == "a thought":  # only Anthropic's protocol and Ollama's tell it apart
        assert [(thought, text) for thought, text, *_ in found] == [
            ("", "<think>hm, ha</think>\nyes"), ("", "<think>hm, ha</think>\nyes"), ("hm, ha", "yes")
        ]  # fmt: skip
        return
    assert [each[:3] for each in found] == [found[0][:3]] * len(paths)
    if asked.must_call:
        assert [call["at"] in ("sky", "sea") for call in found[0][2]] != []
    elif asked.schema is None:  # a grammar has no fingerprint
        prints = Fingerprints(live.service.runtime, "code")
        assert len({prints.of(s.request, s.output, s.finish and s.finish.finish).digest for s in written}) == 1


def test_why_a_text_ended_has_the_word_of_each_protocol(live: Live) -> None:
    text = told(EVERY[0], ask(live, EVERY[0], chat(Meaning([USER], GREEDY))))[1]
    end = live.service.runtime.loaded.end_ids[0]
    at = text[4:8]
    words: list[tuple[Meaning, str, tuple[str, ...]]] = [
        (Meaning([USER], GREEDY, limit=3, more={"ignore_eos": True}), text[:0], ("length", "max_output_tokens", "max_tokens")),
        (Meaning([USER], GREEDY, stop=[at]), text[: text.index(at)], ("stop", "completed", "stop_sequence", "stop")),
        (Meaning([USER], GREEDY, stop=[text[0]]), "", ("stop", "completed", "stop_sequence", "stop")),
        (Meaning([USER], GREEDY, more={"allowed_token_ids": [end]}), "", ("stop", "completed", "end_turn")),
    ]  # fmt: skip
    for asked, start, ends in words:
        for path, word in zip(EVERY, ends, strict=False):
            answer = ask(live, path, WAYS[path](asked))
            assert told(path, answer)[3] == word
            assert told(path, answer)[1].startswith(start)
            if path == "/v1/messages":
                assert answer["stop_sequence"] == (asked.stop[0] if asked.stop else None)
    short = ask(live, "/api/chat", ollama(Meaning([USER], GREEDY, limit=3)))
    assert (short["done_reason"], short["eval_count"]) == ("length", 3)
    full = ask(live, "/v1/messages", messages(Meaning([USER], GREEDY, limit=4000, more={"ignore_eos": True})))
    assert full["stop_reason"] == "model_context_window_exceeded"  # clients ask for more than many models hold
    small = ollama(Meaning([USER], GREEDY))
    small = ask(live, "/api/chat", small | {"options": small["options"] | {"num_ctx": 20}})
    assert small["prompt_eval_count"] + small["eval_count"] <= 20


def test_a_deadline_ends_a_stream_in_the_form_of_its_protocol(live: Live) -> None:
    asked = Meaning([USER], GREEDY, limit=480, more={"ignore_eos": True, "timeout": 0.05})
    late = {path: last_event(live, path, WAYS[path](asked)) for path in OURS}
    assert "deadline" in late["/v1/chat/completions"]["choices"][0]["stop_reason"]
    failed = late["/v1/responses"]
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert (late["/v1/messages"]["type"], late["/v1/messages"]["error"]["type"]) == ("error", "timeout_error")


def test_tokens_are_counted_once_with_the_cache_or_without(live: Live) -> None:
    tools = [{"name": "look", "input_schema": SCHEMA}]
    for more in ({}, {"system": "Be brief."}, {"tools": tools}, {"thinking": {"type": "enabled", "budget_tokens": 99}}):
        used = ask(live, "/v1/messages", {"messages": [USER], "max_tokens": 1, **more})["usage"]
        counted = ask(live, "/v1/messages/count_tokens", {"messages": [USER], **more})
        assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    asked = Meaning([{"role": "user", "content": "Answer in a few words, and say why. " * 4}], GREEDY)
    spent = {path: ask(live, path, WAYS[path](asked)) for path in EVERY}
    usage = spent["/v1/chat/completions"]["usage"]
    assert spent["/v1/responses"]["usage"]["total_tokens"] == usage["total_tokens"]
    assert spent["/v1/messages"]["usage"]["cache_read_input_tokens"] > 0
    assert spent["/api/chat"]["prompt_eval_count"] == usage["prompt_tokens"]
    assert spent["/api/chat"]["eval_count"] == usage["completion_tokens"]
    end = spent["/api/chat"]
    assert 0 < end["prompt_eval_duration"] + end["eval_duration"] <= end["total_duration"]


# ------------------------------------------------------------------------------------------------ prompts

TOOL = {"type": "function", "function": LOOK}
NONE, LOW, HIGH = "", "lowthink", "highthink"


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


PROMPTS: list[tuple[str, Json, str]] = [
    # path, body, what the template ends with before the mark of an answer
    ("/v1/chat/completions", {"messages": [USER], "reasoning_effort": "low"}, LOW),
    ("/v1/chat/completions", {"messages": [USER], "reasoning_effort": "none"}, NONE),
    ("/v1/chat/completions", {"messages": [USER]}, NONE),
    ("/v1/responses", {"input": "sort a list", "reasoning": {"effort": "low", "summary": "auto"}}, LOW),
    ("/v1/messages", {"messages": [USER], "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, LOW),
    ("/v1/messages", {"messages": [USER]}, NONE),
    ("/api/chat", {"messages": [USER], "think": "low"}, LOW),
    ("/api/chat", {"messages": [USER], "think": True}, HIGH),
    ("/api/chat", {"messages": [USER], "think": False}, NONE),
    ("/api/generate", {"prompt": "sort a list"}, NONE),
    # a text may come in parts, and tools may be flat
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [text("sort "), text("a list")]}]}, NONE),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "sort a list"}]}]}, NONE),
    ("/v1/messages", {"messages": [{"role": "user", "content": [text("sort a list", cache_control={})]}]}, NONE),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}, NONE),
    ("/api/generate", {"prompt": "# user : sort a list# assistant:", "raw": True}, NONE),
]  # fmt: skip
LIMITS = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}


def prompt_of(live: Live, written: list[Sequence], path: str, body: Json) -> str:
    limit = (
        {"options": {"num_predict": 1}} if path.startswith("/api/") else {LIMITS.get(path, "max_completion_tokens"): 1}
    )
    ask(live, path, {**body, **limit, "stream": False})
    return live.service.tokens.decode(written[-1].prompt)


@pytest.mark.parametrize(("path", "body", "effort"), PROMPTS)
def test_what_is_said_reaches_the_template(
    live: Live, written: list[Sequence], path: str, body: Json, effort: str
) -> None:
    assert prompt_of(live, written, path, body) == f"# user : sort a list{effort}# assistant:"


def test_a_tool_is_shown_in_one_form(live: Live, written: list[Sequence]) -> None:
    nested = prompt_of(live, written, "/v1/chat/completions", {"messages": [USER], "tools": [TOOL]})
    assert '"look"' in nested
    flat = {"messages": [USER], "tools": [{"type": "function", **LOOK}]}
    assert nested == prompt_of(live, written, "/v1/chat/completions", flat)


FOLDER = Path(__file__).parents[2] / "data" / "templates"
TEMPLATES = ["qwen2.5", "lfm2", "llama-3.1", "command-r", "deepseek-v3.1", "smolvlm", "mistral-nemo"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_real_models_show_the_same_in_each_protocol(
    live: Live, written: list[Sequence], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source: Any = (FOLDER / f"{name}.jinja").read_text()
    if (tools := FOLDER / f"{name}.tool_use.jinja").exists():
        source = {"default": source, "tool_use": tools.read_text()}
    tokenizer: Any = live.service.prompts.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", source)
    asked = Meaning([SYSTEM, *CALLED], GREEDY, tools=(LOOK,), limit=1, call="abcdefghi")
    for path, way in WAYS.items():
        ask(live, path, way(asked))
    [ids] = {tuple(one.prompt) for one in written}
    assert len(written) == len(WAYS)
    shown = tokenizer.decode(list(ids))
    assert all(text in shown for text in ("Be brief.", "sort a list", "look", "sky", "blue"))
    made = chat_prompt(tokenizer, chat(asked)["messages"], tools=[TOOL], add_generation_prompt=True)
    assert tokenizer(made, add_special_tokens=False)["input_ids"] == list(ids)


SAID: list[tuple[str, Json, Json]] = [
    ("/v1/completions", {"max_tokens": 16}, {"max_tokens": None}),
    ("/v1/completions", {"stop": None, "logit_bias": None}, {"stop": [], "logit_bias": {}}),
    ("/v1/completions", {"temperature": 0}, {"temperature": 1.0, "top_p": 0}),
    ("/v1/completions", {"top_k": -1}, {"top_k": 0}),
    ("/v1/completions", {"seed": -5}, {"seed": 2**64 - 5}),
    ("/v1/completions", {"n": 1}, {"n": "1", "best_of": 1}),
    ("/v1/completions", {}, {"suffix": "", "use_beam_search": False}),
    ("/v1/chat/completions", {}, {"modalities": ["text"], "store": True, "metadata": {}}),
    ("/api/generate", {"options": {"temperature": 0}}, {"options": {"top_p": 0}, "format": "", "context": []}),
]


@pytest.mark.parametrize(("path", "body", "other"), SAID)
def test_two_ways_to_say_the_same(live: Live, written: list[Sequence], path: str, body: Json, other: Json) -> None:
    usual = {"messages": [USER], "max_tokens": 16} if "chat" in path else {"prompt": "x = "}
    usual |= {"raw": True, "stream": False} if path.startswith("/api/") else {"seed": 3, "temperature": 0.9}
    for more in (body, other):
        options = {"options": {"num_predict": 9, **more.get("options", {})}} if path.startswith("/api/") else {}
        ask(live, path, usual | more | options)
    assert written[0].output == written[1].output


def test_a_schema_beside_the_type_counts(live: Live) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_object", "schema": SCHEMA}
    asked = {"messages": [USER], "max_tokens": 60, "temperature": 0, "response_format": form}
    answer = ask(live, "/v1/chat/completions", asked)
    assert json.loads(told("/v1/chat/completions", answer)[1])["at"] in ("sky", "sea")


def chat_of(turns: list[Any], system: Any = None) -> list[Json]:
    """The messages that a message's body becomes."""
    return MessagesRequest.model_validate({"messages": turns, "system": system, "max_tokens": 1}).chat().messages


def test_blocks_of_a_message_become_messages_of_a_chat() -> None:
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {"at": "sky"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "blue"}],
        "is_error": True,
    }
    turns = [
        USER,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    assert chat_of(turns, [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]) == [
        {"role": "system", "content": "Be\n\nbrief"},
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "name": "look", "content": "Error: blue"},
        {"role": "user", "content": "so?"},
    ]


@pytest.mark.parametrize("form", [str, lambda text: [{"type": "text", "text": text}]])
def test_a_line_for_the_bill_breaks_no_prefix(form: Callable[[str], Any]) -> None:
    for cch in range(2):
        assert chat_of([USER], form(f"x-anthropic-billing-header: cc_version=2.1; cch={cch};\nBe brief.")) == [
            SYSTEM,
            USER,
        ]
    other = "x-other-header: 1\nBe brief. x-anthropic-billing-header: 2"
    assert chat_of([USER], form(other))[0]["content"] == other


# ------------------------------------------------------------------------------------------------ thoughts


@settings(max_examples=200)
@given(
    st.sampled_from(
        [
            "",
            "a",
            " <think>\n x </thi y\n</think>\n\nb <think> c",
            "<thin",
            "<think>",
            "  ",
            "x </think> y",
            "<think> a \n </think>",
        ]
    ),
    st.booleans(),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_how_a_text_is_cut_does_not_change_its_thought(text: str, inside: bool, cuts: list[int]) -> None:
    def read(pieces: list[str]) -> tuple[str, str]:
        reader = ThinkingReader("x <think>\n" if inside else "x")
        parts = [reader.feed(piece) for piece in pieces] + [reader.feed("", last=True)]
        return "".join(a for a, _ in parts), "".join(b for _, b in parts)

    at = [0, *sorted(cuts), len(text)]
    assert read([text[a:b] for a, b in pairwise(at)]) == read([text])
    if text.startswith(" <think>") and not inside:
        assert read([text]) == ("x </thi y", "b <think> c")
