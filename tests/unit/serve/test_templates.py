"""Chat templates: the text of a child process is transformers' own, and a template without end is ended."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading

import httpx
import pytest
from serving import TEMPLATE, Live, builtin, serving

from outrider import LLM
from outrider.core import child
from outrider.core.child import Child, TooSlow
from outrider.core.rendering import renderer
from outrider.serve import lanes

ENDLESS = (
    "{% for m in messages %}{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{% if m.content == 'grow' %}{{ 'a' * 3000000000 }}{% endif %}"
    "{% if m.content == 'fail' %}{{ raise_exception('roles must alternate') }}{% endif %}# {{ m.content }}\n{% endfor %}"
)
GROWING = "{% set long = 'a' * bytes %}{% for i in range(20) %}{% for c in long[:9999] %}{% endfor %}{% endfor %}x"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return builtin(2)


def say(live: Live, text: str, **more) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **more}
    return httpx.post(live.url + "/v1/chat/completions", json=body, timeout=120)


def test_the_child_renders_what_transformers_does(llm: LLM) -> None:
    messages = [{"role": "user", "content": "räksmörgås"}, {"role": "assistant", "content": "smörgås"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with serving(llm) as live:
        asked = httpx.post(
            live.url + "/v1/chat/completions",
            json={
                "messages": messages,
                "tools": tools,
                "max_tokens": 2,
                "return_token_ids": True,
                "tool_choice": "auto",
            },
            timeout=120,
        ).json()
    expected = llm.tokenizer.apply_chat_template(  # type: ignore[union-attr]
        [{"role": "user", "content": "räksmörgås"}, {"role": "assistant", "content": "smörgås"}],
        tools=tools,
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    assert asked["prompt_token_ids"] == expected


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_mark_of_an_answer_is_there_unless_a_client_leaves_it_out(llm: LLM, asked: bool | None) -> None:
    with serving(llm) as live:
        more = {} if asked is None else {"add_generation_prompt": asked}
        answer = say(live, "x", return_token_ids=True, **more).json()
        refused = say(live, "x", add_generation_prompt=True, continue_final_message=True)
    expected = llm.tokenizer.apply_chat_template(  # type: ignore[union-attr]
        [{"role": "user", "content": "x"}], add_generation_prompt=asked is not False, return_dict=True
    )["input_ids"]
    assert answer["prompt_token_ids"] == expected
    assert refused.status_code == 400
    assert "leave out add_generation_prompt" in refused.text


def test_special_tokens_and_variables_reach_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ eos_token }}|{{ style }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with serving(llm) as live:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"style": "short"}}
        asked = httpx.post(
            live.url + "/v1/chat/completions", json={**body, "max_tokens": 2, "return_token_ids": True}, timeout=120
        ).json()
    eos = llm.tokenizer.eos_token  # type: ignore[union-attr]
    assert asked["prompt_token_ids"] == llm.tokenizer(f"{eos}|short|x", add_special_tokens=False)["input_ids"]  # type: ignore[misc]


def test_an_endless_template_is_refused_and_the_next_chat_is_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "SECONDS", (0.5, 1.0))
    monkeypatch.setattr(llm.tokenizer, "chat_template", ENDLESS)
    with serving(llm) as live:
        before = say(live, "hello").json()["choices"][0]["message"]["content"]
        slow = say(live, "loop")
        assert slow.status_code == 400
        assert "needs more than 1 s to render" in slow.json()["error"]["message"]
        large = say(live, "grow")
        assert large.status_code == 400
        assert "memory" in large.json()["error"]["message"].lower() or "MB" in large.json()["error"]["message"]
        wrong = say(live, "fail").json()["error"]
        assert "the model's chat template does not take these messages: roles must alternate" in wrong["message"]
        assert say(live, "hello").json()["choices"][0]["message"]["content"] == before


def test_a_child_that_was_ended_starts_anew() -> None:
    one = renderer()
    question = {"chat_template": ENDLESS, "messages": [{"role": "user", "content": "x"}]}
    try:
        assert one.ask(question, 60) == "# x\n"
        first = one._process
        assert first is not None
        with pytest.raises(TooSlow, match=r"needs more than 0\.2 s to render"):
            one.ask({**question, "messages": [{"role": "user", "content": "loop"}]}, 0.2)
        assert first.poll() is not None
        assert one.ask({"chat_template": TEMPLATE, "messages": []}, 60) == ""
    finally:
        one.close()
    with pytest.raises(ChildProcessError):
        one.ask(question, 60)


def test_the_system_limits_the_memory_of_a_child() -> None:
    one = renderer()
    try:
        one.ask({"chat_template": TEMPLATE, "messages": []}, 60)
        process = one._process
        assert process is not None
        memory, _ = resource.prlimit(process.pid, resource.RLIMIT_AS)
        assert child.MEMORY < memory < 8 * child.MEMORY
    finally:
        one.close()


def test_a_child_is_ended_where_the_system_limits_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LIMITED", False)
    monkeypatch.setattr(child, "MEMORY", 256 << 20)
    one = renderer()
    try:
        assert one.ask({"chat_template": GROWING, "bytes": 1 << 20, "messages": []}, 60) == "x"
        with pytest.raises(ValueError, match="needs more than 256 MB to render"):
            one.ask({"chat_template": GROWING, "bytes": 900 << 20, "messages": []}, 60)
        assert one.ask({"chat_template": GROWING, "bytes": 1 << 20, "messages": []}, 60) == "x"
    finally:
        one.close()


def test_a_child_without_a_parent_ends() -> None:
    command = [sys.executable, "-c", "from outrider.core import child, rendering; child.answer(rendering.prepare)"]
    question = {"chat_template": ENDLESS, "messages": [{"role": "user", "content": "loop"}]}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as one:
        assert one.stdin is not None
        one.stdin.write(f"null\n{json.dumps([question, 0.1])}\n")
        one.stdin.flush()
        assert one.wait(30) == 1


def test_what_is_slow_gives_way() -> None:
    seen = list[int]()

    def act(_: Child, seconds: float) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if seconds == lanes.SECONDS[0]:
            raise TooSlow("it is slow")

    asyncio.run(lanes.Lanes("x", renderer).ask(act))
    assert seen[0] == os.getpriority(os.PRIO_PROCESS, 0)
    assert seen[1] == min(19, seen[0] + 5)


def test_a_child_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one = child.Child("outrider.core.no_such_module", None, "to render", "")
    with pytest.raises(ChildProcessError, match="did not start"):
        one.ask({}, 60)
