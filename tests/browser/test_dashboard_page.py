"""The dashboard in a real Chromium, over a real server that works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chromium import violations

from outrider.engine.llm import LLM
from outrider.engine.trace import Detail, Recorder
from outrider.serve.options import ServeOptions
from tests.support.serving import Live, builtin, serving

PROMPT = "def quicksort(xs):\n<b>not markup</b>"

# The width of each bar and the per cent beside it. `clientWidth` is a whole number, too coarse for a narrow bar.
BARS = """() => [...document.querySelectorAll(".bars .bar")].map((bar) => [
  100 * bar.firstChild.getBoundingClientRect().width / (bar.getBoundingClientRect().width - 2 * bar.clientLeft),
  bar.nextSibling.textContent.match(/([\\d.]+) %$/)?.[1]])
  .filter(([, share]) => share).map(([width, share]) => [width, Number(share)])"""
SIGNS = ['"✓"', '"✗"', '"="']


def ask(live: Live, n: int = 1, **more: Any) -> None:
    for _ in range(n):
        body = {"model": "code", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **more}
        keys = live.service.settings.api_key
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        httpx.post(f"{live.url}/v1/completions", json=body, headers=headers).raise_for_status()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin()) as found:
        yield found


def settled(page: Any) -> None:
    page.locator("#state", has_text="Live.").wait_for()


def test_it_shows_what_the_server_does(live: Live, visit: Any) -> None:
    with visit(f"{live.url}/dashboard") as seen:
        page = seen.page
        settled(page)
        ask(live, 3)
        page.locator("#requests tbody tr").nth(2).wait_for()
        assert "tokens/s" in page.locator("#facts").inner_text()
        assert page.locator("#survival .bar").count() >= 2
        assert "target" in page.locator("#phases").inner_text()
        assert page.locator("#answer").inner_text().startswith("Too few requests to say: ")
        assert "Updated at" in page.locator("#updated").inner_text()
        assert page.locator(".dot.live").count() == 1
        shares = page.evaluate(BARS)
        assert len(shares) >= 6
        assert all(width == pytest.approx(share, abs=0.6) for width, share in shares)
        assert sum(share == 0 for _, share in page.evaluate(BARS.replace(".bars", "#survival"))) <= 1
        assert page.locator("#rate-chart path").count() >= 1
        page.get_by_role("radio", name="10 s").click()
        assert page.locator("#window [aria-checked=true]").inner_text() == "10 s"
        assert "not shown" in page.locator("#requests-note").inner_text()
        assert "quicksort" not in page.content()
        assert {url.split("/")[2] for url in seen.asked} == {live.url.split("/")[2]}


def test_it_shows_what_was_weighed(visit: Any) -> None:
    config = {"method": ["suffix", "draft_model"], "model": "builtin:code-draft"}
    llm = LLM("builtin:code", speculative_config=config, max_num_seqs=2)
    with serving(llm) as live, visit(f"{live.url}/dashboard") as seen:
        page = seen.page
        settled(page)
        ask(live, 6)
        page.locator("#requests tbody tr").nth(5).wait_for()
        assert page.locator("#plans .bar").count() >= 1
        [row] = [text for text in page.locator("#weighed tbody tr").all_inner_texts() if "draft_model" in text]
        assert "ms" in row or "µs" in row
        assert "times as fast as plain decoding" in page.locator("#answer").inner_text()
        assert page.locator("#box").evaluate("node => getComputedStyle(node).getPropertyValue('--sign')") in SIGNS


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_every_width_and_scheme_is_accessible(live: Live, visit: Any, scheme: str, width: int) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}, "bypass_csp": True}
    with visit(f"{live.url}/dashboard", **options) as seen:
        settled(seen.page)
        ask(live, 2)
        seen.page.locator("#requests tbody tr").nth(1).wait_for()
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.page.locator("#requests").bounding_box()["width"] >= min(width, 1000) - 100
        assert violations(seen.page) == []


def test_texts_are_shown_only_if_the_trace_holds_them(tmp_path: Path, visit: Any) -> None:
    recorder = Recorder(tmp_path / "run.jsonl", Detail.TOKENS)
    with serving(builtin(), trace=recorder) as live, visit(f"{live.url}/dashboard") as seen:
        settled(seen.page)
        ask(live)
        assert seen.page.locator("#texts summary").first.inner_text().endswith(": def quicksort(xs):↵<b>not markup</b>")
        seen.page.locator("#texts summary").first.click()
        shown = seen.page.locator("#texts .answer").first
        assert PROMPT in shown.evaluate("node => node.textContent")
        assert shown.locator(".accepted").count() >= 1
        assert shown.locator("b").count() == 0


def test_a_key_guards_every_page(visit: Any, browser: Any) -> None:
    with serving(builtin(), ServeOptions(model="code", api_key=["secret"])) as live:
        for path in ("/dashboard", "/dashboard/events"):
            answer = httpx.get(live.url + path)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic")
            assert httpx.get(live.url + path, auth=("x", "wrong")).status_code == 401
        assert httpx.get(f"{live.url}/v1/models", auth=("x", "secret")).status_code == 401
        with visit(f"{live.url}/dashboard", http_credentials={"username": "any", "password": "secret"}) as seen:
            settled(seen.page)
            ask(live)
            seen.page.locator("#requests tbody tr").first.wait_for()
            seen.problems.clear()  # the first 401, which makes the browser ask


def test_a_hidden_page_asks_nothing(live: Live, visit: Any) -> None:
    dashboard = live.dashboard
    with visit(f"{live.url}/dashboard") as seen:
        settled(seen.page)
        assert len(dashboard.viewers) == 1
        seen.page.evaluate("""() => {
          Object.defineProperty(document, "hidden", { value: true, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""")
        seen.page.locator("#state", has_text="Paused").wait_for()
        while dashboard.viewers:
            seen.page.wait_for_timeout(50)
        assert live.service.engine.scheduler.observers == (live.metrics,)
        seen.page.evaluate("""() => {
          Object.defineProperty(document, "hidden", { value: false });
          document.dispatchEvent(new Event("visibilitychange"));
        }""")
        settled(seen.page)
