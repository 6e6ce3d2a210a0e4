"""The page of a benchmark in a real Chromium: it uses its width, breaks no name, and everyone can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import violations
from runs import PLAIN_SETTING, Simulated, simulate

from outrider_lab.bench.report.page import write

# The lines and the text of each name in a table.
NAMES = """() => [...document.querySelectorAll("table bdi")].map((node) => [node.getClientRects().length, node.textContent])"""


@pytest.fixture(scope="module")
def report_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("report") / "report.html"
    write(simulate(PLAIN_SETTING, Simulated("draft_model", 4), prompts=8), file)
    return file.as_uri()


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_the_page(report_url: str, visit: Any, width: int, scheme: str) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "bypass_csp": True}
    with visit(report_url, **options) as seen:
        page = seen.page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert {text for lines, text in page.evaluate(NAMES) if lines > 1} == set()
        boxes = [article.bounding_box() for article in page.locator("article").all()[:2]]
        assert (boxes[0]["y"] == boxes[1]["y"]) == (width == 1400)
        assert page.locator("main").bounding_box()["width"] > 0.9 * width
        assert seen.asked == [report_url]
        assert violations(page) == []
