"""The page at / in a real Chromium, over a real server: it chats, it stops, and it shows texts as texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.serve.options import ServeOptions
from tests.browser.conftest import violations
from tests.support.serving import Live, builtin, serving

HOSTILE = '<img src=x onerror="document.title=1">\u202eb'


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin()) as found:
        yield found


def say(page: Any, text: str, tokens: int = 12) -> None:
    page.locator("#most").fill(str(tokens))
    page.locator("#input").fill(text)
    page.locator("#input").press("Enter")


def done(page: Any, texts: int) -> None:
    page.locator("#send:enabled").wait_for()
    page.locator("#log .text").nth(texts - 1).wait_for()


def test_it_chats_with_history(live: Live, visit: Any) -> None:
    with visit(live.url) as seen:
        page, bodies = seen.page, list[Any]()
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        page.locator("#model", has_text="code").wait_for()
        assert page.locator("#key-form").is_hidden()
        say(page, f"sort a list {HOSTILE}")
        done(page, 2)
        page.locator("#figures", has_text="12 tokens").wait_for()
        assert page.locator("#log .text").nth(0).inner_text() == f"sort a list {HOSTILE}".replace("\u202e", "\\u202e")
        say(page, "and again")
        done(page, 4)
        assert [one["role"] for one in bodies[1]["messages"]] == ["user", "assistant", "user"]
        assert bodies[1]["messages"][1]["content"] == page.locator("#log .text").nth(1).text_content()
        assert page.locator("#log img").count() == 0
        page.get_by_role("button", name="New").click()
        assert page.locator("#log .text").count() == 0
        assert {url.split("/")[2] for url in seen.asked} == {live.url.split("/")[2]}


def test_what_a_model_writes_is_text(live: Live, visit: Any) -> None:
    chunk = {"choices": [{"delta": {"content": HOSTILE}}]}
    with visit(live.url) as seen:
        page = seen.page
        page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
        )
        page.locator("#model", has_text="code").wait_for()
        say(page, "x")
        done(page, 2)
        assert page.locator("#log .text").nth(1).inner_text() == HOSTILE.replace("\u202e", "\\u202e")
        assert page.locator("#log img").count() == 0
        assert page.title() == "outrider"


def test_an_answer_can_be_stopped(visit: Any) -> None:
    """It is written slowly, a token at a time, so it runs when it is stopped."""
    with serving(builtin(), ServeOptions(model="code", pad_stream=50)) as live, visit(live.url) as seen:
        page = seen.page
        page.locator("#model", has_text="code").wait_for()
        page.locator("#temperature").fill("0")
        say(page, "write", 1500)
        page.locator("#log .text").nth(1).filter(has_text=re.compile("[^ ]")).wait_for()
        page.locator("#stop").click()
        page.locator("#figures", has_text="Stopped.").wait_for()
        assert page.locator("#log .text").nth(1).inner_text().strip()
        while live.service.engine.stats.running:
            page.wait_for_timeout(20)


def test_a_refusal_is_said_and_the_text_is_kept(live: Live, visit: Any) -> None:
    with visit(live.url) as seen:
        page = seen.page
        page.locator("#model", has_text="code").wait_for()
        say(page, "x", 100_000)
        page.locator("#problem", has_text="100000").wait_for()
        assert page.locator("#input").input_value() == "x"
        assert page.locator("#log .text").count() == 0
        seen.problems.clear()  # the browser logs the 400


def test_a_model_without_a_template_continues_the_text(visit: Any) -> None:
    llm = builtin()
    llm.tokenizer.chat_template = None  # type: ignore[union-attr]
    with serving(llm) as live, visit(live.url) as seen:
        page, bodies = seen.page, list[Any]()
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        page.locator("#chat-title", has_text="Continue a text").wait_for()
        page.locator("#model", has_text="code").wait_for()
        for n, text in enumerate(("def f(x):", "\ndef g("), 1):
            say(page, text)
            done(page, 2 * n)
        assert bodies[1]["prompt"] == "".join(page.locator("#log .text").all_text_contents()[:3])


def test_a_key_is_asked_for_once(visit: Any) -> None:
    with serving(builtin(), ServeOptions(model="code", api_key=["secret"])) as live, visit(live.url) as seen:
        page = seen.page
        page.locator("#problem", has_text="key is missing").wait_for()
        assert page.locator("#chat").is_hidden()
        for key in ("wrong", "secret"):
            page.locator("#key").fill(key)
            page.locator("#key").press("Enter")
        page.locator("#model", has_text="code").wait_for()
        assert page.locator("#key-form").is_hidden()
        say(page, "sort")
        done(page, 2)
        seen.problems.clear()  # the browser logs each 401


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_every_width_and_scheme_is_accessible(live: Live, visit: Any, scheme: str, width: int) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}, "bypass_csp": True}
    with visit(live.url, **options) as seen:
        seen.page.locator("#model", has_text="code").wait_for()
        say(seen.page, "sort")
        done(seen.page, 2)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(seen.page) == []
