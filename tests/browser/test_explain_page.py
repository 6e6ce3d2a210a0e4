"""The page of a run in a real Chromium: every control, without network, for every reader, and with texts that mean harm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.explain import builtin, explained, render
from outrider.explain.page import ASSETS
from outrider.trace import read
from tests.browser.conftest import violations
from tests.support.explained import HostileTokenizer, long_trace

SECTIONS = ("run", "lossless", "speed", "shape", "attention")
READY = "body[data-ready=yes]"
FOCUSED = """() => {
  const node = document.activeElement;
  return `${node.closest("section")?.id}|${node.id || node.textContent.trim().slice(0, 20)}`;
}"""
MOVING = """() => [...document.querySelectorAll("*")].map((node) => getComputedStyle(node)).filter(
  (style) => style.transitionDuration !== "0s" || style.animationName !== "none").length"""


@pytest.fixture(scope="session")
def page_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(render(builtin()))
    return file.as_uri()


def test_it_is_one_small_file_that_asks_nobody(page_url: str, visit: Any) -> None:
    run = builtin()
    assert len(render(run)) - len(run.to_json()) < 400_000
    with visit(page_url) as seen:
        seen.page.wait_for_selector(READY)
        assert seen.asked == [page_url]


def test_the_policy_allows_no_other_script(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        seen.page.evaluate(
            "() => { const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s); }"
        )
        assert seen.page.title() == "Speculative decoding, explained on a real run"
        assert any("Content Security Policy" in problem for problem in seen.problems)
        seen.problems.clear()


def caption(page: Any) -> str:
    return page.locator("#run-caption").inner_text()


def test_stepping_by_buttons_keys_and_scrubber(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page = seen.page
        page.get_by_role("button", name="Start").click()
        assert caption(page).startswith("Step 1 of")
        assert "proposes" in caption(page)
        page.get_by_role("button", name="Next ›").click()
        assert page.locator("#run-tree .node").count() == 3
        page.get_by_role("button", name="Back").click()
        assert page.locator("#run-tree .node").count() == 2
        page.get_by_role("button", name="Next step").click()
        assert caption(page).startswith("Step 2 of")
        stage = page.locator("#run-stage")
        stage.focus()
        page.keyboard.press("Home")
        assert caption(page).startswith("Step 1 of")
        seen_kinds = set[str]()
        for _ in range(24):
            page.keyboard.press("ArrowRight")
            seen_kinds |= {
                word for word in ("proposes", "pass of the target", "accepted", "own token") if word in caption(page)
            }
        assert len(seen_kinds) == 4
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("End")
        last = json.loads(builtin().to_json())["requests"][0]["steps"]
        assert caption(page).startswith(f"Step {len(last)} of {len(last)}")
        text = page.locator("#run-text").inner_text()
        page.locator("#run-scrub").fill("0")
        assert caption(page).startswith("Step 1 of")
        assert page.locator("#run-text").inner_text() != text
        page.get_by_role("button", name="Play").click()
        while page.locator("#run-scrub").input_value() == "0":
            page.wait_for_timeout(100)
        page.get_by_role("button", name="Pause").click()


def test_the_text_and_both_clocks_are_those_of_the_run(page_url: str, visit: Any) -> None:
    run = builtin()
    tokens = [t for s in run.requests[0].steps for t in [*(s.tokens[n] for n in s.path[1:]), s.token][: s.committed]]  # type: ignore[index, union-attr]
    with visit(page_url) as seen:
        page = seen.page
        page.locator("#run-stage").focus()
        page.keyboard.press("End")
        shown = page.locator("#run-text").evaluate("node => node.textContent")
        assert shown == "".join(run.texts[t] for t in [*run.requests[0].prompt, *tokens])  # type: ignore[misc]
        said = page.locator("#run-saved").inner_text()
        assert f"whole text of {len(tokens)} tokens takes {len(run.requests[0].steps)} passes" in said
        assert "Passes are not time" in said
        page.get_by_role("radio", name="Seconds, measured").click()
        assert " s with the draft" in page.locator("#run-saved").inner_text()
        assert "Passes are not time" not in page.locator("#run-saved").inner_text()
        page.get_by_role("radio", name="Passes of the target").click()
        page.locator("#run-stage").focus()
        page.keyboard.press("Home")
        for _ in range(len(run.requests[0].steps[0].tokens or []) - 1):
            page.keyboard.press("ArrowRight")
        assert "After 1 pass, before the verdict: 0 against 1 tokens" in page.locator("#run-saved").inner_text()


def test_a_token_tells_its_probabilities(page_url: str, visit: Any) -> None:
    run = builtin()
    step = run.requests[0].steps[0]
    assert step.p is not None
    assert step.q is not None
    with visit(page_url) as seen:
        node = seen.page.locator("#run-tree .node").nth(1)
        node.hover()
        detail = seen.page.locator("#run-detail").inner_text()
        assert "target, p" in detail
        assert "draft model, q" in detail
        assert "noise" in detail
        assert "rank" in detail
        assert f"{step.p[1]:.3f}"[:4] in detail
        node.click()
        assert seen.page.locator("#run-tree .node").nth(1).get_attribute("aria-pressed") == "true"


def test_drawing_by_the_rules(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page, distance = seen.page, seen.page.locator("#lossless-tv")
        for draws in ("1", "100", "10000"):
            page.locator(f"[data-draws='{draws}']").click()
        assert "10,101 draws" in page.locator("#lossless-body [role=status]").inner_text()
        assert float(distance.inner_text()) < 0.03
        for name in ("no residual", "keep only the likeliest", "another draft temperature"):
            page.get_by_role("radio", name=name).click()
            page.locator("[data-draws='10000']").click()
            assert float(distance.inner_text()) > 0.01, name
            assert "never goes away" in page.locator("#lossless-body").inner_text()
        page.get_by_role("radio", name="match").click()
        page.locator("[data-draws='10000']").click()
        assert float(distance.inner_text()) < 0.03
        assert "One race" in page.locator("#lossless-body").inner_text()
        page.get_by_role("button", name="Clear").click()
        assert distance.inner_text() == "–"
        page.locator("#lossless-preset").select_option("equal")
        assert "nothing is ever rejected" in page.locator("#lossless-body").inner_text()
        page.locator("#lossless-size").select_option("8")
        assert page.locator("[data-bar]").count() == 16


def test_bars_are_moved_by_keys_and_by_dragging(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page = seen.page

        def value() -> int:
            return int(page.locator("[data-bar=p1]").get_attribute("aria-valuenow"))

        before = value()
        page.locator("[data-bar=p1]").focus()
        for _ in range(5):
            page.keyboard.press("ArrowUp")
        assert value() == before + 10
        page.locator("[data-bar=p1]").scroll_into_view_if_needed()
        box = page.locator("[data-bar=p1]").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x, y + 40, steps=4)
        page.mouse.up()
        assert value() < before + 8


def slide(page: Any, name: str, value: float) -> None:
    page.locator(f"#{name}").fill(str(value))


def test_speed_follows_the_sliders(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page = seen.page
        curves = page.locator("#speed-curve option").all_inner_texts()
        page.locator("#speed-curve").select_option(label=next(c for c in curves if c.startswith("Ideal")))
        for name, value in (("speed-c", 0), ("speed-alpha", 0.5), ("speed-depth", 3), ("speed-width", 1)):
            slide(page, name, value)
        assert page.locator("#speed-result").inner_text() == "1.88×"  # 1 + 1/2 + 1/4 + 1/8
        slide(page, "speed-width", 3)
        assert float(page.locator("#speed-result").inner_text()[:-1]) > 1.88
        slide(page, "speed-c", 0.5)
        slide(page, "speed-alpha", 0.05)
        assert "no draft helps" in page.locator("#speed-body [role=status]").inner_text()
        page.locator("#speed-curve").select_option(label="NVIDIA H100 SXM")
        alone = page.locator("#speed-body [role=status]").inner_text()
        slide(page, "speed-batch", 128)
        assert page.locator("#speed-body [role=status]").inner_text() != alone
        page.get_by_role("radio", name="Measured in this run").click()
        assert page.locator("#speed-alpha").is_disabled()
        page.locator("#speed-body summary").click()
        assert page.locator("#speed-body table").is_visible()


def test_shapes_and_masks_follow_theirs(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page = seen.page
        said = page.locator("#shape-body [role=status]")
        first = said.inner_text()
        slide(page, "shape-nodes", 12)
        assert "With 12 draft tokens" in said.inner_text()
        assert said.inner_text() != first
        before = page.locator("#shape-body .trees").inner_html()
        slide(page, "shape-at", 30)
        assert page.locator("#shape-body .trees").inner_html() != before
        page.locator("#shape-body summary").click()
        assert page.locator("#shape-body table").is_visible()
        reads = page.locator("#attention-body .bytes").inner_text()
        slide(page, "attention-context", 131072)
        assert page.locator("#attention-body .bytes").inner_text() != reads
        slide(page, "attention-step", 1)
        assert "Step 2" in page.locator("#attention-body [role=status]").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_every_width_and_scheme_is_accessible(page_url: str, visit: Any, scheme: str, width: int) -> None:
    with visit(page_url, color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True) as seen:
        page = seen.page
        page.wait_for_selector(READY)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator("#run-stage").focus()
        for _ in range(9):
            page.keyboard.press("ArrowRight")
        for summary in page.locator("summary").all():
            summary.click()
        page.locator("[data-draws='100']").click()
        assert violations(page) == []
        page.get_by_role("radio", name="match").click()
        assert violations(page) == []


def test_everything_is_reached_by_keyboard(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page, reached = seen.page, set[str]()
        for _ in range(90):
            page.keyboard.press("Tab")
            reached.add(page.evaluate(FOCUSED))
        assert {name.split("|")[0] for name in reached} >= {*SECTIONS}
        assert {f"speed|speed-{n}" for n in ("alpha", "depth", "width", "c", "curve", "batch")} <= reached
        assert {"run|run-next", "run|run-scrub", "lossless|lossless-preset", "lossless|Draw 10,000"} <= reached


def test_what_a_screen_reader_is_told(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page = seen.page
        assert page.locator("[role=status]").count() >= 5
        tree = page.locator("#run").aria_snapshot()
        assert "status" in tree
        assert "slider" in tree
        assert 'button "Next ›"' in tree
        page.locator("#run-stage").focus()
        page.keyboard.press("End")
        assert re.search(
            r'button "[^"]*, (accepted|not reached|rejected|bonus|correction)',
            page.locator("#run-tree").aria_snapshot(),
        )


def test_reduced_motion_moves_nothing_by_itself(page_url: str, visit: Any) -> None:
    with visit(page_url, reduced_motion="reduce") as seen:
        page = seen.page
        assert page.evaluate(MOVING) == 0
        before = page.locator("#run-scrub").input_value()
        page.wait_for_timeout(700)
        assert page.locator("#run-scrub").input_value() == before


def test_a_long_and_hostile_trace_is_shown_as_text(tmp_path: Path, visit: Any) -> None:
    """Texts that are markup, control characters, right-to-left; 100,000 steps. Under 2 s of the processor."""
    file = tmp_path / "<img src=x>.jsonl"
    long_trace(file, 100_000)
    page_file = tmp_path / "page.html"
    page_file.write_text(render(explained(read(file), HostileTokenizer())))
    with visit("about:blank") as seen:
        meter = seen.context.new_cdp_session(seen.page)
        meter.send("Performance.enable", {"timeDomain": "threadTicks"})
        seen.page.goto(page_file.as_uri())
        seen.page.wait_for_selector(READY)
        spent = {m["name"]: m["value"] for m in meter.send("Performance.getMetrics")["metrics"]}["TaskDuration"]
        assert spent < 2
        page = seen.page
        assert caption(page).startswith("Step 1 of 100000")
        page.locator("#run-stage").focus()
        for key in ("End", "ArrowLeft", "ArrowUp", "Home", *["ArrowDown"] * 60):
            page.keyboard.press(key)
        assert page.evaluate("document.body.dataset.hit") is None
        assert page.locator("main img, main iframe, main script").count() == 0
        assert "\\u202e" in page.locator("#run-text").inner_text()
        assert "<img src=x" in page.locator("#run-text").inner_text()
        assert "What was weighed: <img src=x" in page.locator("#run-note").inner_text()


def test_a_trace_with_counts_only_is_shown(tmp_path: Path, visit: Any) -> None:
    file = tmp_path / "run.jsonl"
    long_trace(file, 50)
    dropped = ("tokens", "parents", "siblings", "path", "token", "budget", "prompt")
    lines = [{k: v for k, v in json.loads(line).items() if k not in dropped} for line in file.read_text().splitlines()]
    lines[0]["detail"] = "counts"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page_file = tmp_path / "page.html"
    page_file.write_text(render(explained(read(file))))
    with visit(page_file.as_uri()) as seen:
        seen.page.locator("#run-stage").focus()
        seen.page.keyboard.press("End")
        assert "counts only" in seen.page.locator("#run-tree").inner_text()
        assert "50 passes" in seen.page.locator("#run-saved").inner_text()


def test_the_modules_use_no_markup_from_texts() -> None:
    for file in ASSETS.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", file.read_text()
        ), file
