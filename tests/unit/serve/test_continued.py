"""An answer that was cut off goes on: from any token, with any parameters, it is the text that nothing disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from serving import PAIR, Live, builtin, serving

from outrider import LLM, SamplingParams
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.engine.trace import Recorder
from outrider.serve.options import ServeOptions
from outrider_lab.replay import replay
from outrider_lab.traces import read

PROMPT = "def quicksort(xs):\n"
COUNT = 18
# What counts the tokens of an answer apart from those of a prompt, or holds text back
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy presence and frequency": {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    "sampling": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "top_k": 20, "presence_penalty": 1.5},
    "words": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}, "bad_words": ["return", "xs"]},
    "min_tokens": {"temperature": 0.8, "min_tokens": 12, "ignore_eos": False, "logit_bias": {0: 9.0}},
    "stop": {"temperature": 0.8, "stop": ["xs)", "if len("], "min_tokens": 3},
    "stop shown": {"temperature": 0.8, "stop": [":\n"], "include_stop_str_in_output": True, "min_tokens": 6},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return builtin(8)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(4)) as live:
        yield live


def asked(llm: LLM, **options: Any) -> Request:
    [request] = llm.requests(
        llm.encode(PROMPT), SamplingParams(**{"max_tokens": COUNT, "ignore_eos": True, "seed": 7, **options})
    )
    return request


@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_goes_on_from_every_token(llm: LLM, name: str) -> None:
    """Text given out is a function of the tokens, so the rest of the text is exact, too, where some is held back."""
    request = asked(llm, **SETTINGS[name])
    [undisturbed] = Scheduler(llm.decoder).generate([request])
    output = undisturbed.output
    parts = [replace(request, continued=tuple(output[:k])) for k in range(1, len(output) + 1)]
    for k, part in enumerate(Scheduler(llm.decoder).generate(parts), 1):
        assert part.output == output, k
        assert part.written == output[k:], k
        assert part.text == undisturbed.text, k
        assert part.finish == undisturbed.finish, k
        assert undisturbed.text.startswith(part.cursor.continued_text), k
    assert llm.decoder.free


COMMON = {"max_tokens": 14, "temperature": 0.8, "seed": 3, "presence_penalty": 1.0, "return_token_ids": True}
COMMON |= {"stop": ["\n\n\n"], "logprobs": 1}


def test_completions_go_on_whole_and_streamed(live: Live) -> None:
    first = live.ask(prompt=PROMPT, **COMMON)
    choice = first["choices"][0]
    prompt, tokens, told = choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]
    for k in (1, 5, len(tokens)):
        for body in (
            {"prompt": PROMPT, "continued_tokens": tokens[:k]},
            {"prompt": prompt, "continued_tokens": [tokens[:k]]},
        ):
            rest = live.ask(**body, **COMMON)
            found = rest["choices"][0]
            assert found["token_ids"] == tokens[k:]
            assert choice["text"].endswith(found["text"])
            assert found["prompt_token_ids"] == prompt
            assert (found["finish_reason"], found["seed"]) == (choice["finish_reason"], choice["seed"])
            assert {name: values[k:] for name, values in told.items()} == {
                **found["logprobs"],
                "token_logprobs": pytest.approx(found["logprobs"]["token_logprobs"], abs=1e-4),
                "top_logprobs": [pytest.approx(x, abs=1e-4) for x in found["logprobs"]["top_logprobs"]],
            }
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert rest["usage"][name] == first["usage"][name]


def test_a_stream_goes_on_from_every_event(live: Live) -> None:
    """Joined events of the first part and of the continuation are the text, where stop strings and bytes are held back."""
    body = {**COMMON, "prompt": "# ééé 日本語\n", "max_tokens": 24, "stop": ["zzzzz", "\n    \n"]}
    body |= {"allowed_token_ids": live.ask("/tokenize", prompt="日本語é")["tokens"], "presence_penalty": 0.1}
    chunks = [c["choices"][0] for c in live.events("/v1/completions", **body)]
    text = "".join(c["text"] for c in chunks)
    before, tokens, cuts = "", [], 0
    for chunk in chunks:
        before, tokens = before + chunk["text"], tokens + chunk.get("token_ids", [])
        if tokens and chunk.get("token_ids"):
            rest = [c["choices"][0] for c in live.events("/v1/completions", **body, continued_tokens=tokens)]
            assert before + "".join(c["text"] for c in rest) == text
            assert rest[-1]["finish_reason"] == chunks[-1]["finish_reason"]
            cuts += 1
    assert cuts > 4
    assert len(before.encode()) > len(before)


def test_several_choices_and_chats_go_on(live: Live) -> None:
    body = {**COMMON, "prompt": [PROMPT, "import os\n"], "n": 2}
    choices = live.ask(**body)["choices"]
    lists = [c["token_ids"][:k] for c, k in zip(choices, (0, 4, 14, 7), strict=True)]
    rest = live.ask(**body, continued_tokens=lists)["choices"]
    assert [c["token_ids"] for c in rest] == [c["token_ids"][len(x) :] for c, x in zip(choices, lists, strict=True)]
    chat = {"messages": [{"role": "user", "content": "sort"}], **COMMON, "logprobs": True, "top_logprobs": 1}
    whole = live.ask("/v1/chat/completions", **chat)
    tokens, content = whole["choices"][0]["token_ids"], whole["choices"][0]["message"]["content"]
    parts = live.events(
        "/v1/chat/completions", **chat, continued_tokens=tokens[:5], stream_options={"include_usage": True}
    )
    assert [t for c in parts for x in c["choices"] for t in x.get("token_ids", ())] == tokens[5:]
    assert content.endswith("".join(x["delta"].get("content", "") for c in parts for x in c["choices"]))
    assert "role" not in parts[0]["choices"][0]["delta"]  # that was said at the beginning
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_tool_calls_go_on(live: Live) -> None:
    """A call that is half written when the answer is cut comes whole, and one that was sent comes once."""
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "stop"}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required", "seed": 1}
    body |= {"max_tokens": 100, "return_token_ids": True, "parallel_tool_calls": False}
    whole = live.ask("/v1/chat/completions", **body)["choices"][0]
    [call], tokens = whole["message"]["tool_calls"], whole["token_ids"]
    chunks, before, sent = live.events("/v1/chat/completions", **body), list[int](), 0
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        sent, new = sent + len(choice["delta"].get("tool_calls", ())), choice.get("token_ids", [])
        before += new
        if new:
            parts = live.events("/v1/chat/completions", **body, continued_tokens=before)
            calls = [x for c in parts for x in c["choices"][0]["delta"].get("tool_calls", ())]
            assert len(calls) == 1 - sent
            assert [(c["index"], c["function"]) for c in calls] == [(0, call["function"])][sent:]
            assert parts[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert before == tokens
    assert sent == 1


def test_what_cannot_go_on_is_refused(live: Live) -> None:
    full = live.ask(prompt=PROMPT, **COMMON)["choices"][0]["token_ids"]
    for body, says in (
        ({"prompt": PROMPT, "continued_tokens": 3}, "continued_tokens"),
        ({"prompt": PROMPT, "continued_tokens": [1], "n": 2}, "1 lists"),
        ({"prompt": PROMPT, "continued_tokens": [[1], [2]]}, "2 lists"),
        ({"prompt": PROMPT, "continued_tokens": [10**6]}, "outside the vocabulary"),
        ({"prompt": PROMPT, "continued_tokens": [*full, 5]}, "max_tokens is reached"),
        ({"prompt": PROMPT, "continued_tokens": [5], "max_tokens": 0, "echo": True}, "cannot be continued"),
    ):
        response = httpx.post(live.url + "/v1/completions", json={**COMMON, **body})
        assert response.status_code == 400, body
        assert says in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("verify", ["match", "block"])
def test_a_continued_text_is_traced_and_replayed(tmp_path, verify: str) -> None:
    config = {**PAIR, "rejection_sample_method": verify} if verify != "match" else PAIR
    llm = builtin(1, config, trace=Recorder(tmp_path / "t.jsonl"))
    [first] = llm.scheduler.generate([asked(llm, temperature=0.8)])
    [rest] = llm.scheduler.generate([replace(first.request, id=99, continued=tuple(first.output[:5]))])
    assert llm.trace is not None
    llm.trace.close()
    trace = read(tmp_path / "t.jsonl")
    assert trace.texts[99].request.continued == 5
    assert trace.texts[99].tokens == rest.written
    found = replay(trace, llm.decoder, 2, 99)
    assert found.same
    assert list(found.written) == trace.texts[99].steps[2].written


def test_a_server_of_shorter_texts_checks_the_whole_text() -> None:
    with serving(builtin(1, None), ServeOptions(model="code"), kv_tokens=24) as live:
        ids = live.ask("/tokenize", prompt=PROMPT)["tokens"]
        body = {"prompt": ids, "max_tokens": 40, "continued_tokens": [5] * 4}
        response = httpx.post(live.url + "/v1/completions", json=body)
        assert response.status_code == 400
        assert "max_tokens" in response.json()["error"]["message"]
