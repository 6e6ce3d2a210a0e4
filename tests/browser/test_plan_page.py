"""The page of a plan in a real Chromium: what it shows, for every reader, and that it asks nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.lab.plan.acceptance_curve import constant
from outrider.lab.plan.answer import PlanAnswer, PlanFigure, answer
from outrider.lab.plan.serving_costs import MeasuredCosts
from outrider.lab.plan.serving_plan import ServingPlan
from outrider.lab.plan.simulation import ReplicaLimits
from outrider.lab.plan.workload import Demand, Lengths
from tests.browser.conftest import violations

HARM = '</script><img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def found() -> PlanAnswer:
    """A plan whose costs grow steeply with the batch, so that drafts lose there."""
    rounds = [[n, k, 0, 0.01 + 0.001 * n * (k + 1)] for n in (1, 16) for k in (0, 16)]
    costs = MeasuredCosts(rounds, [[0, 0, 0.0], [256, 0, 0.02]])
    demand = Demand(8.0, Lengths.of("64", ""), Lengths.of("40", ""))
    plan = ServingPlan(demand, costs, constant(0.7, 16), ReplicaLimits(16, 1e6, 256), price=2.0)
    return answer(plan, [PlanFigure("hardware", HARM, "made")], 1, sweep=True)


@pytest.fixture(scope="module")
def plan_url(found: PlanAnswer, tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("plan") / "plan.html"
    file.write_text(found.page(), encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"color_scheme": "dark", "viewport": {"width": 1400, "height": 900}},
        {"viewport": {"width": 390, "height": 800}},
    ],
)
def test_the_page(plan_url: str, found: PlanAnswer, visit: Any, options: dict[str, Any]) -> None:
    with visit(plan_url, **options) as seen:
        page = seen.page
        assert (
            page.locator("#headline")
            .inner_text()
            .endswith("speculate: 1 replica" if found.policy == "plain" else "by load")
        )
        assert HARM in page.locator("#subline").inner_text()
        assert "in the currency of --price" in page.locator("#facts").inner_text()
        assert page.locator("#map tr").first.locator("th").count() == 17
        if page.viewport_size["width"] >= 1280:  # whole, and beside its words
            assert page.locator("#map").evaluate("node => node.scrollWidth <= node.clientWidth")
        assert page.title() == "A plan for speculative decoding"
        losing = sum(speed < 1 for row in found.table for speed in row.by_depth[1:])
        assert losing > 0
        assert page.locator("#map .loses").count() == losing
        assert page.locator("#map td.best").count() == sum(row.depth > 0 for row in found.table)
        assert "speculation loses" in page.locator("#batch-chart").inner_text()
        assert page.locator("#load-chart svg path").count() >= 2
        assert page.locator("#inputs dt, #figures dt, #terms dt").count() >= 8
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert seen.asked == [plan_url]


def test_everyone_can_read_it(plan_url: str, visit: Any) -> None:
    with visit(plan_url, bypass_csp=True) as seen:
        assert violations(seen.page) == []
