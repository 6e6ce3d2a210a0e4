"""Chats at the server: the prompt of every route is that of the library, and what a template refuses is a 400 with its words."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Live, builtin, serving

from outrider import LLM
from outrider.models.chat_template import set_chat_template
from outrider.serve.encoding import give_way


@pytest.fixture(scope="module")
def llm() -> LLM:
    return builtin(2, None)


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    with serving(llm) as live:
        yield live


def chat(live: Live, *messages: dict[str, Any], **more: Any) -> httpx.Response:
    more = {"max_tokens": 2, "return_token_ids": True} | more
    return live.post("/v1/chat/completions", messages=messages, **more)


def test_instructions_reach_the_model_as_developer_and_as_system(live: Live, llm: LLM) -> None:
    asked = {"role": "user", "content": "x"}
    for first in ("system", "developer"):
        chat_ids = chat(live, {"role": first, "content": "Be brief."}, asked).json()["prompt_token_ids"]
        assert chat_ids == llm.encode([{"role": "system", "content": "Be brief."}, asked])
    both = [{"role": "system", "content": "Be brief.\n\nIn French."}, asked]
    for body in (
        {"instructions": "Be brief.", "input": [{"role": "developer", "content": "In French."}, asked]},
        {"input": [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "In French."}, asked]},
    ):
        answer = live.post("/v1/responses", max_output_tokens=1, **body).json()
        assert answer["usage"]["input_tokens"] == len(llm.encode(both))


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_mark_of_an_answer_is_there_unless_a_client_leaves_it_out(live: Live, llm: LLM, asked: bool | None) -> None:
    message = {"role": "user", "content": "x"}
    answer = chat(live, message, **({} if asked is None else {"add_generation_prompt": asked})).json()
    template: Any = llm.tokenizer
    ids = template.apply_chat_template([message], add_generation_prompt=asked is not False, return_dict=True)
    assert answer["prompt_token_ids"] == ids["input_ids"]
    refused = chat(live, message, add_generation_prompt=True, continue_final_message=True)
    assert refused.status_code == 400
    assert "leave out add_generation_prompt" in refused.text


def test_special_tokens_and_variables_reach_the_template(live: Live, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ eos_token }}|{{ style }}|{{ (documents or [{}])[0].text }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    kwargs = {"style": "short", "documents": [{"text": "d"}]}
    found = chat(live, {"role": "user", "content": "x"}, chat_template_kwargs=kwargs).json()["prompt_token_ids"]
    eos: Any = llm.tokenizer.eos_token  # type: ignore[union-attr]
    assert found == llm.tokenizer(f"{eos}|short|d|x", add_special_tokens=False)["input_ids"]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("fail", "the model's chat template does not take these messages: roles must alternate"),
        ("deep", "the model's chat template does not take these messages: "),
        ("gone", "shows nothing of messages.0 (user: 'gone'"),
    ],
)
def test_what_a_template_cannot_do_is_refused(
    live: Live, llm: LLM, monkeypatch: pytest.MonkeyPatch, content: str, words: str
) -> None:
    template = (
        "{% macro again() %}{{ again() }}{% endmacro %}{% for m in messages %}"
        "{% if m.content.startswith('fail') %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.content.startswith('deep') %}{{ again() }}{% endif %}"
        "{% if not m.content.startswith('gone') %}# {{ m.content }}\n{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    answer = chat(live, {"role": "user", "content": content})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert words in answer.json()["error"]["message"]
    assert chat(live, {"role": "user", "content": "x"}).status_code == 200


def test_a_template_with_a_mistake_is_refused_when_it_is_given(llm: LLM) -> None:
    with pytest.raises(ValueError, match="this is no chat template"):
        set_chat_template(llm.tokenizer, "builtin:code", "{% for %}")


def test_what_is_slow_gives_way() -> None:
    seen = list[int]()

    def act() -> None:
        give_way()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert seen == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)]
