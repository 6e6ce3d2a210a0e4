"""The page at / in a real Chromium, over a real server: it chats, it stops, and it shows texts as texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from chromium import violations

from outrider.serve.options import ServeOptions
from tests.support.serving import Live, builtin, serving

HOSTILE = '<img src=x onerror="document.title=1">\u202eb'


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin()) as found:
        yield found


def say(page: Any, text: str, tokens: int = 12) -> None:
    page.locator("#settings").evaluate("settings => (settings.open = true)")
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
        page.locator("#colours").check()  # a text as it came, without Markdown
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
        page.locator("#temperature").evaluate("field => (field.value = 0)")
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


def stand_in(page: Any, pieces: list[tuple[str, bool]], again: str | None = None) -> None:
    """Answer for the server: these pieces, and `again` as the text without drafts."""

    def answer(route: Any) -> None:
        plain = route.request.post_data_json.get("disable_spec_decode")
        parts = [(again, False)] if plain and again is not None else pieces
        events = [{"choices": [{"delta": {"content": "".join(t for t, _ in parts)}, "pieces": parts}]}]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop", "seed": 7}]})
        usage = {"usage": {"completion_tokens": 4}, "metrics": {"mean_itl_ms": 20.0 if plain else 10.0}, "choices": []}
        route.fulfill(body="".join(f"data: {json.dumps(e)}\n\n" for e in [*events, usage]) + "data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)


def test_markdown_becomes_elements_and_never_markup(live: Live, visit: Any) -> None:
    text = (
        "# Head\n\nA *word* of `code` & <b>more</b> [site](https://a.example/x) [bad](javascript:alert(1)) "
        '![i](https://a.example/i.png)\n\n<img src=x onerror="document.title=1">\n\n1. one\n2. two\n\n'
        '```python\nprint("<i>")\n```\n\n'
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n> said"
    )
    with visit(live.url) as seen:
        page = seen.page
        stand_in(page, [(text, False)])
        page.locator("#model", has_text="code").wait_for()
        say(page, "x")
        done(page, 2)
        found = page.locator("#log .text").nth(1)
        assert found.locator("h3, em, ol li, pre code, table td, blockquote").all_text_contents() == [
            "Head", "word", "one", "two", 'print("<i>")', "1", "2", "said",
        ]  # fmt: skip
        assert found.locator("a").evaluate_all("all => all.map((a) => [a.getAttribute('href'), a.rel])") == [
            [f"https://a.example/{rest}", "noopener noreferrer"] for rest in ("x", "i.png")
        ]
        assert found.locator("img, b, i, script").count() == 0
        assert "<b>more</b>" in found.inner_text()
        assert "javascript:alert(1)" in found.inner_text()
        assert page.title() == "outrider"
        assert {url.split("/")[2] for url in seen.asked} == {live.url.split("/")[2]}


def test_the_same_text_is_written_again_without_speculation(live: Live, visit: Any) -> None:
    """Over the real engine. The pieces of a text are the text, and the drafted ones have their colour."""
    with visit(live.url) as seen:
        page, bodies = seen.page, list[Any]()
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        page.locator("#model", has_text="code").wait_for()
        say(page, "for i in range(10):", 48)
        done(page, 2)
        page.locator("#figures", has_text=re.compile("48 tokens.*seed [0-9]+. It was cut there")).wait_for()
        page.locator("#colours").check()
        text = page.locator("#log .text").nth(1)
        assert text.locator("span.accepted").count() > 0
        page.get_by_role("button", name="Again without speculation").click()
        page.locator(".same", has_text="The same text.").wait_for()
        first, second = bodies
        assert second["disable_spec_decode"]
        assert second["seed"] >= 0
        assert second["messages"] == first["messages"]
        whole = {"stream": False, "return_pieces": None, "stream_options": None}
        assert (
            text.text_content()
            == httpx.post(f"{live.url}/v1/chat/completions", json={**second, **whole}).json()["choices"][0]["message"][
                "content"
            ]
        )


def test_a_text_that_grows_is_followed_until_the_reader_scrolls_away(visit: Any) -> None:
    """It is written slowly. The text without speculation grows below the first one, and is followed, too."""

    def long(route: Any) -> None:
        """One text in every run, which does not end before its length is reached."""
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "seed": 1, "ignore_eos": True}))

    with serving(builtin(), ServeOptions(model="code", pad_stream=20)) as live, visit(live.url) as seen:
        page = seen.page
        page.route("**/v1/chat/completions", long)
        page.locator("#model", has_text="code").wait_for()
        log = page.locator("#log")

        def grown(part: Any, pixels: int) -> None:
            page.locator("#stop:enabled").wait_for()
            while (height := (part.bounding_box() or {"height": 0})["height"]) < pixels:
                assert page.locator("#stop").is_enabled(), f"the text ended at {height} pixels"
                page.wait_for_timeout(20)

        def ends(part: Any) -> float:
            page.wait_for_timeout(100)
            own, seen = part.bounding_box(), log.bounding_box()
            return own["y"] + own["height"] - seen["y"] - seen["height"]

        say(page, "for i in range(10):", 400)
        grown(log.locator(".model").first, 600)
        assert ends(log.locator(".model").first) < 40
        log.evaluate("log => (log.scrollTop = 0)")
        page.wait_for_timeout(300)
        assert log.evaluate("log => log.scrollTop") == 0
        done(page, 2)
        assert log.evaluate("log => log.scrollTop") == 0
        page.get_by_role("button", name="Again without speculation").click()
        beside = log.locator(".model > div").last
        grown(beside, 200)
        assert ends(beside) < 40
        page.locator("#stop").click()


def test_texts_that_differ_are_said_to_differ(live: Live, visit: Any) -> None:
    with visit(live.url) as seen:
        page = seen.page
        stand_in(page, [("one ", False), ("two", True)], again="one too")
        page.locator("#model", has_text="code").wait_for()
        say(page, "x")
        done(page, 2)
        page.get_by_role("button", name="Again without speculation").click()
        page.locator(".differs", has_text="This is a bug").wait_for()


def test_conversations_are_kept_edited_retried_and_forgotten(live: Live, visit: Any) -> None:
    with visit(live.url) as seen:
        page, bodies = seen.page, list[Any]()
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        stand_in(page, [("fine", False)])
        page.locator("#model", has_text="code").wait_for()
        page.get_by_text("Settings").click()
        page.locator("#system").fill("Be short.")
        page.locator("#top_k").fill("5")
        for n, text in enumerate(("first", "second"), 1):
            say(page, text)
            done(page, 2 * n)
        roles = ["system", "user", "assistant", "user"]
        assert [one["role"] for one in bodies[1]["messages"]] == roles
        assert bodies[1]["top_k"] == 5
        page.get_by_role("button", name="Retry").last.click()
        done(page, 4)
        assert bodies[2]["messages"] == bodies[1]["messages"]
        page.get_by_role("button", name="Edit").last.click()
        assert page.locator("#input").input_value() == "second"
        say(page, "changed")
        done(page, 4)
        assert [one["content"] for one in bodies[3]["messages"]] == ["Be short.", "first", "fine", "changed"]
        page.reload()
        page.locator("#kept button", has_text="first").click()
        assert page.locator("#log .text").all_text_contents() == ["first", "fine", "changed", "fine"]
        assert page.locator("#system").input_value() == "Be short."
        page.get_by_role("button", name="Delete all").click()
        page.reload()
        page.locator("#model", has_text="code").wait_for()
        assert page.locator("#kept button").count() == 0


def test_the_page_is_small_and_painted_before_its_script(live: Live) -> None:
    assert sum(len(httpx.get(live.url + path).content) for path in ("/", "/home.js")) < 120_000
    page = httpx.get(live.url).text
    assert re.findall("<script[^>]*>", page) == [
        '<script type="application/json" id="data">',
        '<script type="module" src="home.js">',
    ]
    assert "script-src 'self';" in page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_every_width_and_scheme_is_accessible(live: Live, visit: Any, scheme: str, width: int) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}, "bypass_csp": True}
    with visit(live.url, **options) as seen:
        seen.page.locator("#model", has_text="code").wait_for()
        stand_in(
            seen.page,
            [("# Sorted\n\n```python\nsorted(x)\n```\n\n# \n\n| a |\n|---|\n| 1 |\n\n", False), ("- done", True)],
        )
        say(seen.page, "sort")
        done(seen.page, 2)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(seen.page) == []
        seen.page.locator("#colours").check()
        seen.page.get_by_role("button", name="Again without speculation").click()
        seen.page.locator(".same").wait_for()
        assert violations(seen.page) == []
