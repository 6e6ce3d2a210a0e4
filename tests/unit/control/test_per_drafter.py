"""Several drafters on one simulated machine: each is judged by itself."""

import pytest
from simulated import HOSTILE, Machine, always

from outrider.control import Adaptive, Calibrated, CostModel, PerDrafter
from outrider.core.types import Budget

GOOD = {"alpha": always(0.95), "level": 0.01}
WRONG = {"alpha": always(0.0), "level": 0.3, "read": 0.02}


def several(methods, seed=0, node=0.03, **drafters):
    """A machine and its controller. methods: the drafter of each row."""
    machine = Machine(node=node, seed=seed, drafters={name: Machine(**costs) for name, costs in drafters.items()})
    for row, name in enumerate(methods):
        machine.method[row] = name
        machine.start(row)
    return machine, watched(machine, Adaptive(Budget(8)), methods[0])


def watched(machine, base, name):
    return PerDrafter(base, name, machine.method.__getitem__, lambda: machine.draft_seconds)


def again(machine, controller, row, method):
    """A new request in a row."""
    controller.release(row)
    machine.method[row] = method
    machine.start(row)


def test_what_one_drafter_has_shown_is_not_held_against_another():
    """A draft model that never pays, skipped for long. Then a request with a drafter that is always right: it is drafted for
    from its first steps."""
    machine, controller = several(["model"], model=WRONG, told=GOOD)
    machine.run(controller, tokens=1500)
    assert machine.depths[-100:].count(0) > 95
    again(machine, controller, 0, "told")
    before, time = machine.tokens, machine.time
    machine.run(controller, tokens=120)
    assert (machine.tokens - before) / (machine.time - time) > 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("methods", [["model", "told"], ["told", "model", "model", "model"], ["told", "none"]])
def test_side_by_side_the_good_drafter_drafts_and_the_other_does_not(methods, seed):
    machine, controller = several(methods, seed, model=WRONG, told=GOOD)
    machine.run(controller, steps=300)
    drafted = dict.fromkeys(methods, 0)
    for _ in range(300):
        machine.run(controller, steps=1)
        for name, budget in zip(methods, machine.budgets, strict=True):
            drafted[name] += budget.depth > 0
    assert drafted["told"] > 250
    assert drafted.get("model", 0) <= 0.05 * 300 * methods.count("model")
    assert drafted.get("none", 0) == 0


@pytest.mark.parametrize("case", HOSTILE)
def test_several_that_do_not_pay_are_never_slower(case):
    """Three drafters side by side, all of the same bad kind: the bound holds for all of them together."""
    costs = {key: value for key, value in HOSTILE[case].items() if key not in ("node", "context")}
    node = HOSTILE[case].get("node", 0.05)
    for seed in range(3):
        machine, controller = several(["a", "b", "c"], seed, node, a=costs, b=costs, c=costs)
        machine.context = HOSTILE[case].get("context", 0.0)
        machine.run(controller, tokens=3 * 256)
        time, plain = machine.time, machine.plain_time
        machine.run(controller, tokens=3 * 768)
        assert (machine.plain_time - plain) / (machine.time - time) > 0.98


def test_the_price_of_a_first_look_is_paid_once_for_each_drafter():
    """From the first token on: what `LossBudget` states, and for each drafter a first look, which reads a prompt."""
    for seed in range(5):
        machine, controller = several(["a", "b"], seed, a=WRONG, b=WRONG)
        machine.run(controller, tokens=512)
        first_look = machine.prompt * 0.02 + 4 * 2 * (0.3 + 0.03)
        assert machine.time - machine.plain_time < 4 + 0.01 * machine.time + 2 * first_look


def test_a_good_drafter_that_joins_another_is_found():
    """Both pay. The second begins while the first drafts in nearly every step."""
    machine, controller = several(["model"], model={"alpha": always(0.8), "level": 0.05}, told=GOOD)
    machine.run(controller, tokens=600)
    machine.method[1] = "told"
    machine.start(1)
    machine.run(controller, steps=60)
    both = 0
    for _ in range(100):
        machine.run(controller, steps=1)
        both += all(b.depth for b in machine.budgets)
    assert both > 80


def test_one_drafter_alone_decides_as_without_the_others():
    """Sequences of one drafter: the same budgets as those of `Adaptive` itself, to within the rounding of seconds."""
    machine, controller = several(["model"] * 3, model={"alpha": always(0.7), "level": 0.05})
    alone = Machine(node=0.03, alpha=always(0.7), level=0.05)
    for row in range(3):
        alone.start(row)
    machine.run(controller, steps=400)
    alone.run(Adaptive(Budget(8)), steps=400)
    assert machine.depths == alone.depths


def test_calibrated_costs_of_one_drafter_are_not_taken_for_anothers():
    """The costs of the target are known for both, those of the draft for one."""
    machine = Machine(node=0.03, drafters={"model": Machine(**WRONG), "told": Machine(**GOOD)})
    target = [[r, n, 0, (1 + 0.3 * (r - 1)) * (1 + 0.03 * (n - 1))] for r in (1, 4) for n in (1, 9)]
    draft = [[r, 1, d, 0, 0.3 * d] for r in (1, 4) for d in (0, 8)]
    machine.method |= {0: "model", 1: "told"}
    controller = watched(machine, Adaptive(Budget(8), Calibrated(CostModel({}, target, draft, 0.02, 0.0))), "model")
    for row in (0, 1):
        machine.start(row)
    machine.run(controller, steps=300)
    drafted = [0, 0]
    for _ in range(100):
        machine.run(controller, steps=1)
        drafted = [count + (b.depth > 0) for count, b in zip(drafted, machine.budgets, strict=True)]
    assert drafted[0] < 10
    assert drafted[1] > 80


def test_a_limit_of_nothing_is_plain_decoding():
    machine = Machine(method={0: "model"})
    machine.start(0)
    controller = watched(machine, Adaptive(Budget(0)), "model")
    machine.run(controller, steps=10)
    assert machine.depths == [0] * 10
