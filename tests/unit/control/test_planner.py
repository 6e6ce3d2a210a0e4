"""Plans: what is weighed, what is chosen, and what no plan may depend on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control import CostModel, Costs, DraftCost, Fixed, Planner
from outrider.control.beliefs import Offer
from outrider.control.planner import Charge, Plan, PlanNote, View
from outrider.core.types import Budget, Commit, Draft, Step, Verdict

TARGET = {1: 1.0, 4: 1.2, 16: 2.4}


def planner(level: float = 0.2, read: float = 0.03, limit: Budget | None = None, **more: float) -> Planner:
    """A machine whose plain steps take a second. more: other drafters, with the seconds of a level."""
    drafters = {name: DraftCost(0.01, cost, read) for name, cost in {"model": level, **more}.items()}
    return Planner(limit or Budget(16), Costs(CostModel({}, TARGET, drafters)), dict.fromkeys(drafters, "sibling"))


def offer(count: int, match: int = 12, mass: float = 0.97) -> Offer:
    nodes = [(0, -1), *((n + 1, n) for n in range(count))]
    return Offer(nodes, [mass**n for n in range(count + 1)], match)


def view(slot: int = 0, written: int = 10, left: int = 90, missing: int = 1, count: int = 0, **other) -> View:
    offers = {"suffix": offer(count)} if count else {}
    return View(slot, written, left, Budget(16), offers, {"model": missing}, **other)


def step(notes: list[PlanNote], accepted: list[int], seconds: float = 1.0, draft: float = 0.0) -> Step:
    """What became of plans: so many draft tokens accepted in each."""
    rows = len(notes)
    width = 1 + max(note.nodes for note in notes)
    tokens = torch.zeros(rows, width, dtype=torch.long)
    parents = torch.full((rows, width), -2)
    for b, note in enumerate(notes):
        parents[b, : note.nodes + 1] = torch.arange(-1, note.nodes)
    commits = [Commit(list(range(1, n + 2)), list(range(n + 1)), n) for n in accepted]
    taken = {"draft": draft, "target": seconds, "verify": 0.0, "commit": 0.0}
    none = torch.zeros(rows, dtype=torch.long)
    drawn = Draft(tokens, parents, notes=tuple(notes))
    return Step(drawn, Verdict(tokens, none, none), commits, list(range(rows)), [9] * rows, [Budget(16)] * rows, taken)


def note(plan: Plan, one: View, nodes: int = 0, chance: float = 0.8, charges: tuple[Charge, ...] = ()) -> PlanNote:
    line = [chance ** (n + 1) for n in range(nodes)]
    return PlanNote(plan, one.offers, line, nodes, nodes, charges, promised=sum(line))


@pytest.mark.parametrize("siblings", [(), ("model",)])
def test_only_a_drafter_whose_siblings_cost_nothing_is_asked_for_them(siblings: tuple[str, ...]) -> None:
    own = planner()
    asks = Planner(own.limit, own.costs, own.kinds, siblings=siblings).plan([view()])[0]
    assert asks.drafter == "model"
    assert (asks.budget.width > 1) == bool(siblings)
    asks = Planner(own.limit, own.costs, own.kinds, Fixed(3), siblings=siblings).plan([view(fixed=True)])[0]
    assert asks.budget.width == 1, "a request for drafts of one length gets chains"


def test_siblings_are_verified_while_they_pay_and_count_as_promised() -> None:
    """What a text brings is compared with all that was promised of it."""
    own = planner()
    one = view()
    plan = own.plan([one])[0]
    chain, tree = [0.5, 0.25], [0.5, 0.3, 0.02, 0.25]
    assert [own.verified([one], [plan], [s])[0] for s in (chain, tree)] == [[1, 2], [1, 2, 4]]
    for _ in range(60):  # the sum is right, so its chances are true, although the chain alone promised less
        own.observe(step([PlanNote(plan, {}, [0.5, 0.25], 4, 2, promised=1.15)], [1]))
        own.observe(step([PlanNote(plan, {}, [0.5, 0.25], 4, 2, promised=1.15)], [1]))
    assert own.models["model"].truth(0) == pytest.approx(1 / 1.15, rel=0.02)
    assert own.models["model"].pool.nodes == pytest.approx(4)


def test_drafts_of_one_length_do_not_say_that_a_drafter_states_no_chances() -> None:
    """They were not asked for. Other requests go on to end their drafts by what the drafter says."""
    own = planner()
    own.depths[1] = 4
    for unstated, known in ((replace(note(Plan("model", Budget(4)), view(1), 4), stated=False), True), (None, False)):
        [plan] = own.plan([view()])
        stated = unstated or replace(note(plan, view(), 2), stated=False)
        fixed = replace(stated.plan, why=plan.why)
        own.observe(step([replace(stated, plan=fixed)], [1]))
        [plan] = own.plan([view(slot=2)])
        assert (plan.budget.min_probability > 0) == known


def test_drafts_are_shorter_behind_a_long_text() -> None:
    """Each node attends to all of it. Steps behind it teach nothing wrong about a short text."""
    own = planner()
    own.costs.model = replace(own.costs.model, attention=1e-4)
    [before], [long] = own.plan([view(length=100)]), own.plan([view(length=8000)])
    assert 0.9 * before.price * 1.01 > long.price * 1.8  # the expected speeds, which are the prices of a plain step
    [again] = own.plan([view(length=100)])
    assert again == before
    for _ in range(30):
        [plan] = own.plan([view(length=9)])
        own.costs.model = replace(own.costs.model, attention=0.1)
        own.observe(step([note(plan, view(), 3)], [2], own.costs.model.forward(4) + 4 * 0.9))
    assert own.costs.drift["target"] == pytest.approx(1.0, abs=0.02)


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
    assert weighed.value > 0
    assert str(weighed).startswith("model 3.")
    assert str(weighed).endswith(", chosen")
    told = str(PlanNote(plan, {}))
    assert told.startswith("model drafts, a second is worth 2 tokens: model")


def test_what_never_pays_is_never_asked() -> None:
    """A draft as large as the target: not once in a thousand tokens."""
    own, asked = planner(level=1.0, read=0.1), 0
    for text in range(10):
        for written in range(1, 101):
            one = view(0, written, 101 - written)
            [plan] = own.plan([one])
            asked += plan.drafter is not None
            own.observe(step([note(plan, one)], [0]))
        own.release(0)
        assert own.plan([view(text + 1)])[0].why[0].verdict == "not worth it"
    assert asked == 0


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
        own.observe(step([note(plan, one, nodes, 0.8, charge)], [0], 1.0 + 0.07 * nodes, 0.61 if nodes else 0.0))
    assert 2 < len(asked) < 45
    assert len([n for n in asked if n < 20]) > len([n for n in asked if n > 300]), "less and less often"
    assert asked[-1] > 200, "and never for the last time"
    assert rests > 250, "a plan costs time too"


def test_lookups_are_not_kept_waiting_by_a_rest() -> None:
    """A text that begins to copy is seen at once: while lookups propose, every step has a plan."""
    own = planner(level=1.0, read=0.1)
    for written in range(1, 60):
        one = view(0, written, 500, 400, count=1 if written < 30 else 9)
        if not own.asks_lookups(0):
            one = replace(one, offers={})
        elif not own.budgets([0])[0].depth:
            raise AssertionError(f"no plan at {written}, though the lookups may be asked")
        if not own.budgets([0])[0].depth:
            own.observe(step([PlanNote(Plan(None), {})], [0]))
            continue
        [plan] = own.plan([one])
        own.observe(step([note(plan, one)], [0]))


def test_the_first_token_comes_first() -> None:
    own = planner()
    for missing in (1, 40):
        [plan] = own.plan([view(written=0, missing=missing)])
        assert plan.drafter is None
        assert plan.read is None
        assert plan.why[0].verdict == "the first token comes first"
    plans = [
        own.plan([view(0, written, 90, missing, fixed=True)])[0] for written, missing in ((0, 40), (0, 900), (1, 900))
    ]
    assert [plan.drafter for plan in plans[:2]] == ["model", None]
    assert plans[1].read is None
    assert plans[2].drafter or plans[2].read, "after one token it may read"


@pytest.mark.parametrize(("left", "asked"), [(6, False), (400, True)])
def test_a_prompt_is_read_only_for_an_answer_that_covers_it(left: int, asked: bool) -> None:
    own, read = planner(), 0
    for length in [left] * 32:
        own.answers.observe(10 + length)
    one = view(written=10, left=left, missing=300)
    [plan] = own.plan([one])
    read = plan.read[1] if plan.read else 0
    assert (read > 0) is asked
    if asked:
        assert 16 <= read < 299, "in pieces"
        assert own.costs.reading("model", read) < 4.5
    else:
        assert plan.why[0].verdict == "the rest of the answer may not cover the reading"


def test_one_sequence_reads_in_a_step() -> None:
    own = planner()
    plans = own.plan([view(slot, 20, 800, missing) for slot, missing in enumerate((90, 60, 100, 1))])
    assert [plan.read is not None for plan in plans] == [False, True, False, False]
    assert plans[3].drafter is None
    assert plans[3].why[0].verdict == "too few others draft"
    assert planner().plan([view(3, 20, 800, 1)])[0].drafter == "model", "alone it is worth it"


def test_a_lookup_that_found_a_long_match_wins_and_is_cut_where_it_does_not_pay() -> None:
    own, one = planner(), view(count=16)
    [plan] = own.plan([one])
    assert plan.drafter == "suffix"
    kept = own.verified([one], [plan], [plan.survival[1:]])
    assert 3 <= len(kept[0]) <= 16
    steep = Planner(Budget(16), Costs(CostModel({}, {1: 1.0, 16: 20.0}, {})))
    one = replace(one, missing={})
    [plan] = steep.plan([one])
    assert plan.drafter is None or len(steep.verified([one], [plan], [plan.survival[1:]])[0]) < 4


def test_of_two_equal_drafters_the_cheaper_one() -> None:
    own = planner(level=0.25, other=0.1)
    [plan] = own.plan([replace(view(), missing={"model": 1, "other": 1})])
    assert plan.drafter == "other"
    assert {w.name: w.verdict for w in plan.why} == {"model": "less", "other": "chosen"}


def test_a_dearer_level_never_drafts_more() -> None:
    least = [planner(level=level).plan([view()])[0] for level in (0.01, 0.05, 0.1, 0.2, 0.3)]
    sure = [plan.budget.min_probability if plan.drafter else 1.0 for plan in least]
    assert sure == sorted(sure)


def test_a_length_that_was_asked_for_is_kept_whatever_it_is_worth() -> None:
    own = planner(level=3.0)
    own.depths |= {1: 7, 2: 0}
    assert own.budgets([0, 1, 2]) == [Budget(16), Budget(7), Budget(0)]
    fixed = view(1, 0, fixed=True)
    [plan] = own.plan([replace(fixed, budget=Budget(7))])
    assert (plan.drafter, plan.budget) == ("model", Budget(7))
    assert own.verified([fixed], [plan], [[0.01] * 7]) == [list(range(1, 8))]
    own.release(1)
    assert own.budgets([1]) == [Budget(16)]


def test_a_request_with_a_length_of_its_own_keeps_the_tree() -> None:
    """Eight levels on a server of trees four wide with 16 nodes: still 16 nodes, not 32."""
    own = Planner(Budget(4, 4, 16), Costs(CostModel({}, TARGET)), None, Fixed(4, 4, 16))
    own.depths |= {1: 8, 2: 0}
    assert own.budgets([0, 1, 2]) == [Budget(4, 4, 16), Budget(8, 4, 16), Budget(0)]


def test_a_drawn_token_is_not_taken_back() -> None:
    own, one = planner(), view(drawn=True)
    [plan] = own.plan([one])
    assert own.verified([one], [plan], [[0.9, 0.001]]) == [[1, 2]]
    assert own.verified([replace(one, drawn=False)], [plan], [[0.9, 0.001]]) == [[1]]


def test_no_room_is_no_draft() -> None:
    own = planner()
    assert own.plan([view(left=1)])[0].drafter is None
    assert own.plan([replace(view(), budget=Budget(0))])[0].drafter is None
    assert own.plan([view(left=3)])[0].budget.depth == 2
    assert own.plan([view(left=90)])[0].budget.depth == 4, "a drafter's first draft is short: it may state no chances"


def test_a_busy_batch_drafts_less() -> None:
    """With more sequences a node costs more, and a plain step gives more tokens."""
    costs = {1: 1.0, 4: 1.1, 16: 2.0, 64: 8.0}
    sure = []
    for rows in (1, 4, 16):
        own = Planner(
            Budget(16), Costs(CostModel({}, costs, {"model": DraftCost(0.01, 0.1, 0.01)})), {"model": "sibling"}
        )
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


def test_lookups_that_never_find_anything_rest_where_asking_costs() -> None:
    own, asks = planner(level=2.0), 0
    for written in range(1, 200):
        one = view(0, written, 300)
        asks += (asking := own.asks_lookups(0))
        one = replace(one, offers={"suffix": offer(0)} if asking else {})
        [plan] = own.plan([one])
        own.observe(step([note(plan, one)], [0], 1.0, 0.15))
    assert 12 < asks < 40
    free, asks = planner(level=2.0), 0
    for written in range(1, 200):
        asks += free.asks_lookups(0)
        one = replace(view(0, written, 300), offers={"suffix": offer(0)})
        free.observe(step([note(free.plan([one])[0], one)], [0], 1.0, 0.0))
    assert asks == 199, "they are asked in every step where that takes no time"


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
    asked = dict[float, int]()
    for beside in (0.0, 0.3):
        own = planner(level=0.05)
        for text in range(60):
            for written in range(1, 25):
                if own.budgets([0])[0].depth == 0:
                    own.observe(
                        replace(
                            step([note(Plan(None), view())], [0]), draft=Draft(torch.zeros(1, 1), -torch.ones(1, 1))
                        )
                    )
                    continue
                one = view(0, written, 25 - written)
                [plan] = own.plan([one])
                charges = (Charge("model", 1, 1, 0, 0.06),) if plan.drafter else ()
                asked[beside] = asked.get(beside, 0) + (plan.drafter is not None and text >= 20)
                right = int(
                    plan.drafter is not None and written % 3 == 0
                )  # 0.33 tokens for 0.13 seconds, and the plan's
                made = note(plan, one, int(plan.drafter is not None), 0.33, charges)
                own.observe(
                    step([made], [right], 1.07 if plan.drafter else 1.0, beside + (0.06 if plan.drafter else 0.0))
                )
            own.release(0)
    assert asked[0.0] > 600
    assert asked[0.3] < 200


def test_the_state_is_told_in_words() -> None:
    own = planner()
    own.plan([view()])
    assert own.state().startswith(
        "texts that run now: 1.00 times plain decoding; model: a token costs 0.20 plain steps, 2."
    )
