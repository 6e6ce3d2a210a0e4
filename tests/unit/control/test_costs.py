"""Costs: what was measured, and what the steps make of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from outrider.control import CostModel, Costs, DraftCost
from outrider.control.costs import assumed, interpolate

MODEL = CostModel({"machine": "x"}, {1: 1.0, 4: 1.3, 16: 2.5}, {"draft": DraftCost(0.02, 0.2, 0.05)})


def test_a_cost_model_is_read_back() -> None:
    assert CostModel.from_json(MODEL.to_json()) == MODEL


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", json.dumps({"key": {}, "target": {}, "drafters": {}}),
                                  json.dumps({"key": {}, "target": {"1": 0}, "drafters": {}}),
                                  json.dumps({"key": {}, "target": {"1": 1}, "drafters": {"x": {"first": 1}}})])  # fmt: skip
def test_what_is_no_cost_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="measure again: outrider doctor MODEL"):
        CostModel.from_json(text)


def test_before_a_step_the_measurement_counts() -> None:
    costs = Costs(MODEL)
    assert [costs.forward(n) for n in (1, 4, 16)] == pytest.approx([1.0, 1.3, 2.5])
    assert costs.forward(2.6) == costs.forward(3) == pytest.approx(1.2)
    assert costs.forward(40) == pytest.approx(2.5 + 24 * 0.1)
    assert costs.draft("draft", 1, 3) == pytest.approx(0.62)
    assert costs.draft("draft", 1, 0) == 0
    assert costs.draft("draft", 4, 3) == pytest.approx(0.62 * 1.3), (
        "a drafter slows down with sequences as the target does"
    )
    assert costs.reading("draft", 10) == pytest.approx(0.5)


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_wrong_costs_are_corrected_by_the_steps(factor: float) -> None:
    costs, draw = Costs(MODEL), random.Random(0)
    for _ in range(80):
        nodes = draw.choice([1, 4, 6, 8])
        costs.observe_forward(nodes, factor * MODEL.forward(nodes) * draw.lognormvariate(0, 0.05))
        costs.observe_draft("draft", 1, 3, 4, 1.5 * factor * (0.62 + 0.2))
    for nodes in (1, 4, 6, 8):
        assert costs.forward(nodes) == pytest.approx(factor * MODEL.forward(nodes), rel=0.2)
    assert costs.draft("draft", 1, 5) == pytest.approx(1.5 * factor * 1.02, rel=0.05)
    assert costs.reading("draft", 10) == pytest.approx(1.5 * factor * 0.5, rel=0.05)


def test_the_shape_of_the_curve_is_learned() -> None:
    """Believed flat, and steep in truth."""
    costs = Costs(CostModel({}, {1: 1.0, 16: 1.0}))
    true = {1: 1.0, 3: 1.4, 6: 2.0}
    for _ in range(60):
        for nodes, seconds in true.items():
            costs.observe_forward(nodes, seconds)
    for nodes, seconds in true.items():
        assert costs.forward(nodes) / costs.forward(1) == pytest.approx(seconds, rel=0.2)


def test_a_correction_reaches_the_sizes_on_both_sides() -> None:
    costs = Costs(CostModel({}, {n: 1.0 + 0.1 * n for n in (1, 256)}))
    before = {n: costs.forward(n) / costs.forward(1) for n in (3, 6, 32, 128)}
    for _ in range(40):
        costs.observe_forward(8, 3 * costs.forward(8))
    grown = {n: costs.forward(n) / costs.forward(1) / was for n, was in before.items()}
    assert 1.1 < grown[3] < grown[6]
    assert grown[32] == pytest.approx(grown[128]), "sizes that were not seen follow"
    assert grown[32] > 1.1
    for _ in range(40):
        costs.observe_forward(64, 2 * costs.forward(64))
    before = costs.forward(64) / costs.forward(1)
    costs.observe_forward(6, 3 * costs.forward(6))
    assert costs.forward(64) / costs.forward(1) == pytest.approx(before), "those that were seen do not"


def test_what_looks_far_too_dear_is_tried() -> None:
    """So a plan asks for it, and a few steps tell what it takes. The measurement counts as much as the first of them."""
    costs = Costs(CostModel({}, {1: 1.0, 4: 5.0, 16: 30.0}))
    assert [costs.forward(n) for n in (2, 4, 16)] == pytest.approx([4 / 3, 2.0, 6.0])
    for _ in range(3):
        costs.observe_forward(1, 1.0)
    for most in (1.22, 1.16, 1.13):
        costs.observe_forward(2, 1.05)
        assert 1.05 < costs.forward(2) / costs.forward(1) < most
    assert costs.forward(4) / costs.forward(1) < 1.45


def test_a_text_costs_each_node_its_length() -> None:
    """So what is learned behind a long text does not mislead a short one."""
    costs = Costs(replace(MODEL, attention=1e-4))
    short = [costs.forward(1), costs.forward(6)]
    costs.stand(8000.0)
    assert [costs.forward(1), costs.forward(6)] == pytest.approx([short[0] + 0.8, short[1] + 4.8])
    for _ in range(50):
        costs.observe_forward(1, MODEL.forward(1) + 0.8)
        costs.observe_forward(6, MODEL.forward(6) + 4.8)
    costs.stand(0.0)
    assert [costs.forward(1), costs.forward(6)] == pytest.approx(short)


def test_layers_with_a_window_read_no_more_of_a_text_than_that() -> None:
    """Three layers of four have a window of 1,000 tokens."""
    costs = Costs(replace(MODEL, attention=1e-4, windows={1000: 3, 0: 1}))
    short = costs.forward(1)
    for behind, read in ((500.0, 500.0), (1000.0, 1000.0), (8000.0, 2750.0)):
        costs.stand(behind)
        assert costs.forward(1) == pytest.approx(short + 1e-4 * read)
    assert CostModel.from_json(costs.model.to_json()) == costs.model


def test_a_pause_of_the_machine_changes_little() -> None:
    costs = Costs(MODEL)
    for _ in range(40):
        costs.observe_forward(1, 1.0)
    costs.observe_forward(1, 50.0)
    assert costs.forward(1) < 1.12
    costs.observe_forward(1, 0.0)  # no clock can say this, and it says nothing


def test_costs_that_nobody_measured() -> None:
    model = assumed(0.04, {"draft_model": 0.3, "suffix": 0.0})
    assert model.forward(1) == 0.04
    assert model.drafters["draft_model"].level == pytest.approx(0.012)
    unknown = Costs(CostModel({}, {1: 1.0}))
    assert 0.05 < unknown.draft("mine", 1, 1) < 0.5


def test_interpolation() -> None:
    points = {1: 1.0, 3: 2.0, 5: 2.0}
    assert [interpolate(points, x) for x in (1, 2, 3, 4, 9, 0)] == [1, 1.5, 2, 2, 2, 0.5]
    assert interpolate({4: 7.0}, 100) == 7
    assert interpolate({1: 2.0, 2: 1.0}, 9) == 1  # noise is no reason to expect that more costs less
