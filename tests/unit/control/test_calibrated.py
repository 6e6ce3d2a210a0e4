"""The calibrated controller on a simulated machine: chains, trees and plain decoding weighed by known costs."""

import pytest
from simulated import HOSTILE, Machine, after, always, machines

from outrider.control import Adaptive, Calibrated, CostModel
from outrider.core.types import Budget

TREES = Budget(6, 4, 16)


def calibrated(machine, factor=1.0, nodes=1.0):
    """What a calibration of this machine would hold; factor: how much slower all was then, nodes: and nodes alone."""
    target = [
        [
            r,
            n,
            c,
            factor
            * (1 + machine.row * (r - 1))
            * (1 + machine.context * c / 1000)
            * (1 + nodes * machine.node * (n - 1)),
        ]
        for r in (1, 4)
        for n in (1, 2, 9)
        for c in (0, 1000)
    ]
    draft = [
        [r, w, d, 0, factor * machine.level * d * (machine.wide if w > 1 else 1) * (r if machine.each else 1)]
        for r in (1, 4)
        for w in (1, 4)
        for d in (0, 8)
    ]
    return Calibrated(CostModel({}, target, draft, factor * machine.read, 0.0))


def optimal(machine, limit=TREES, **off):
    return Adaptive(limit, calibrated(machine, **off))


@pytest.mark.parametrize(
    ("alpha", "costs"),
    [
        (0.8, {"node": 0.03, "level": 0.05}),
        (0.6, {"node": 0.02, "level": 0.05, "others": (0.5, 0.2, 0.1)}),
        (0.6, {"node": 0.02, "level": 0.02, "others": (0.6, 0.2, 0.1), "wide": 1.5}),
        (0.7, {"node": 0.02, "level": 0.05, "others": (0.5, 0.2, 0.1), "wide": 8.0}),
        (0.7, {"node": 0.3, "level": 0.05, "others": (0.5, 0.2, 0.1)}),
    ],
)
def test_it_finds_the_best_chain_or_tree(alpha, costs):
    """On average within 4 % of the best fixed budget, which nobody knows beforehand."""
    runs = [after(m, optimal(m), 256, 1500) for m in machines(4, alpha=always(alpha), **costs)]
    assert sum(runs) / len(runs) > 0.96 * Machine(alpha=always(alpha), **costs).best(TREES)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("case", HOSTILE)
def test_it_is_never_slower(case, rows):
    """At least 0.98 of plain decoding after 256 tokens a row."""
    for machine in machines(3, rows, **HOSTILE[case]):
        assert after(machine, optimal(machine), 256 * rows, 768 * rows) > 0.98


@pytest.mark.parametrize("off", [{"factor": 3.0}, {"factor": 0.3}, {"nodes": 0.3}, {"nodes": 2.0}])
@pytest.mark.parametrize("case", ["one in ten right", "nodes as dear as steps", "as large, and wrong"])
def test_nor_where_the_calibration_is_wrong(case, off):
    for machine in machines(3, **HOSTILE[case]):
        assert after(machine, optimal(machine, **off), 256, 768) > 0.98


@pytest.mark.parametrize("case", [case for case in HOSTILE if case != "a draft as large as the target"])
def test_nor_where_the_machine_changes_its_pace(case):
    """Twice as slow for some dozens of steps, then fast again. On average: what is compared may be of different phases."""
    runs = [after(m, optimal(m, Budget(8)), 256, 768) for m in machines(12, **HOSTILE[case], swing=2.0)]
    assert sum(runs) / len(runs) > 0.98
    assert min(runs) > 0.94


@pytest.mark.parametrize("alpha", [0.4, 0.6, 0.8])
def test_and_what_pays_there_is_used(alpha):
    costs = {"alpha": always(alpha), "node": 0.04, "level": 0.03}
    runs = [after(m, optimal(m, Budget(8)), 128, 600) for m in machines(12, **costs, swing=2.0)]
    assert sum(runs) / len(runs) > 0.97 * Machine(**costs).best(Budget(8))


def test_reading_that_may_not_pay_is_left_until_drafting_has_proved_itself():
    """One guess in ten is right, and what was written meanwhile costs more to read than it could gain."""
    for machine in machines(12, **HOSTILE["one in ten right"]):
        machine.run(optimal(machine), tokens=1024)
        assert machine.time - machine.plain_time < 14


def test_a_draft_that_pays_is_used_almost_from_the_first_step():
    for machine in machines(3, alpha=always(0.8), level=0.05, node=0.03):
        machine.run(optimal(machine, Budget(8)), tokens=1500)
        assert machine.depths.count(0) < 0.03 * len(machine.depths)
        assert machine.speed > 0.93 * machine.best(Budget(8))


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_drift_is_noticed(factor):
    """The machine is twice as fast, or as slow, as it was when it was measured."""
    [machine] = machines(1, alpha=always(0.8), level=0.05, node=0.03)
    controller = optimal(machine, Budget(8), factor=factor)
    machine.run(controller, tokens=1500)
    for value in controller.costs.drift.values():
        assert value == pytest.approx(1 / factor, rel=0.2)


def test_steps_of_other_rows_are_not_compared():
    """Four rows cost less than half of what was calibrated. That says nothing of drafted steps beside plain ones; that nodes
    do says it."""
    [machine] = machines(1, 4, node=0.05, jitter=0.0, pauses=0.0)
    costs = calibrated(Machine(node=0.05, row=3.0), nodes=20.0)
    for drafted, least, most in (([0, 1, 2, 3], 1.0, 1.0), ([0], 0.3, 0.8)):
        for rows, depth in (([0], 0),) * 8 + ((drafted, 4),) * 4:
            costs.observe(machine.step(rows, [Budget(depth)] * len(rows)), depth, 0)
        assert least <= costs.target.share["drafted"] <= most


def test_a_row_that_nobody_guesses_for_is_left_out():
    """Every row costs as much drafting as the first; the guesses of one of four are always wrong."""

    class Uneven(Machine):
        def guesses(self, budget, alpha):
            self.turn = (getattr(self, "turn", -1) + 1) % sum(b.depth > 0 for b in self.asked)
            who = [row for row, b in zip(self.position, self.asked, strict=True) if b.depth][self.turn]
            return super().guesses(budget, 0.0 if who == 3 else 0.85)

        def step(self, rows, budgets):
            self.asked, self.turn = budgets, -1
            return super().step(rows, budgets)

    machine = Uneven(level=0.05, node=0.02, each=True, row=0.2)
    for row in range(4):
        machine.start(row)
    controller = optimal(machine, Budget(6))
    drafted = [0, 0, 0, 0]
    for _ in range(400):
        machine.run(controller, steps=1)
        for row, budget in enumerate(machine.budgets):
            drafted[row] += budget.depth > 0
    assert drafted[3] < 0.5 * drafted[0]
    assert min(drafted[:3]) > 300
