"""The page of a run in a real Chromium: every control, without network, for every reader, and with texts that mean harm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chromium import violations
from explained import HostileTokenizer, long_trace

from outrider_lab.explain import explained
from outrider_lab.pages.explained import ASSETS, builtin
from outrider_lab.traces import read

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
    file.write_text(builtin().page())
    return file.as_uri()


def test_it_is_one_small_file_that_asks_nobody(page_url: str, visit: Any) -> None:
    run = builtin()
    assert len(run.page()) - len(run.to_json()) < 400_000
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


def test_the_weights_are_read_once_for_a_pass(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        blocks = seen.page.locator("#weights-body .bar")
        for tokens in (1, 5, 8):
            slide(seen.page, "weights-tokens", tokens)
            assert [bar.locator("i").count() for bar in blocks.all()] == [tokens, 1]
        assert "8 times" in seen.page.locator("#weights-body [role=status]").inner_text()


def test_no_formula_comes_before_its_words(page_url: str, visit: Any) -> None:
    """Letters of formulas stand in the folded parts, where they are explained; a token of a pass is a token, not a row."""
    with visit(page_url) as seen:
        assert re.findall(r"[αγ]|V\(M\)|\brows?\b", seen.page.inner_text("body")) == []
        seen.page.locator("#speed-body summary").click()
        words = seen.page.locator("#speed-body details").inner_text()
        assert words.index("α: how often") < words.index("tokens a step = 1")


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
        assert " s with the draft" in page.locator("#run-saved").inner_text()
        assert "Passes are not time" not in page.locator("#run-saved").inner_text()
        page.get_by_role("radio", name="Passes of the target").click()
        said = page.locator("#run-saved").inner_text()
        assert f"whole text of {len(tokens)} tokens takes {len(run.requests[0].steps)} passes" in said
        assert "Passes are not time" in said
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
        detail = seen.page.locator("#run-detail")
        assert "the draft gives it" in detail.inner_text()
        assert "the target gives it" not in detail.inner_text()  # the verdict is not shown yet
        seen.page.locator("#run-stage").focus()
        seen.page.keyboard.press("ArrowRight")
        node.hover()
        assert "the target gives it" in detail.inner_text()
        assert "rank" in detail.inner_text()
        assert f"{step.p[1]:.3f}"[:4] in detail.inner_text()
        node.click()
        assert seen.page.locator("#run-tree .node").nth(1).get_attribute("aria-pressed") == "true"
        seen.page.get_by_role("radio", name="With noise").click()
        seen.page.get_by_role("button", name="Next ›").click()
        assert "noise" in detail.inner_text()


def test_a_reader_predicts_the_verdict_by_keys(page_url: str, visit: Any) -> None:
    """Right and wrong answers, each followed by what was kept; before the answer nothing gives it away."""
    steps = builtin().requests[0].steps
    with visit(page_url) as seen:
        page = seen.page
        for n, wrong in ((0, 0), (1, 1)):
            if n:
                page.get_by_role("button", name="Next step").click()
                for _ in range(steps[n].drafted):
                    page.get_by_role("button", name="Next ›").click()
            assert page.locator("#run-ask").is_visible()
            assert page.locator("#run-tree .is-accepted, #run-tree .is-rejected").count() == 0
            assert "p 0." not in page.locator("#run-tree").inner_text()
            path = steps[n].path or [0]
            last = path[steps[n].accepted]
            page.locator(f"[data-node='{last if not wrong else (last + 1) % 2}']").focus()
            page.keyboard.press("Enter")
            assert ("is right (1 of 1)" if not wrong else "(1 of 2 right)") in caption(page)
            assert not page.locator("#run-ask").is_visible()
        page.keyboard.press("ArrowRight")
        assert "Your answer" not in caption(page)


def test_the_same_sentence_with_a_bad_draft_has_the_same_text(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page, texts = seen.page, list[str]()
        for name in ("A sentence", "A bad draft"):
            page.get_by_role("radio", name=name).click()
            page.locator("#run-stage").focus()
            page.keyboard.press("End")
            texts.append(page.locator("#run-text").evaluate("node => node.textContent"))
        assert texts[0] == texts[1]
        assert "steps had no draft" in page.locator("#run-about").inner_text()
        weighed = next(n for n, step in enumerate(builtin().requests[2].steps) if step.note)
        page.locator("#run-stage").focus()
        for key in ("Home", *["ArrowDown"] * weighed):
            page.keyboard.press(key)
        assert "What was weighed" in page.locator("#run-note").inner_text()


OUTSIDE = """([inner, outer]) => [...document.querySelectorAll(outer)].flatMap((box) => {
  const around = box.getBoundingClientRect();
  return [...box.querySelectorAll(inner)].map((node) => node.getBoundingClientRect()).filter((r) =>
    r.left < around.left - 1 || r.right > around.right + 1 || r.top < around.top - 1 || r.bottom > around.bottom + 1
    || r.width < 8)
    .map((r) => [r.left, r.right, around.left, around.right]);
})"""


@pytest.mark.parametrize("width", [1400, 400])
def test_no_node_of_a_tree_is_cut_off(page_url: str, visit: Any, width: int) -> None:
    with visit(page_url, viewport={"width": width, "height": 900}) as seen:
        page = seen.page
        stage = page.locator("#run-stage")
        for run in range(3):
            page.get_by_role("radiogroup", name="The run").get_by_role("radio").nth(run).click()
            for _ in builtin().requests[run].steps:
                stage.focus()
                page.keyboard.press("ArrowDown")
                page.keyboard.press("ArrowLeft")  # the step before, with its verdict
                assert page.evaluate(OUTSIDE, [".node", "#run-trees"]) == []
                page.keyboard.press("ArrowRight")
        for nodes in (1, 6, 16):
            slide(page, "shape-nodes", nodes)
            for at in range(0, len(builtin().compared), 5):
                slide(page, "shape-at", at)
                assert page.locator("#shape-body .leaf").count() >= 3 * 2
                assert page.evaluate(OUTSIDE, [".leaf", "#shape-body .drawing"]) == []


CROSSED = """() => [...document.querySelectorAll("#speed-body svg.chart")].flatMap((chart) => {
  const labels = [...chart.querySelectorAll("text")].filter((t) => /chosen|best/.test(t.textContent)).map((t) => t.getBBox());
  return [...chart.querySelectorAll("path")].flatMap((path) => Array.from({length: 400}, (_, i) =>
    path.getPointAtLength(path.getTotalLength() * i / 399)).filter((p) => labels.some((b) =>
    p.x > b.x && p.x < b.x + b.width && p.y > b.y && p.y < b.y + b.height)));
}).length"""


@pytest.mark.parametrize("width", [1400, 400])
def test_no_line_runs_through_a_label(page_url: str, visit: Any, width: int) -> None:
    with visit(page_url, viewport={"width": width, "height": 900}) as seen:
        for alpha in (0.5, 0.8, 0.95):
            slide(seen.page, "speed-alpha", alpha)
            for depth in range(1, 17):
                slide(seen.page, "speed-depth", depth)
                assert seen.page.evaluate(CROSSED) == 0, (alpha, depth)


def misplaced(page: Any) -> dict[str, float]:
    """Per cent of the draws that are misplaced, by rule."""
    panels = {rule: page.locator(f"[data-rule={rule}] figcaption").inner_text() for rule in RULES}
    return {rule: float(re.findall(r"([\d.]+) % of the draws", text)[0]) for rule, text in panels.items()}


RULES = ("match", "right", "no_residual", "argmax", "temperature")


def test_every_rule_draws_at_load_and_the_wrong_ones_stay_wrong(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page, said = seen.page, seen.page.locator("#lossless-body [role=status]").last
        assert "10,000 draws" in said.inner_text()
        found = misplaced(page)
        assert found["match"] < 2 > found["right"]
        assert all(found[rule] > 3 for rule in RULES[2:])
        for rule in RULES:
            assert ("never at 0" in page.locator(f"[data-rule={rule}]").inner_text()) == (rule in RULES[2:])
        for draws in ("1", "100", "10000"):
            page.locator(f"[data-draws='{draws}']").click()
        assert "20,101 draws" in said.inner_text()
        page.get_by_role("button", name="Clear").click()
        assert "No draws yet" in page.locator("[data-rule=match]").inner_text()
        page.locator("#lossless-preset").select_option("equal")
        assert "10,000 draws" in said.inner_text()
        page.locator("#lossless-body summary").click()
        assert "nothing is ever rejected" in page.locator("#lossless-body").inner_text()
        page.locator("#lossless-size").select_option("8")
        assert page.locator("[data-bar]").count() == 16
        raced = page.locator("#lossless-body [role=status]").first
        before = raced.inner_text()
        page.locator("#lossless-race").click()
        assert "Place 2" in raced.inner_text() != before


def test_match_is_taught_before_the_coin(page_url: str, visit: Any) -> None:
    """The rule of the run comes first, with its proof; no button looks chosen that is none."""
    with visit(page_url) as seen:
        words = seen.page.locator("#lossless").inner_text()
        assert (
            words.index("The draft only predicts the draw")
            < words.index("Proof.")
            < words.index("flip a coin")
            < words.index("min(1, p")
        )
        assert seen.page.locator("#lossless button.main, #lossless [aria-checked=true]").count() == 0


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
        page.get_by_role("radio", name="As often as in this run").click()
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


def test_everything_is_reached_by_keyboard(page_url: str, visit: Any) -> None:
    with visit(page_url) as seen:
        page, reached = seen.page, set[str]()
        for _ in range(120):
            page.keyboard.press("Tab")
            reached.add(page.evaluate(FOCUSED))
        assert {name.split("|")[0] for name in reached} >= {*SECTIONS}
        assert {f"speed|speed-{n}" for n in ("alpha", "depth", "width", "c", "curve", "batch")} <= reached
        assert {"run|run-next", "run|run-scrub", "lossless|lossless-preset", "lossless|Draw 10,000 more"} <= reached


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
    page_file.write_text(explained(read(file), HostileTokenizer()).page())
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
    page_file.write_text(explained(read(file)).page())
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
