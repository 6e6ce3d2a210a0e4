"""Plans: what is weighed, what is chosen, and what no plan may depend on."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control import CostModel, Costs, DraftCost, Fixed, Planner
from outrider.control.plan import Charge, Offer, Plan, PlanNote, StepForecast, View
from outrider.control.planner import RARELY
from outrider.core.types import Budget, Commit, Draft, Step, Verdict

TARGET = {1: 1.0, 4: 1.2, 16: 2.4}


def planner(level: float = 0.2, read: float = 0.03, limit: Budget | None = None, **more: float) -> Planner:
    """A machine whose plain steps take a second. more: other drafters, with the seconds of a level."""
    drafters = {name: DraftCost(0.01, cost, read) for name, cost in {"model": level, **more}.items()}
    return Planner(limit or Budget(16), Costs(CostModel({}, TARGET, drafters)))


def offer(count: int, match: int = 12, mass: float = 0.97) -> Offer:
    nodes = [(0, -1), *((n + 1, n) for n in range(count))]
    return Offer(nodes, [mass**n for n in range(count + 1)], match)


def view(slot: int = 0, written: int = 10, left: int = 90, missing: int = 1, count: int = 0, **other) -> View:
    offers = {"suffix": offer(count)} if count else {}
    return View(slot, written, left, Budget(16), offers, {"model": missing}, **other)


def step(notes: list[PlanNote], accepted: list[int], seconds: float = 1.0, draft: float = 0.0) -> Step:
    """What became of plans: so many draft tokens accepted in each."""
    rows = len(notes)
    width = 1 + max(note.levels for note in notes)
    tokens = np.zeros((rows, width), np.int64)
    parents = np.full((rows, width), -2)
    for b, note in enumerate(notes):
        parents[b, : note.levels + 1] = np.arange(-1, note.levels)
    commits = [Commit(list(range(1, n + 2)), list(range(n + 1)), n) for n in accepted]
    taken = {"draft": draft, "target": seconds, "verify": 0.0, "commit": 0.0}
    drawn = Draft(tokens, parents, notes=tuple(notes))
    return Step(drawn, Verdict([]), commits, list(range(rows)), [9] * rows, [Budget(16)] * rows, taken)


def note(plan: Plan, one: View, nodes: int = 0, charges: tuple[Charge, ...] = ()) -> PlanNote:
    return PlanNote(plan, one.offers, nodes, charges)


def learned(own: Planner, one: View, right: float, texts: int = 40) -> None:
    """Let a planner see texts of which this share of the draft tokens is right."""
    draw = random.Random(1)
    for _ in range(texts):
        for written in range(1, 30):
            plan = Plan("model", Budget(3))
            accepted = next((k for k in range(3) if draw.random() >= right), 3)
            own.observe(step([note(plan, replace(one, written=written), 3)], [accepted], 1.2))
        own.release(0)


@given(
    st.floats(1, 20), st.floats(0.01, 5), st.lists(st.floats(0.01, 1), min_size=1, max_size=9),
    st.lists(st.floats(0, 1), max_size=9), st.floats(0, 1),
)  # fmt: skip
def test_the_best_prefix_is_the_best_of_all_prefixes(
    tokens: float, drafting: float, more: list[float], chances: list[float], level: float
) -> None:
    """Speed is tokens over seconds; no other prefix and no plain step is faster."""
    alive = sorted(chances[: len(more) - 1], reverse=True)
    forwards = [1 + sum(more[:k]) for k in range(len(more))]
    own = [level * k for k in range(1, len(alive) + 1)]
    best = StepForecast(tokens, drafting, 0.5, forwards).best("x", 0.5, alive, own)
    speeds = [
        (tokens + sum(alive[:k])) / (drafting + forwards[k] + (0.5 + own[k - 1] if k else 0.0))
        for k in range(len(alive) + 1)
    ]
    assert best.speed == pytest.approx(max(speeds))
    assert best.speed == pytest.approx(speeds[best.levels])
    assert best.tokens == pytest.approx(sum(alive[: best.levels]))


@pytest.mark.parametrize("siblings", [(), ("model",)])
def test_only_a_drafter_whose_siblings_cost_nothing_is_asked_for_them(siblings: tuple[str, ...]) -> None:
    own = planner()
    asks = Planner(own.limit, own.costs, siblings=siblings).plan([view()])[0]
    assert asks.drafter == "model"
    assert (asks.budget.width > 1) == bool(siblings)
    asks = Planner(own.limit, own.costs, Fixed(3), siblings=siblings).plan([view(fixed=True)])[0]
    assert asks.budget.width == 1, "a request for drafts of one length gets chains"


def test_drafts_of_one_length_do_not_say_that_a_drafter_states_no_chances() -> None:
    """What states its chances is asked for long drafts that it ends itself; what states none, for the best prefix."""
    own, one = planner(), view()
    for stated, deep in ((False, False), (True, True)):
        own.observe(step([replace(note(own.plan([one])[0], one, 2), stated=stated)], [1]))
        [plan] = own.plan([one])
        assert (plan.budget.depth == 8) == deep
        assert 1 <= plan.budget.depth <= 8


def test_drafts_are_shorter_behind_a_long_text() -> None:
    """Each node attends to all of it. Steps behind it teach nothing wrong about a short text."""
    own = planner()
    own.costs.model = replace(own.costs.model, attention=1e-3)
    [before], [long] = own.plan([view(length=100)]), own.plan([view(length=2000)])
    assert before.plain > 1.8 * long.plain
    assert before.chosen is not None
    assert long.chosen is None or long.chosen.levels <= before.chosen.levels
    assert own.plan([view(length=100)]) == [before]


def test_windows_keep_drafts_long_behind_a_long_text() -> None:
    """A node behind 8,000 tokens then attends to no more than behind 500."""
    own = planner()
    own.costs.model = replace(own.costs.model, attention=1e-4, windows={500: 18})
    assert own.plan([view(length=8000)]) == own.plan([view(length=500)])


def test_what_is_cheap_and_good_is_asked_and_says_why() -> None:
    [plan] = planner().plan([view()])
    assert plan.drafter == "model"
    assert 0.1 < plan.budget.min_probability < 0.95
    [weighed] = plan.why
    assert (weighed.name, weighed.verdict) == ("model", "chosen")
    assert weighed.speed > plan.plain
    told = str(PlanNote(plan, {}))
    assert told.startswith("model drafts; model: 0.60 accepted lately, ")
    assert told.endswith(" ms, chosen")


def test_a_draft_that_is_always_wrong_is_given_up_and_asked_again() -> None:
    own, asked, rests = planner(), list[int](), 0
    for written in range(1, 400):
        one = view(0, written, 500)
        if not own.budgets([0])[0].depth:
            own.observe(step([PlanNote(Plan(None), {})], [0]))
            rests += 1
            continue
        [plan] = own.plan([one])
        nodes = 3 if plan.drafter else 0
        if nodes:
            asked.append(written)
        charge = (Charge("model", 1, 3, 0, 0.61),) if nodes else ()
        own.observe(step([note(plan, one, nodes, charge)], [0], 1.0 + 0.07 * nodes, 0.01 + (0.61 if nodes else 0.0)))
    assert 4 < len(asked) < 30
    assert len([n for n in asked if n < 30]) > len([n for n in asked if n > 200])
    assert asked[-1] > 300, "and never for the last time"
    assert rests > 150, "a plan costs time too"


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_sequences_that_share_a_step_try_a_drafter_at_the_cost_of_one(rows: int) -> None:
    """What all of them read for a try is at most one plain step in `RARELY`."""
    own, views = planner(level=0.2), [view(slot, 20, 400, missing=20) for slot in range(rows)]
    own.accepted["model"], tried = 0.05, 0.0
    for steps in range(0, 20 * RARELY, RARELY):
        own.steps = steps
        reading = sum(own.costs.reading("model", 20) for plan in own.plan(views) if plan.drafter)
        assert reading <= steps / RARELY * own.costs.forward(1)
        tried += reading
    assert tried > 0, "and some day it is tried"


@pytest.mark.parametrize(("left", "asked"), [(6, False), (400, True)])
def test_a_prompt_is_read_only_for_an_answer_that_covers_it(left: int, asked: bool) -> None:
    own = planner(level=0.1)
    own.length = 10 + left
    [plan] = own.plan([view(written=10, left=left, missing=300)])
    assert (plan.read is not None) is asked
    if plan.read is not None:
        assert 16 <= plan.read[1] < 299, "in pieces"
        assert own.costs.reading("model", plan.read[1]) < 4.5
    else:
        assert plan.why[0].verdict == "the rest of the answer may not cover the reading"


def test_one_sequence_reads_in_a_step() -> None:
    own = planner(level=0.02, read=0.01)
    plans = own.plan([view(slot, 20, 800, missing) for slot, missing in enumerate((290, 260, 400))])
    assert [plan.read is not None for plan in plans] == [False, True, False]


def test_a_prompt_that_waits_is_delayed_by_a_draft() -> None:
    """A draft must then bring more: the step is work for the others, too."""
    drafts = [planner(level=0.3).plan([view()], waiting)[0] for waiting in (0, 1, 8)]
    stops = [plan.budget.min_probability if plan.drafter else 1.0 for plan in drafts]
    assert stops == sorted(stops)
    assert drafts[0].drafter == "model"
    assert drafts[2].drafter is None


def test_a_lookup_with_a_long_match_wins_and_is_cut_where_it_does_not_pay() -> None:
    own, one = planner(), view(count=16)
    [plan] = own.plan([one])
    assert plan.drafter == "suffix"
    assert plan.chosen is not None
    verified = [alive for alive in plan.chosen.survival if alive >= plan.chosen.least]
    assert 3 <= len(verified) == plan.chosen.levels <= 16
    steep = Planner(Budget(16), Costs(CostModel({}, {1: 1.0, 16: 20.0}, {})))
    for nodes in (1, 4, 16) * 5:  # steps show that it is so steep
        steep.costs.observe_forward(nodes, steep.costs.model.forward(nodes))
    [plan] = steep.plan([replace(one, missing={})])
    assert plan.chosen is None or plan.chosen.levels < 4


def test_of_two_equal_drafters_the_cheaper_one() -> None:
    own = planner(level=0.25, other=0.1)
    [plan] = own.plan([replace(view(), missing={"model": 1, "other": 1})])
    assert plan.drafter == "other"
    assert {w.name: w.verdict for w in plan.why} == {"model": "slower", "other": "chosen"}


def test_a_dearer_level_never_drafts_more() -> None:
    least = [planner(level=level).plan([view()])[0] for level in (0.01, 0.05, 0.1, 0.2, 0.3)]
    stops = [plan.budget.min_probability if plan.drafter else 1.0 for plan in least]
    assert stops == sorted(stops)


def test_what_is_accepted_more_often_is_drafted_deeper() -> None:
    """Each text moves the average of all texts; a new text begins with it."""
    levels, rates = list[int](), list[float]()
    for right in (0.3, 0.6, 0.9):
        own = planner(level=0.1)
        learned(own, view(), right)
        [plan] = own.plan([view(slot=3)])
        levels.append(plan.chosen.levels if plan.chosen else 0)
        rates.append(own.accepted["model"])
    assert levels == sorted(levels)
    assert levels[0] < levels[2]
    assert rates == pytest.approx([0.3, 0.6, 0.9], abs=0.13)


def test_a_length_that_was_asked_for_is_kept_whatever_it_is_worth() -> None:
    own = planner(level=3.0)
    own.depths |= {1: 7, 2: 0}
    assert own.budgets([0, 1, 2]) == [Budget(16), Budget(7), Budget(0)]
    fixed = view(1, 0, fixed=True)
    [plan] = own.plan([replace(fixed, budget=Budget(7))])
    assert (plan.drafter, plan.budget) == ("model", Budget(7))
    assert plan.chosen is not None
    assert plan.chosen.least == 0, "all of it is verified"
    own.release(1)
    assert own.budgets([1]) == [Budget(16)]


def test_a_request_with_a_length_of_its_own_keeps_the_tree() -> None:
    """Eight levels on a server of trees four wide with 16 nodes: still 16 nodes, not 32."""
    own = Planner(Budget(4, 4, 16), Costs(CostModel({}, TARGET)), Fixed(4, 4, 16))
    own.depths |= {1: 8, 2: 0}
    assert own.budgets([0, 1, 2]) == [Budget(4, 4, 16), Budget(8, 4, 16), Budget(0)]


def test_no_room_is_no_draft() -> None:
    own = planner()
    assert own.plan([view(left=1)])[0].drafter is None
    assert own.plan([replace(view(), budget=Budget(0))])[0].drafter is None
    assert own.plan([view(left=3)])[0].budget.depth == 2


def test_a_busy_batch_drafts_less() -> None:
    """With more sequences a node costs more, and a plain step gives more tokens."""
    costs = {1: 1.0, 4: 1.1, 16: 2.0, 64: 8.0}
    sure = []
    for rows in (1, 4, 16):
        own = Planner(Budget(16), Costs(CostModel({}, costs, {"model": DraftCost(0.01, 0.1, 0.01)})))
        plans = own.plan([view(slot) for slot in range(rows)])
        sure.append(plans[0].budget.min_probability if plans[0].drafter else 1.0)
    assert sure == sorted(sure)
    assert sure[0] < sure[2]


VIEWS = st.lists(
    st.builds(
        lambda written, left, missing, count, match: replace(
            view(0, written, left, missing), offers={"suffix": offer(count, match)} if count else {}
        ),
        st.integers(0, 60), st.integers(1, 200), st.integers(1, 150), st.integers(0, 9), st.integers(0, 12),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(VIEWS, st.randoms())
@settings(max_examples=80)
def test_sequences_in_another_order_get_the_same_plans(views: list[View], draw: random.Random) -> None:
    views = [replace(one, slot=slot) for slot, one in enumerate(views)]
    order = list(range(len(views)))
    draw.shuffle(order)
    one, other = planner().plan(views), planner().plan([views[b] for b in order])
    for at, b in enumerate(order):
        assert other[at].drafter == one[b].drafter
        assert other[at].read == one[b].read
        assert other[at].budget == one[b].budget or other[at].budget.min_probability == pytest.approx(
            one[b].budget.min_probability
        )


@given(VIEWS)
@settings(max_examples=40)
def test_planning_twice_is_planning_once(views: list[View]) -> None:
    """A plan is a function of what was observed: it has no clock and changes nothing."""
    own, views = planner(), [replace(one, slot=slot) for slot, one in enumerate(views)]
    assert own.plan(views) == own.plan(views)


def test_lookups_that_never_offer_anything_rest_where_asking_costs() -> None:
    asked = dict[float, int]()
    for cost in (0.15, 0.0):
        own = planner(level=2.0)
        for written in range(1, 200):
            asked[cost] = asked.get(cost, 0) + own.asks_lookups(0)
            one = replace(view(0, written, 300), offers={"suffix": offer(0)} if own.asks_lookups(0) else {})
            own.observe(step([note(own.plan([one])[0], one)], [0], 1.0, cost))
    assert 30 < asked[0.15] < 80
    assert asked[0.0] == 199, "they are asked in every step where that takes no time"


def test_lookups_tell_what_a_grammar_forces_in_every_step() -> None:
    """They never rest where a grammar may leave one text only, whatever they brought so far."""
    own, asks = planner(level=2.0), 0
    for written in range(1, 100):
        asks += own.asks_lookups(0, forced=True)
        one = replace(view(0, written, 300), offers={"suffix": offer(0)})
        own.observe(step([note(own.plan([one])[0], one)], [0], 1.0, 0.15))
    assert asks == 99


def test_a_draft_that_gains_less_than_its_plan_takes_is_not_made() -> None:
    """What is around a drafter's own call, Python above all, is time that a step without a plan does not take."""
    asked = dict[float, bool]()
    for around in (0.0, 0.3):
        own, one = planner(level=0.05), view()
        own.accepted["model"] = 0.35
        for _ in range(60):
            own.observe(step([note(Plan(None), one)], [0], 1.0, around))
        asked[around] = own.plan([view(slot=3)])[0].drafter is not None
    assert asked == {0.0: True, 0.3: False}
